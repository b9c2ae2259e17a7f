"""Collector of a program's output: reads a pipe and keeps the beginning."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack

CUT_MARK = "\n... [cut: {what} has more than {limit} bytes]\n"

DROPPED_BYTES = 64 << 20
"""A program that writes this much beyond the limit is killed."""

_CHUNK_BYTES = 64 * 1024
_PIPE_CHUNKS = (1 << 20) // _CHUNK_BYTES + 1  # the largest pipe of an ordinary user, and its end


class Collector:
    """Reads a pipe to its end and keeps the beginning.

    Args:
        limit_bytes: bytes that are kept.
        end: called with the reason when more than `DROPPED_BYTES` were dropped.
        until: bytes after which reading stops before the pipe ends; empty reads to the end.
    """

    def __init__(
        self, limit_bytes: int, end: Callable[[str], None] = lambda why: None, until: bytes = b""
    ) -> None:
        self.data = bytearray()
        self.dropped = 0
        self.on_data: Callable[[bytes], None] | None = None
        """Called with all bytes so far, each time that some arrive."""

        self._limit, self._end, self._until = limit_bytes, end, until
        self._fd = -1
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd, self._loop = fd, asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
        if not self.ended.done():
            self.ended.cancel()

    def read_rest(self) -> None:
        """Read what is in the pipe now; the pipe may stay open, and be written to."""
        for _ in range(_PIPE_CHUNKS):
            if self._fd < 0 or not self._read():
                break

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._stop()
            return False
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        before, self.dropped = self.dropped, self.dropped + max(0, len(chunk) - room)
        if before <= DROPPED_BYTES < self.dropped:
            self._end("its output")
        if self.on_data is not None:
            self.on_data(bytes(self.data))
        if self._until and self.data.endswith(self._until):
            self._stop()
            return False
        return True

    def _stop(self) -> None:
        self._loop.remove_reader(self._fd)
        self._fd = -1
        if not self.ended.done():
            self.ended.set_result(None)

    def text(self, what: str) -> str:
        """The output that was kept, with a mark if it was cut."""
        text = self.data.decode(errors="replace")
        return text + CUT_MARK.format(what=what, limit=self._limit) if self.dropped else text


def pipe_to(collector: Collector, open_fds: ExitStack, child_fds: ExitStack) -> int:
    """Create a pipe that the collector reads; returns its other end, closed with `child_fds`."""
    read, write = os.pipe()
    open_fds.callback(os.close, read)
    child_fds.callback(os.close, write)
    collector.begin(read)
    return write
