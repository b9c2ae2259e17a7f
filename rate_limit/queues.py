"""First-come queues: of processes, in a file (`ProcessQueue`); of callers in a process
(`CallerQueue`).

A process's place in a `ProcessQueue` is a locked byte far beyond the end of a file. The kernel
frees the byte when the process dies.

In a `CallerQueue` only the first caller acts; the others sleep until they are woken. A task whose
event loop is blocked delays the callers behind it.

Source: fcntl(2), "Open file description locks" (Linux 3.15).
"""

import asyncio
import fcntl
import os
import struct
import threading
from collections import OrderedDict

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, 64 bit: type, whence, start, length, pid (0)
_LINE = 1 << 40  # the first byte of the queue
_END = 2**63 - 1


def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, 0, byte, 1, 0)


class ByteLocks:
    """Locked bytes of an open file. Locks of the same handle do not exclude each other."""

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
        """Unlock a byte; does nothing if the handle is closed."""
        if self.handle >= 0:
            fcntl.fcntl(self.handle, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))

    def other(self, start: int, end: int) -> tuple[int, int] | None:
        """Start and end of any one lock of another handle in the range."""
        if start >= end:  # a length of 0 would mean no end
            return None
        query = _FLOCK.pack(fcntl.F_WRLCK, 0, start, end - start, 0)
        answer = fcntl.fcntl(self.handle, fcntl.F_OFD_GETLK, query)
        kind, _, start, length, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            return None
        return start, start + length if length else _END

    def count(self, start: int, end: int) -> int:
        """The number of bytes in [start, end) that other handles have locked."""
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


class ProcessQueue:
    """The queue of processes in a file, and this process's place in it.

    There is no counter: a process that joins locks the byte behind the last locked byte. Processes
    that were passed over (`pass_over_first`) are ignored until they are gone.
    """

    def __init__(self, locks: ByteLocks):
        self._locks = locks
        self._place = 0  # this process's byte; 0 for none
        self._passed_over = 0  # this byte and all bytes before it are ignored

    def is_empty(self) -> bool:
        """Whether no other process is in the queue."""
        return self._locks.other(self._start(), _END) is None

    def stand(self) -> int:
        """Join the queue or keep the place; returns the number of processes ahead."""
        if not self._place:
            end = _LINE
            while (other := self._locks.other(end, _END)) is not None:
                end = other[1]
            if not self._locks.lock(end):
                return 1  # another process took the byte: join at the next poll
            self._place = end
        return self._locks.count(self._start(), self._place)

    def leave(self) -> None:
        place, self._place = self._place, 0
        if place:
            self._locks.unlock(place)

    def pass_over_first(self) -> int:
        """Ignore the first process ahead from now on; returns its place."""
        start, first = self._start(), self._place
        while (other := self._locks.other(start, first)) is not None:
            first = other[0]
        self._passed_over = first if first < self._place else 0
        return first - _LINE

    def _start(self) -> int:
        passed_over = self._passed_over
        if passed_over and self._locks.other(passed_over, passed_over + 1) is None:
            self._passed_over = 0
        return max(_LINE, self._passed_over + 1)


class ThreadPlace:
    """A thread's place in a queue."""

    def __init__(self) -> None:
        self._called = threading.Event()

    def call(self) -> bool:
        """Wake the caller, because it is first; from any thread. False if the caller is gone."""
        self._called.set()
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Wait until woken, at most `timeout_s`."""
        self._called.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


class TaskPlace:
    """The running task's place in a queue."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._called: asyncio.Future[None] = self._loop.create_future()

    def call(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._hear)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def wait(self, timeout_s: float | None) -> None:
        await asyncio.wait([self._called], timeout=timeout_s)

    def _hear(self) -> None:
        if not self._called.done():
            self._called.set_result(None)


Place = ThreadPlace | TaskPlace


class CallerQueue:
    """Places in order of arrival. The owner must let only one thread at a time change it."""

    def __init__(self) -> None:
        self._places: OrderedDict[Place, None] = OrderedDict()
        self.first: Place | None = None
        """The first place; None if nobody waits."""

    def join(self, place: Place) -> None:
        self._places[place] = None
        if self.first is None:
            self.first = place

    def leave(self, place: Place) -> None:
        """Leave the queue, from any place; a new first caller is woken. Does nothing without a
        place."""
        self._places.pop(place, None)
        if place is not self.first:
            return
        while self._places:
            self.first = first = next(iter(self._places))
            if first.call():
                return
            self._places.pop(first, None)
        self.first = None
