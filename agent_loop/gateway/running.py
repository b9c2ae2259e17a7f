"""The processes of one session's program: started, waited for and ended without blocking the loop.

A guard (`tool_server.isolation.guard`) is above the program, or above the bwrap of its sandbox. It
ends everything that the program has started, also if the worker dies, and then itself.
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

STDOUT_BYTES, STDERR_BYTES = 1 << 16, 4096
"""Bytes that are kept of what a program prints: the last ones."""

PIPE_BYTES = 1 << 20
"""Most that a program can have put into a pipe (/proc/sys/fs/pipe-max-size)."""

TERM_S = 1.0
"""Time that a program has after SIGTERM. In a sandbox nothing gets it but bwrap, which ends."""

KILL_S = 5.0
"""Longest wait for the kernel to end processes after SIGKILL; it takes milliseconds."""


class Running:
    """One session's processes. `stop` must be called in the end.

    Args:
        command: absolute path of the program, and its arguments.
        open_fds: closes what they hold of this process.
        options: of `subprocess.Popen`.

    Raises:
        OSError: no process or descriptor is left.
    """

    def __init__(self, command: Sequence[str], open_fds: ExitStack, **options: Any) -> None:
        with ExitStack() as ends:
            self._out = _Tail(STDOUT_BYTES, open_fds, ends)
            self._err = _Tail(STDERR_BYTES, open_fds, ends)
            options |= {"stdout": self._out.write_end, "stderr": self._err.write_end}
            self._process, self._end = guarded(command, **options)
        self._pidfd = os.pidfd_open(self._process.pid)
        open_fds.callback(os.close, self._pidfd)

    async def begun(self, control: socket.socket) -> list[int]:
        """The descriptors that a program in a sandbox sends when it begins; none if it cannot."""
        await _until_readable(control.fileno())
        with suppress(ConnectionError):
            return socket.recv_fds(control, 16, 2)[1]
        return []

    async def ended(self) -> None:
        """Wait until the command has ended, and everything that it started."""
        await _until_readable(self._pidfd)

    async def stop(self) -> None:
        """End everything. A cancellation ends the time after SIGTERM, and is raised at the end."""
        try:
            if self._process.poll() is None:
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
        except TimeoutError as error:
            raise RuntimeError(
                f"processes of pid={self._process.pid} do not end within {KILL_S} s of SIGKILL: "
                "the kernel holds them; look for what they wait for in /proc/PID/stack"
            ) from error
        finally:
            self._out.read()
            self._err.read()
            self._process.poll()  # its end was seen, so this collects it

    @property
    def exit_code(self) -> int:
        """Of the command; negative if a signal ended it. bwrap writes 128 + signal, as shells do,
        so a command that exits with such a code seems to be killed."""
        code = self._process.returncode
        assert code is not None, "it was waited for"
        return 128 - code if 128 < code <= 128 + signal.NSIG else code

    @property
    def stdout(self) -> str:
        return self._out.kept.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.kept.decode(errors="replace")


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
