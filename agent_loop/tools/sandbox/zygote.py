"""A zygote seen from the server: how it is started, what is asked of it, how it ends."""

import json
import os
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from agent_loop.tools.sandbox.host import INSIDE, interpreter
from agent_loop.tools.sandbox.program import SandboxUnavailable

START_S = 30.0
"""How long a zygote may take to load what it preloads."""

SEND_S = 5.0
"""How long it may take to hear an order; it does little else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a backend starts a zygote."""

    plan: Mapping[str, Any]
    """What `inside/` is told: namespaces, landlock, filter, readable, devices, folder, uid,
    packages, preload."""

    prefix: Sequence[str] = ()
    """Command that the interpreter is started by."""

    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()


class Zygote:
    """A running zygote. Closed, killed and reaped at the latest with the object.

    Args:
        launch: how it is started.
        name: of the sandbox, for messages.

    Raises:
        SandboxUnavailable: it did not start; its last words say why.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        self._name = name
        self.active = 0
        """Runs under way."""

        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack, theirs:
            stack.callback(self._control.close)
            spoken = os.memfd_create("zygote")
            stack.callback(os.close, spoken)
            argv = [
                *launch.prefix,
                *(interpreter(), "-I", "-S", "-X", "utf8", str(INSIDE)),
                *(str(theirs.fileno()), json.dumps(launch.plan)),
            ]
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=spoken,
                    cwd="/",
                    env=dict(launch.env),
                    pass_fds=(theirs.fileno(), *launch.pass_fds),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(
                    f"cannot start sandbox={name} ({error}): its programs must be installed"
                ) from error
            theirs.close()
            stack.callback(_end, self._control, process)
            self._control.settimeout(START_S)
            try:
                is_ready = self._control.recv(64) == b"ready"
            except OSError:
                is_ready = False
            if not is_ready:
                words = os.pread(spoken, 1 << 16, 0).decode(errors="replace").strip()
                last = words.splitlines()[-1] if words else "it said nothing"
                raise SandboxUnavailable(f"sandbox={name} does not start ({last})")
            self._control.settimeout(SEND_S)
            os.close(spoken)
            stack.pop_all()
        self.process = process
        self.close = weakref.finalize(self, _end, self._control, process)

    @property
    def is_alive(self) -> bool:
        return self.close.alive and not _has_ended(self.process)

    def order(self, order: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell it something.

        Raises:
            SandboxUnavailable: it does not listen; it is ended then.
        """
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], list(fds))
        except OSError as error:
            self.close()
            raise SandboxUnavailable(
                f"sandbox={self._name} does not listen ({error}): its runs are lost, and the next "
                "call starts it anew"
            ) from error


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """It ends when its orders end; all of its runs with it. Killed where it does not."""
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has, without burying it: until `_end` its number stays its own, so that no other
    process group can be killed in its stead."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has buried it
        return True
