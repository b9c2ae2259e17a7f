"""The server's side of a zygote: starts it, sends it orders, kills it.

A zygote is an interpreter that has loaded common modules and forks a process for each program
(`inside/__main__.py`).
"""

import json
import os
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tool_server.isolation import confine
from tool_server.isolation.errors import PackageUnusable, SandboxUnavailable
from tool_server.isolation.host import interpreter
from tool_server.sandbox.inside.parts import NOT_IMPORTED

INSIDE = Path(__file__).parent / "inside"

READABLE = (INSIDE, Path(confine.__file__))
"""Files of ours that a zygote reads."""

START_S = 30.0
"""How long a zygote may take to load what it preloads."""

FIRST_OUT_OF_MEMORY = (
    *("/bin/sh", "-c", 'echo 1000 >/proc/self/oom_score_adj && exec "$@"', "sandbox"),
)
"""Begins the command of a zygote: if the host runs out of memory, the kernel kills programs before
it kills a process of the training. It cannot be taken back without CAP_SYS_RESOURCE."""

SEND_S = 5.0
"""How long a zygote may take to receive an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a backend starts a zygote."""

    plan: Mapping[str, Any]
    """Settings that the zygote gets as JSON: namespaces, landlock, filter, readable, devices,
    read_only, folder, tmp, uid, uids, packages, preload."""

    prefix: Sequence[str] = ()
    """Command that starts the interpreter, for example bwrap with its options."""

    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()


class Zygote:
    """A running zygote; it is killed and reaped by `close`, or when the object is collected.

    Raises:
        SandboxUnavailable: it did not start; the message has the last line of its stderr.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        self._name = name
        self.active = 0
        """Runs under way."""

        self._control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack, child:
            stack.callback(self._control.close)
            stderr = os.memfd_create("zygote")
            stack.callback(os.close, stderr)
            argv = [
                *FIRST_OUT_OF_MEMORY,
                *launch.prefix,
                # Judges lift Python's limit of 4,300 digits; a program has a limit of CPU time.
                *(interpreter(), "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0"),
                str(INSIDE),
                *(str(child.fileno()), json.dumps(launch.plan)),
            ]
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    cwd="/",
                    env=dict(launch.env),
                    pass_fds=(child.fileno(), *launch.pass_fds),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(
                    f"cannot start sandbox={name} ({error}): check that its programs are installed"
                ) from error
            child.close()
            stack.callback(_end, self._control, process)
            self._control.settimeout(START_S)
            try:
                is_ready = self._control.recv(64) == b"ready"
            except OSError:
                is_ready = False
            if not is_ready:
                lines = os.pread(stderr, 1 << 16, 0).decode(errors="replace").strip().splitlines()
                last = lines[-1] if lines else "no message on stderr"
                if last.startswith(NOT_IMPORTED):
                    raise PackageUnusable.in_sandbox(name, last)
                raise SandboxUnavailable(f"sandbox={name} does not start ({last})")
            self._control.settimeout(SEND_S)
            os.close(stderr)
            stack.pop_all()
        self.process = process
        self.close = weakref.finalize(self, _end, self._control, process)

    @property
    def is_alive(self) -> bool:
        return self.close.alive and not _has_ended(self.process)

    def order(self, order: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send an order; `inside/__main__.py` lists the orders.

        Raises:
            SandboxUnavailable: the zygote does not receive the order; it is killed.
        """
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], list(fds))
        except OSError as error:
            self.close()
            raise SandboxUnavailable(
                f"sandbox={self._name} does not answer ({error}): its runs are lost; the next call "
                "starts a new one"
            ) from error


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Kill and reap a zygote; its runs die with it."""
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether the process has ended. It is not reaped here: its pid stays reserved until `_end`, so
    that `killpg` cannot hit another process group that got the same number."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it was reaped elsewhere
        return True
