"""Waiting in line, one by one in order of arrival: processes in a file, callers within a process.

Between processes a place in line is a locked byte far beyond the end of a file (`FileLine`). The
kernel frees it when the process dies.

Within a process only the first of a `Line` acts, the others sleep until they are called. Order
alone decides who is first, being called only tells it: whoever leaves, by success, timeout or
cancellation, makes room for the next, and no turn is lost on the way. A task whose loop is blocked
holds up those behind it.

Source: fcntl(2), "Open file description locks" (Linux 3.15).
"""

import asyncio
import fcntl
import os
import struct
import threading
from collections import OrderedDict
from functools import lru_cache

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, 64 bit: type, whence, start, length, pid (0)
_LINE = 1 << 40  # the first byte of the line
_END = 2**63 - 1
_WHOLE_LINE = _FLOCK.pack(fcntl.F_WRLCK, 0, _LINE, _END - _LINE, 0)
_NOBODY = fcntl.F_UNLCK.to_bytes(2, "little")


@lru_cache(maxsize=1024)
def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, 0, byte, 1, 0)


class ByteLocks:
    """Locked bytes of an open file; locks through one handle do not exclude each other."""

    def __init__(self, handle: int):
        self.handle: int = handle

    def lock(self, byte: int) -> bool:
        """Lock a byte, unless another handle has it."""
        try:
            fcntl.fcntl(self.handle, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def wait_and_lock(self, byte: int) -> None:
        """Lock a byte when it comes free."""
        fcntl.fcntl(self.handle, fcntl.F_OFD_SETLKW, _request(fcntl.F_WRLCK, byte))

    def unlock(self, byte: int) -> None:
        """Unlock a byte; none when the handle is closed."""
        if self.handle >= 0:
            fcntl.fcntl(self.handle, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))

    def other(self, start: int, end: int) -> tuple[int, int] | None:
        """Start and end of a lock of another handle in the range: of any one, not the lowest."""
        if start >= end:  # a length of 0 would mean without end
            return None
        query = _FLOCK.pack(fcntl.F_WRLCK, 0, start, end - start, 0)
        answer = fcntl.fcntl(self.handle, fcntl.F_OFD_GETLK, query)
        kind, _, start, length, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            return None
        return start, start + length if length else _END

    def count(self, start: int, end: int) -> int:
        """How many bytes from `start` to before `end` other handles have locked."""
        found, ranges = 0, [(start, end)]
        while ranges:
            start, end = ranges.pop()
            if (other := self.other(start, end)) is not None:
                first, last = max(start, other[0]), min(end, other[1])
                found += last - first
                ranges += [(start, first), (last, end)]
        return found

    def close(self) -> None:
        """Close the handle; its locks stay while a forked process has a copy of it."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()


class FileLine:
    """The line of processes in a file, and our place in it.

    Needs no counter: who joins walks to the end of the line and locks the byte there. Those passed
    over (`pass_over_first`) are left out of account until they are gone.
    """

    def __init__(self, locks: ByteLocks):
        self._locks = locks
        self._place = 0  # our byte; 0 for none
        self._passed_over = 0  # this byte and all before it

    def is_empty(self) -> bool:
        """Whether nobody else stands in line."""
        if self._passed_over:
            return self._locks.other(self._start(), _END) is None
        return fcntl.fcntl(self._locks.handle, fcntl.F_OFD_GETLK, _WHOLE_LINE)[:2] == _NOBODY

    def stand(self) -> int:
        """Join, or keep our place; returns how many stand before us."""
        if not self._place:
            end = _LINE
            while (other := self._locks.other(end, _END)) is not None:
                end = other[1]
            if not self._locks.lock(end):
                return 1  # somebody was quicker: join at the next poll
            self._place = end
        return self._locks.count(self._start(), self._place)

    def leave(self) -> None:
        """Give up our place, if we have one."""
        place, self._place = self._place, 0
        if place:
            self._locks.unlock(place)

    def pass_over_first(self) -> int:
        """Take no more account of the first in line before us; returns its place."""
        start, first = self._start(), self._place
        while (other := self._locks.other(start, first)) is not None:
            first = other[0]
        self._passed_over = first if first < self._place else 0
        return first - _LINE

    def count(self) -> int:
        """How many stand in line, we included."""
        return bool(self._place) + self._locks.count(_LINE, _END)

    def _start(self) -> int:
        passed_over = self._passed_over
        if passed_over and self._locks.other(passed_over, passed_over + 1) is None:
            self._passed_over = 0
        return max(_LINE, self._passed_over + 1)


class ThreadPlace:
    """A thread's place in a line."""

    def __init__(self) -> None:
        self._called = threading.Event()

    def call(self) -> bool:
        """Tell it that it is first; from any thread. False when nobody can hear it any more."""
        self._called.set()
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Wait to be called, and no longer than `timeout_s`."""
        self._called.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


class TaskPlace:
    """The running task's place in a line."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._called: asyncio.Future[None] = self._loop.create_future()

    def call(self) -> bool:
        """As `ThreadPlace.call`."""
        try:
            self._loop.call_soon_threadsafe(self._hear)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def wait(self, timeout_s: float | None) -> None:
        """As `ThreadPlace.wait`."""
        await asyncio.wait([self._called], timeout=timeout_s)

    def _hear(self) -> None:
        if not self._called.done():
            self._called.set_result(None)


Place = ThreadPlace | TaskPlace


class Line:
    """Places in order of arrival. Its owner sees to it that one thread at a time changes it."""

    def __init__(self) -> None:
        self._places: OrderedDict[Place, None] = OrderedDict()
        self.first: Place | None = None
        """Whose turn it is; None when nobody waits."""

    def join(self, place: Place) -> None:
        """Stand at the end."""
        self._places[place] = None
        if self.first is None:
            self.first = place

    def leave(self, place: Place) -> None:
        """Go, wherever in the line; a new first is called. Without a place nothing happens."""
        self._places.pop(place, None)
        if place is not self.first:
            return
        while self._places:
            self.first = first = next(iter(self._places))
            if first.call():
                return
            self._places.pop(first, None)
        self.first = None
