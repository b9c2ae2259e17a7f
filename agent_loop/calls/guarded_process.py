"""A program of a user under a guard: started, waited for and ended without blocking the loop.

The guard (`tool_server.isolation.guard`) is above the program, or above the bwrap of its sandbox.
It ends everything that the program has started, also if this process dies, and then itself.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from agent_loop.calls.child_process import uninterrupted
from config.compat import timeout
from tool_server.isolation.guard import guarded

KEPT = {"stdout": 1 << 16, "stderr": 4096}
"""Bytes that are kept of what a program prints: the last ones."""

PIPE_BYTES = 1 << 20
"""Most that a program can have put into a pipe (/proc/sys/fs/pipe-max-size)."""

TERM_S = 1.0
"""Time that a program has after SIGTERM. In a sandbox nothing gets it but bwrap, which ends."""

KILL_S = 5.0
"""Longest wait for the kernel to end processes after SIGKILL; it takes milliseconds."""


class GuardedProcess:
    """A program and what it starts. `stop` must be called in the end.

    Args:
        command: absolute path of the program, and its arguments.
        open_fds: closes what they hold of this process.
        options: of `subprocess.Popen`; without `stdout`, its end is kept.

    Raises:
        OSError: no process or descriptor is left.
    """

    def __init__(self, command: Sequence[str], open_fds: ExitStack, **options: Any) -> None:
        with ExitStack() as ends:
            kept = {name: size for name, size in KEPT.items() if name not in options}
            self._tails = {name: _Tail(size, open_fds, ends) for name, size in kept.items()}
            options |= {name: tail.write_end for name, tail in self._tails.items()}
            self.process, self._end = guarded(command, **options)
            open_fds.callback(self._end)
        self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self.process.pid)
        open_fds.callback(os.close, self._pidfd)
        self._loop.add_reader(self._pidfd, self._note_end)
        open_fds.callback(self._loop.remove_reader, self._pidfd)

    async def begun(self, control: socket.socket) -> list[int]:
        """The descriptors that a program in a sandbox sends when it begins; none if it cannot."""
        await _until_readable(control.fileno())
        with suppress(ConnectionError):
            return socket.recv_fds(control, 16, 2)[1]
        return []

    async def ended(self) -> None:
        """Wait until the command has ended, and everything that it started."""
        await self._ended.wait()

    async def ends_within(self, limit_s: float) -> bool:
        """Whether it has ended, or does so within this time."""
        with suppress(TimeoutError):
            async with timeout(limit_s):
                await self.ended()
        return self._ended.is_set()

    async def stop(self, exit_s: float = 0.0) -> None:
        """End everything. A cancellation ends the waits, and is raised at the end.

        Args:
            exit_s: time in which the program may end by itself, before SIGTERM.
        """
        try:
            if not await self.ends_within(exit_s):
                self.process.terminate()  # the guard passes it on
                await self.ends_within(TERM_S)
        finally:
            self._end()
            if not await uninterrupted(self.ends_within(KILL_S)):
                raise RuntimeError(
                    f"processes of pid={self.process.pid} do not end within {KILL_S} s of SIGKILL: "
                    "the kernel holds them; look for what they wait for in /proc/PID/stack"
                )

    def _note_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        for tail in self._tails.values():
            tail.read()
        self.process.poll()
        self._ended.set()

    @property
    def exit_code(self) -> int:
        """Of the command; negative if a signal ended it. bwrap writes 128 + signal, as shells do,
        so a command that exits with such a code seems to be killed."""
        code = self.process.returncode
        assert code is not None, "it was waited for"
        return 128 - code if 128 < code <= 128 + signal.NSIG else code

    def printed(self, name: str = "stderr") -> str:
        """The end of what it wrote to stdout or stderr."""
        return self._tails[name].kept.decode(errors="replace")


class _Tail:
    """The last bytes of what is written to a pipe.

    Args:
        open_fds: closes the end that is read.
        ends: closes `write_end`, when the program has it.
    """

    def __init__(self, size: int, open_fds: ExitStack, ends: ExitStack) -> None:
        self._size, self.kept, self._loop = size, bytearray(), asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        ends.callback(os.close, self.write_end)
        open_fds.callback(os.close, self._read_end)
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self.read)
        open_fds.callback(self._loop.remove_reader, self._read_end)

    def read(self) -> None:
        """Take what there is. The end of the pipe is not waited for: who is no descendant of the
        program may hold it open."""
        with suppress(BlockingIOError):
            data = os.read(self._read_end, PIPE_BYTES)
            if not data:
                self._loop.remove_reader(self._read_end)
            self.kept += data
            del self.kept[: -self._size]


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)
