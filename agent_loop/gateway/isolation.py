"""Namespaces of an agent program: the options of bubblewrap, on the host and in a sandbox.

See bwrap(1), namespaces(7). `program` starts what is described here; `inside` runs in it first.
"""

import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tool_server.isolation.bubblewrap import (
    UIDS,
    binds,
    require_own_counts,
    user_namespace,
)
from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import interpreter, memory_file, program
from tool_server.isolation.seccomp import build_filter

INSIDE = str(Path(__file__).with_name("inside.py"))

FOLDER, HOME, ROW = "/tmp/session", "/tmp/home", "/row.json"
"""Of a program in a sandbox, which can write to /tmp and /dev/shm alone."""

FILES_MB = 512
"""Largest size of /tmp of one sandbox, and of /dev/shm. Files there take the host's memory, so they
count in `memory_mb`."""

_SYSTEM = (
    *("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/localtime", "/etc/mime.types"),
)
"""Of /etc only what programs need; what names users or machines is written anew."""

_ETC = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nagent:x:{uid}:{uid}::" + HOME + ":/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:{uid}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

_ENV = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh"}

_ENDS_TOGETHER = ("--unshare-pid", "--die-with-parent", "--new-session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How one session's program is started."""

    kind: str
    """`sandbox` or `host`."""

    prefix: Sequence[str] = ()
    """bwrap and its options; a guard takes its place if it is empty."""

    settings: Sequence[str] = ()
    """For `inside`."""

    fds: Sequence[int] = ()
    cwd: str
    folder: str
    """The session's folder."""

    row_file: str
    stdin: int
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that replace those of the worker."""


def host_start(open_fds: ExitStack, folder: str, cwd: str | None, bwrap: str | None) -> Start:
    """On the host, in a pid namespace if there is a `bwrap`. The row is in the folder."""
    prefix: list[str] = []
    if bwrap is not None:
        keep = ("--cap-add", "ALL") if os.geteuid() == 0 else ()
        prefix = [bwrap, *_ENDS_TOGETHER, *keep, "--dev-bind", "/", "/", "--proc", "/proc"]
    row_file = f"{folder}/row.json"
    stdin = os.open(row_file, os.O_RDONLY | os.O_CLOEXEC)
    open_fds.callback(os.close, stdin)
    return Start(
        kind="host",
        prefix=prefix,
        cwd=cwd or folder,
        folder=folder,
        row_file=row_file,
        stdin=stdin,
    )


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is the folder or below it, whatever links lead there."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _masks(shown: Mapping[str, str], hidden: Sequence[str]) -> list[str]:
    """Options of bwrap that put something empty over what is hidden of the shown folders.

    Args:
        shown: each with the folder that it leads to.
    """
    masked, argv = list[str](), list[str]()
    for path in sorted({os.path.realpath(each) for each in hidden}):  # a folder before its files
        if not os.path.exists(path) or any(path.startswith(f"{folder}/") for folder in masked):
            continue
        masked.append(path)
        for folder, there in shown.items():
            if not path.startswith(f"{there}/"):
                continue
            at = folder + path.removeprefix(there)
            if os.path.isdir(path):
                argv += ["--tmpfs", at, "--remount-ro", at]
            else:
                argv += ["--ro-bind", os.devnull, at]
    return argv


class AgentSandbox:
    """Sandboxes with the same readable files and limits.

    Args:
        hidden: files and folders that are empty in it, also where a readable folder has them.

    Raises:
        SandboxUnavailable: there is no bwrap, or the kernel refuses what it needs.
    """

    def __init__(
        self, readable: Sequence[str], hidden: Sequence[str], memory_mb: int, processes: int
    ) -> None:
        require_own_counts()
        self._memory_bytes, self._processes = memory_mb << 20, processes
        self._filter = build_filter(processes=True, agent=True)
        open_fds = ExitStack()
        weakref.finalize(self, open_fds.close)
        self._users = user_namespace(open_fds) if os.geteuid() == 0 else None
        # The kernel counts processes by user and does not limit root. So if the worker is root, the
        # sandboxes that run at the same time have different users.
        self._uids = deque(UIDS)
        interpreters = (sys.prefix, sys.base_prefix, interpreter(), INSIDE)
        paths = [path for path in (*_SYSTEM, *interpreters, *readable) if os.path.exists(path)]
        temporary = tempfile.gettempdir()  # with the folders of other sessions
        if not any(lies_in(path, temporary) for path in paths):
            hidden = [*hidden, temporary]
        self._shown = {path: os.path.realpath(path) for path in paths}
        self._hidden = hidden
        size = str(FILES_MB << 20)
        self._before_masks = [
            *(program("bwrap"), *_ENDS_TOGETHER),
            *("--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/tmp"),
            *binds([*self._shown]),
        ]
        self._after_masks = [
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm"),
        ]

    def start(self, open_fds: ExitStack, row: bytes, port: int, cwd: str | None) -> Start:
        """What it holds is free again when `open_fds` closes."""
        uid, fds = UIDS.start, list[int]()
        masks = _masks(self._shown, self._hidden)  # anew: checkpoints are made in the run
        options = [*self._before_masks, *masks, *self._after_masks]

        def data(content: bytes) -> str:
            fds.append(memory_file(open_fds, content))
            return str(fds[-1])

        if self._users is None:
            options += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
        else:
            if not self._uids:
                raise SandboxUnavailable(
                    f"{len(UIDS)} sessions run at once: there is no further user for a sandbox; "
                    "use more agent loop workers"
                )
            uid = self._uids.popleft()
            open_fds.callback(self._uids.append, uid)
            fds.append(self._users)
            # `inside` takes the user, and loses these by it
            options += ["--userns", str(self._users), "--cap-add", "CAP_SETUID"]
            options += ["--cap-add", "CAP_SETGID"]
        for path, text in _ETC.items():
            options += ["--perms", "0444", "--file", data(text.format(uid=uid).encode()), path]
        options += ["--perms", "0444", "--file", data(row), ROW]
        # The root and /dev are tmpfs without a limit.
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", data(self._filter)]
        limits = (port, uid if self._users is not None else 0, self._memory_bytes)
        return Start(
            kind="sandbox",
            prefix=options,
            settings=[*map(str, limits), str(self._processes)],
            fds=fds,
            cwd=cwd or FOLDER,
            folder=FOLDER,
            row_file=ROW,
            stdin=memory_file(open_fds, row),
            env=_ENV,
        )
