"""The processes of one session's program: started, waited for and ended without blocking the loop.

On the host a guard is above the program (`tool_server.isolation.guard`). In a sandbox it is the
first process of a pid namespace, which dies with bwrap and with the worker: the kernel then kills
all others in the namespace, and its own end comes after theirs.
"""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from agent_loop.calls.child_process import uninterrupted
from config.compat import timeout
from tool_server.isolation.guard import guarded
from tool_server.isolation.proc import descendants

STDOUT_BYTES, STDERR_BYTES = 1 << 16, 4096
"""Bytes that are kept of what a program prints: the last ones."""

TERM_S = 1.0
"""Time that a program on the host has after SIGTERM. In a sandbox it has nothing to clean up."""

KILL_S = 5.0
"""Longest wait for the kernel to end processes after SIGKILL; it takes milliseconds."""


class Running:
    """One session's processes.

    Args:
        command: absolute path of the program, and its arguments.
        in_namespace: whether it is bwrap with a pid namespace; else it gets a guard.
        open_fds: closes what they hold of this process.
        options: of `subprocess.Popen`.

    Raises:
        OSError: no process or descriptor is left.
    """

    def __init__(
        self, command: Sequence[str], in_namespace: bool, open_fds: ExitStack, **options: Any
    ) -> None:
        self._open_fds, self._in_namespace = open_fds, in_namespace
        self._init = -1
        """pidfd of the first process of the pid namespace."""

        self._tails = _Tail(STDOUT_BYTES), _Tail(STDERR_BYTES)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in self._tails]
        self._pipes = [os.fdopen(read_end, "rb", 0) for read_end, _ in pipes]
        for pipe in self._pipes:
            open_fds.callback(pipe.close)
        options |= {"stdout": pipes[0][1], "stderr": pipes[1][1]}
        self._end: Callable[[], None] = self._kill_namespace
        try:
            if in_namespace:
                # The thread that calls this must live as long as the session, because the kernel
                # sends the signal at the parent's death when the thread ends.
                self._process = subprocess.Popen[bytes](command, start_new_session=True, **options)
            else:
                self._process, self._end = guarded(command, **options)
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        self._pidfd = self._held(os.pidfd_open(self._process.pid))

    async def read(self) -> None:
        """Begin to read its output."""
        for tail, pipe in zip(self._tails, self._pipes, strict=True):
            await asyncio.get_running_loop().connect_read_pipe(lambda tail=tail: tail, pipe)

    async def begun(self, control: socket.socket) -> list[int]:
        """The descriptors that a program in a sandbox sends when it begins; none if it cannot."""
        await _until_readable(control.fileno())
        try:
            _, fds, _, _ = socket.recv_fds(control, 16, 2)
        except ConnectionError:
            return []
        for fd in fds:
            self._held(fd)
        self._find_init()
        return fds

    async def ended(self) -> None:
        """Wait until the command has ended, and everything that it started."""
        await _until_readable(self._pidfd)
        if self._init >= 0:
            await _until_readable(self._init)

    async def stop(self) -> None:
        """End everything. A cancellation ends the time after SIGTERM, and is raised at the end."""
        try:
            if not self._in_namespace and self._process.poll() is None:
                with suppress(ProcessLookupError):  # the guard is in this group and does not heed
                    os.killpg(self._process.pid, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with timeout(TERM_S):
                        await self.ended()
        finally:
            self._end()
            await uninterrupted(self._gone())

    async def _gone(self) -> None:
        try:
            async with timeout(KILL_S):
                await self.ended()
                for tail in self._tails:
                    if tail.transport is not None:
                        await tail.is_whole.wait()
        except TimeoutError as error:
            raise RuntimeError(
                f"processes of pid={self._process.pid} do not end within {KILL_S} s of SIGKILL: "
                "the kernel holds them; look for what they wait for in /proc/PID/stack"
            ) from error
        finally:
            for tail in self._tails:
                if tail.transport is not None:
                    tail.transport.close()
            self._process.poll()  # its end was seen, so this collects it

    def _kill_namespace(self) -> None:
        if self._init < 0 and self._process.poll() is None:
            self._find_init()
        with suppress(ProcessLookupError):
            if self._init >= 0:
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            elif self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _find_init(self) -> None:
        first = next(descendants(self._process.pid), None)
        if first is not None:
            with suppress(ProcessLookupError):
                self._init = self._held(os.pidfd_open(first))

    @property
    def exit_code(self) -> int:
        """Of the command; negative if a signal ended it. bwrap writes 128 + signal, as shells do,
        so a command that exits with such a code seems to be killed."""
        code = self._process.returncode
        assert code is not None, "it was waited for"
        return 128 - code if 128 < code <= 128 + signal.NSIG else code

    @property
    def stdout(self) -> str:
        return self._tails[0].kept.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._tails[1].kept.decode(errors="replace")

    def _held(self, fd: int) -> int:
        self._open_fds.callback(os.close, fd)
        return fd


class _Tail(asyncio.Protocol):
    """The last bytes of what a pipe brings."""

    def __init__(self, size: int) -> None:
        self._size, self.kept, self.is_whole = size, bytearray(), asyncio.Event()
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[: -self._size]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_whole.set()


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)
