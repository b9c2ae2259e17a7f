"""At most so many at once, over all processes of a host: a slot is a locked byte of a file.

The locks are open-file-description locks, so the kernel frees a slot when its holder dies, however
it dies. A caller that finds no free slot comes back on a timer that slows down to 50 ms; there is
no queue. Deleting the file while it is in use lets newcomers in beside those that hold slots of the
old one.

Source: fcntl(2), "Open file description locks" (Linux 3.15).
"""

import asyncio
import fcntl
import itertools
import logging
import os
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from rate_limit.gcra import LimiterTimeout
from rate_limit.waiting import Steps, run, run_async

_log = logging.getLogger(__name__)

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, 64 bit: type, whence, start, length, pid (0)
_OPEN_TIMEOUT_S = 10.0
_FIRST_RETRY_S = 0.001
_LAST_RETRY_S = 0.05


class FileSlots:
    """A number of slots that every process with the same `path` shares.

    A context manager itself, sync and async (`async with slots as waited_s:`), by any number of
    threads and tasks at once; `hold` and `hold_async` take a timeout of their own. Pickles to other
    processes of this host. A forked child holds none of its parent's slots.

    Args:
        path: the file; made with its folder where missing.
        slots: how many may be held at once, over all sharers.
        timeout_s: longest wait of `with` and `async with`; None waits as long as it takes.
        clock: seconds, for the timeout.
        sleep: waits, for threads.
        sleep_async: waits, for coroutines.

    Raises:
        ValueError: `slots` is below 1, or the file is for another number.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        slots: int,
        timeout_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        if slots < 1:
            raise ValueError(f"cannot share slots={slots} at {path}: need at least 1")
        self.path = Path(path).absolute()
        self.slots = slots
        self.timeout_s = timeout_s
        self._clock, self._sleep, self._sleep_async = clock, sleep, sleep_async
        self._entered: list[_Slot] = []  # slots are alike: leaving gives back the last one taken
        self._starts = itertools.count(os.getpid())  # spread over the bytes: fewer tries
        self._make()

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Generator[float]:
        """Hold a slot; yields the seconds waited.

        Raises:
            LimiterTimeout: none came free within `timeout_s`.
        """
        slot = run(self._take(timeout_s), self._sleep)
        try:
            yield slot.waited_s
        finally:
            slot.free()

    @asynccontextmanager
    async def hold_async(self, timeout_s: float | None = None) -> AsyncGenerator[float]:
        """`hold` for coroutines."""
        slot = await run_async(self._take(timeout_s), self._sleep_async)
        try:
            yield slot.waited_s
        finally:
            slot.free()

    def __enter__(self) -> float:
        slot = run(self._take(self.timeout_s), self._sleep)
        self._entered.append(slot)
        return slot.waited_s

    def __exit__(self, *error: object) -> None:
        self._entered.pop().free()

    async def __aenter__(self) -> float:
        slot = await run_async(self._take(self.timeout_s), self._sleep_async)
        self._entered.append(slot)
        return slot.waited_s

    async def __aexit__(self, *error: object) -> None:
        self._entered.pop().free()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.slots, self.timeout_s)

    def _take(self, timeout_s: float | None) -> Steps["_Slot"]:
        """Returns the slot; sleeps between tries."""
        if (handle := self._try()) is not None:
            return _Slot(handle, 0.0)
        entered, retry_s = self._clock(), _FIRST_RETRY_S
        while True:
            waited_s = self._clock() - entered
            if timeout_s is not None and waited_s >= timeout_s:
                raise LimiterTimeout(
                    f"no free slot of slots={self.slots} at {self.path} within "
                    f"timeout_s={timeout_s}; wait longer or allow more at once"
                )
            yield retry_s if timeout_s is None else min(retry_s, timeout_s - waited_s)
            if (handle := self._try()) is not None:
                return _Slot(handle, self._clock() - entered)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _try(self) -> int | None:
        """A file handle that holds a slot, or None. A handle each: one would not exclude itself."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._make()
            handle = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        first = next(self._starts)
        for offset in range(self.slots):
            byte = (first + offset) % self.slots
            try:
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0))
                return handle
            except (BlockingIOError, PermissionError):
                continue
            except BaseException:
                os.close(handle)
                raise
        os.close(handle)
        return None

    def _make(self) -> None:
        """Write the number of slots where there is none, and check it where there is."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        own = f"slots={self.slots}\n".encode()
        with FileLock(f"{self.path}.lock", timeout=_OPEN_TIMEOUT_S):
            found = self.path.read_bytes() if self.path.exists() else None
            if found == own:
                return
            if found is None:
                draft = self.path.with_name(f"{self.path.name}.tmp")
                draft.write_bytes(own)
                os.replace(draft, self.path)
                return
            number = found.removeprefix(b"slots=").removesuffix(b"\n")
            if found == b"slots=" + number + b"\n" and number.isdigit():
                raise ValueError(
                    f"cannot share slots={self.slots} at {self.path}: the file is for "
                    f"slots={int(number)}; give every process the same number, or delete the file "
                    "if no run is using it"
                )
            _log.warning("slots_file=%s is not whole; writing slots=%d", self.path, self.slots)
            self.path.write_bytes(own)  # in place: who holds a slot keeps it


class _Slot:
    """A held slot, until `free`."""

    def __init__(self, handle: int, waited_s: float):
        self._handle = handle
        self.waited_s = waited_s
        _held.add(self)

    def free(self) -> None:
        """Give the slot back, even while a forked child has a copy of the handle."""
        handle = self._leave()
        if handle >= 0:
            try:
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0))
            finally:
                os.close(handle)

    def disown(self) -> None:
        """Close a handle copied by a fork: the slot stays the parent's and falls with it."""
        handle = self._leave()
        if handle >= 0:
            os.close(handle)

    def _leave(self) -> int:
        _held.discard(self)
        handle, self._handle = self._handle, -1
        return handle


_held: set[_Slot] = set()


def _disown_after_fork() -> None:
    for slot in list(_held):
        slot.disown()


os.register_at_fork(after_in_child=_disown_after_fork)
