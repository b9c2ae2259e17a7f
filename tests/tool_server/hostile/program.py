"""What a hostile program is, and what all of them begin with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tool_server.sandbox import Limits, RunStatus

LIMITS = Limits(
    wall_s=2.0,
    cpu_s=2,
    memory_mb=128,
    output_bytes=20_000,
    file_mb=2,
    files=60,
    processes=16,
)
ENDLESS = Limits(
    wall_s=0.5,
    cpu_s=2,
    memory_mb=128,
    output_bytes=20_000,
    file_mb=2,
    files=60,
    processes=16,
)
"""For what never ends by itself."""

ALL = ("bubblewrap", "landlock")

SECRET_WORD = "hostile_" + "secret_"
"""Begins every secret; never written in one piece, so that it is not found where it is looked for
by the one who looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A small program and what it means that it is contained.

    It says `REACHED ...` for whatever it should not have got. None does lasting harm to a host that
    fails to contain it: its numbers are bounded, and it signals processes that it may hurt only.
    In `code`, `@SECRET@` becomes a secret of this run.
    """

    name: str
    category: str
    code: str
    language: str = "python"
    """Or `cell`: Python as a cell of a session."""

    limits: Limits = LIMITS
    rungs: tuple[str, ...] = ALL
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    """Asked back; at most `fetched_mb` in all may come."""

    fetched_mb: int = 0

    then: str = ""
    """A program run after it, which must reach nothing either."""

    beside: str = ""
    """A program of somebody else's, running at the same time."""

    statuses: tuple[RunStatus, ...] = tuple(RunStatus)
    return_codes: tuple[int, ...] = ()
    """Right ones; none means any."""

    closed_while_running: bool = False
    """The sandbox is closed once a process named `MARKED` is there."""

    oom_score_seen: bool = False
    """The process named `MARKED` must be the kernel's first choice when memory is short."""


MARKED = "hostile-marked"

_PRELUDE = """
import ctypes, errno, json, mmap, os, platform, signal, socket, struct, sys, threading, time
from types import SimpleNamespace
libc = ctypes.CDLL(None, use_errno=True)
HOST = SimpleNamespace(**json.loads(@HOST@))
SECRET_WORD = HOST.secret_words[0] + HOST.secret_words[1]
IS_X86 = platform.machine() == "x86_64"

def reached(what):
    os.write(1, f"REACHED {what}\\n".encode())

def attempt(what, action):
    "Whatever it gives is too much; it should raise."
    try:
        value = action()
    except (OSError, MemoryError, RuntimeError, ValueError, AttributeError, ImportError):
        return None
    reached(f"{what} {value!r:.120}")
    return value

def refused(what, function, *args):
    "A system call that must not even look at its arguments."
    ctypes.set_errno(0)
    if function(*args) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        reached(f"{what} ({os.strerror(ctypes.get_errno())})")

def call(x86_64, aarch64):
    return lambda *args: libc.syscall(x86_64 if IS_X86 else aarch64, *args)

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

def shared(size):
    "Memory of all processes of this program: a file, as shared memory without one is refused."
    fd = os.open("shared", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    return mmap.mmap(fd, size)

def read(path):
    with open(path, "rb") as file:
        return file.read(64)
"""


def python(code: str, host: Mapping[str, Any]) -> str:
    """The whole program."""
    return _PRELUDE.replace("@HOST@", repr(json.dumps(dict(host)))) + code
