"""A limit on how many callers work at once, over all processes of a host. A slot is a locked byte.

The locks are open-file-description locks, so the kernel frees a slot when its holder dies in any
way; they reach the processes of one host only. A caller that finds no free slot joins a queue, so
nobody starves:

- Processes queue in the file (`ProcessQueue`). The first process tries to take a slot every 1 to
  2 ms. The others check whether they are first, every 2 ms per process ahead and at most every
  20 ms. A process that got a slot goes back to the end.
- The callers of a process queue in memory (`CallerQueue`), and only the first of them polls. A
  caller that gives up leaves the process's place in the file to the next caller.

Faults and their effects:

- The first process is stopped, or its event loop is blocked: a process behind it that sees a free
  slot for 0.2 s passes over it and ignores it until it is gone. It is first again when it
  continues. A process that is stopped while it holds a slot keeps the slot.
- The file is deleted or replaced: processes notice this within 50 ms, or at the next poll. Until
  the last holder of a slot in the old file is done, more callers than slots may work.
- A process forks: the child holds no slot of its parent and is in no queue.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rate_limit.forks import after_fork
from rate_limit.gcra import LimiterTimeout
from rate_limit.queues import CallerQueue, TaskPlace, ThreadPlace
from rate_limit.slot_file import SlotFile
from rate_limit.waiting import Steps, run, run_async

_log = logging.getLogger(__name__)
P = TypeVar("P", ThreadPlace, TaskPlace)

_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.002
_POLL_BEHIND_S = 0.002  # per process ahead
_LAST_POLL_BEHIND_S = 0.02
_PATIENCE_S = 0.2
_CHECK_S = 0.05


class FileSlots:
    """A number of slots that all processes with the same `path` share.

    It is a sync and async context manager (`async with slots as waited_s:`) for any number of
    threads and tasks at once. `hold` and `hold_async` take a timeout. It can be pickled to other
    processes of this host.

    Args:
        path: the file; it is created with its folder if it is missing.
        slots: most slots held at once, over all processes.
        clock: seconds, for the timeout and the checks of the file.
        sleep, sleep_async: sleep in the first thread or coroutine of the queue.

    Raises:
        ValueError: `slots` is below 1, or the file is for another number.
        OSError: the file cannot be made or locked, or is not safe to use (see `open_own`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        slots: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        if slots < 1:
            raise ValueError(f"cannot share slots={slots} at {path}: need at least 1")
        self.path: Path = Path(path).absolute()
        self.slots = slots
        self._clock, self._sleep, self._sleep_async = clock, sleep, sleep_async
        self._tries = min(slots, max(32, slots // 16))  # bytes tried in one poll
        self._entered: list[_Slot] = []  # all slots are equal, so leaving frees the last one taken
        self._begin_anew()
        self._file = SlotFile(self.path, slots)
        _all_slots.add(self)

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Generator[float]:
        """Hold a slot; yields the seconds waited.

        Raises:
            LimiterTimeout: no slot was free within `timeout_s`.
        """
        slot = self._take(timeout_s)
        try:
            yield slot.waited_s
        finally:
            self._free(slot)

    @asynccontextmanager
    async def hold_async(self, timeout_s: float | None = None) -> AsyncGenerator[float]:
        """`hold` for coroutines."""
        slot = await self._take_async(timeout_s)
        try:
            yield slot.waited_s
        finally:
            self._free(slot)

    def __enter__(self) -> float:
        slot = self._take(None)
        self._entered.append(slot)
        return slot.waited_s

    def __exit__(self, *error: object) -> None:
        self._free(self._entered.pop())

    async def __aenter__(self) -> float:
        slot = await self._take_async(None)
        self._entered.append(slot)
        return slot.waited_s

    async def __aexit__(self, *error: object) -> None:
        self._free(self._entered.pop())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.slots)

    def _begin_anew(self) -> None:
        """Forget waiting callers, and check the file before the next hold."""
        # Reentrant, because a finalizer may free a slot at any moment.
        self._mutex = threading.RLock()
        self._queue = CallerQueue()
        self._check_at = -math.inf

    def _take(self, timeout_s: float | None) -> "_Slot":
        if (slot := self._try()) is not None:
            return slot
        entered = self._clock()
        self._left_s(entered, timeout_s)
        with self._queued(ThreadPlace()) as place:
            while self._queue.first is not place:
                place.wait(self._left_s(entered, timeout_s))
            return run(self._poll(entered, timeout_s), self._sleep)

    async def _take_async(self, timeout_s: float | None) -> "_Slot":
        if (slot := self._try()) is not None:
            return slot
        entered = self._clock()
        self._left_s(entered, timeout_s)
        with self._queued(TaskPlace()) as place:
            while self._queue.first is not place:
                await place.wait(self._left_s(entered, timeout_s))
            return await run_async(self._poll(entered, timeout_s), self._sleep_async)

    def _try(self) -> "_Slot | None":
        """Take a slot at once, unless another caller waits."""
        with self._mutex:
            if self._queue.first is not None:
                return None
            file = self._current(self._clock())
            byte = file.take(self.slots) if file.queue.is_empty() else None
            return None if byte is None else _Slot(file, byte, 0.0)

    def _poll(self, entered: float, timeout_s: float | None) -> Steps["_Slot"]:
        """Poll for a slot as the first caller of the queue; returns the slot."""
        poll_s, free_since = _FIRST_POLL_S, None
        while True:
            with self._mutex:
                now = self._clock()
                file = self._current(now, check=True)
                ahead = file.queue.stand()
                if not ahead and (byte := file.take(self._tries)) is not None:
                    file.queue.leave()
                    return _Slot(file, byte, now - entered)
                if not ahead or not file.has_free():
                    free_since = None
                elif free_since is None:
                    free_since = now
                elif now - free_since >= _PATIENCE_S:
                    place = file.queue.pass_over_first()
                    _log.warning("slots_file=%s passed_over=%d: stopped?", self.path, place)
                    free_since = None
                    continue
            left_s = self._left_s(entered, timeout_s)
            if ahead:
                sleep_s = min(ahead * _POLL_BEHIND_S, _LAST_POLL_BEHIND_S)
            else:
                sleep_s, poll_s = poll_s, _LAST_POLL_S
            yield sleep_s if left_s is None else min(sleep_s, left_s)

    def _left_s(self, entered: float, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return None
        left_s = timeout_s - (self._clock() - entered)
        if left_s <= 0:
            raise LimiterTimeout(
                f"no free slot of slots={self.slots} at {self.path} within "
                f"timeout_s={timeout_s}; wait longer or allow more at once"
            )
        return left_s

    @contextmanager
    def _queued(self, place: P) -> Generator[P]:
        try:
            with self._mutex:
                self._queue.join(place)
            yield place
        finally:
            with self._mutex:
                self._queue.leave(place)
                if self._queue.first is None:
                    self._file.queue.leave()

    def _free(self, slot: "_Slot") -> None:
        with self._mutex:
            slot.file.free(slot.byte)

    def _current(self, now: float, check: bool = False) -> "SlotFile":
        """The file; it is opened again if it was deleted or replaced."""
        if check or now >= self._check_at:
            self._check_at = now + _CHECK_S
            if not self._file.is_at(self.path):
                file = SlotFile(self.path, self.slots)
                self._file.queue.leave()
                self._file = file  # the old file closes with its last held slot
        return self._file


class _Slot(NamedTuple):
    file: SlotFile
    byte: int
    waited_s: float


_all_slots = after_fork(FileSlots._begin_anew)  # pyright: ignore[reportPrivateUsage]
