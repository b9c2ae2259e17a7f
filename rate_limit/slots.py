"""At most so many at once, over all processes of a host: a slot is a locked byte of a file.

The locks are open-file-description locks, so the kernel frees a slot when its holder dies, however
it dies. A process has one handle per `FileSlots`, and what it holds itself it knows by heart.

Who finds no free slot stands in line, and nobody starves:

- Processes stand in the file: far beyond its end a process locks the byte behind the last locked
  one. It is first when no byte of the line before its own is locked, and then tries for a slot
  every 1 to 2 ms; the others look whether they are first, every 2 ms per process before them, at
  most every 20 ms. Nobody takes a slot past the line. Who got one goes back to the end.
- The callers of a process stand in a `Line` in memory, and only the first of them polls. One that
  gives up leaves the process's place in the file to the next.

What can happen, and what follows:

- killed while waiting: the kernel takes its byte out of the line.
- stopped, or its loop blocked, while first: a process behind it that sees a slot free for 0.2 s
  passes over it, and leaves it out of account until it is gone. It comes first again when it wakes.
- stopped while holding: it keeps its slot.
- file deleted or replaced: noticed within 50 ms, or at the next look of who waits. Until the last
  holder of the old file is done, newcomers come in beside the holders.
- forked: the child holds nothing of its parent's, and stands in no line.

The lock reaches the processes of one host.

Source: fcntl(2), "Open file description locks" (Linux 3.15).
"""

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rate_limit.gcra import LimiterTimeout
from rate_limit.line import Line, Place, TaskPlace, ThreadPlace
from rate_limit.slot_file import SlotFile
from rate_limit.waiting import Steps, run, run_async

_log = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.002
_POLL_BEHIND_S = 0.002  # per process ahead
_LAST_POLL_BEHIND_S = 0.02
_PATIENCE_S = 0.2
_CHECK_S = 0.05


class _Hold(AbstractAsyncContextManager[float]):
    """A slot for the length of an `async with`; cheaper than a generator."""

    def __init__(self, slots: "FileSlots", timeout_s: float | None) -> None:
        self._slots, self._timeout_s = slots, timeout_s

    async def __aenter__(self) -> float:
        self._slot = await self._slots._take_async(self._timeout_s)  # pyright: ignore[reportPrivateUsage]
        return self._slot.waited_s

    async def __aexit__(self, *error: object) -> None:
        self._slots._free(self._slot)  # pyright: ignore[reportPrivateUsage]


class FileSlots:
    """A number of slots that every process with the same `path` shares.

    A context manager itself, sync and async (`async with slots as waited_s:`), by any number of
    threads and tasks at once; `hold` and `hold_async` take a timeout of their own. Pickles to other
    processes of this host. A forked child holds none of its parent's slots.

    Args:
        path: the file; made with its folder where missing.
        slots: how many may be held at once, over all sharers.
        timeout_s: longest wait of `with` and `async with`; None waits as long as it takes.
        clock: seconds, for the timeout and the checks of the file.
        sleep: waits, for the first thread in line.
        sleep_async: waits, for the first coroutine in line.

    Raises:
        ValueError: `slots` is below 1, or the file is for another number.
        OSError: the file cannot be made or locked, or is not safe to use: another user's, or a
            symbolic link in a folder that anyone may write to.
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
        self.path: Path = Path(path).absolute()
        self.slots = slots
        self.timeout_s = timeout_s
        self._clock, self._sleep, self._sleep_async = clock, sleep, sleep_async
        self._tries = min(slots, max(32, slots // 16))  # bytes looked at in one poll
        self._entered: list[_Slot] = []  # slots are alike: leaving gives back the last one taken
        self._begin_anew()
        self._file = SlotFile(self.path, slots)
        _all_slots.add(self)

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Generator[float]:
        """Hold a slot; yields the seconds waited.

        Raises:
            LimiterTimeout: none came free within `timeout_s`.
        """
        slot = self._take(timeout_s)
        try:
            yield slot.waited_s
        finally:
            self._free(slot)

    def hold_async(self, timeout_s: float | None = None) -> AbstractAsyncContextManager[float]:
        """`hold` for coroutines."""
        return _Hold(self, timeout_s)

    def __enter__(self) -> float:
        slot = self._take(self.timeout_s)
        self._entered.append(slot)
        return slot.waited_s

    def __exit__(self, *error: object) -> None:
        self._free(self._entered.pop())

    async def __aenter__(self) -> float:
        slot = await self._take_async(self.timeout_s)
        self._entered.append(slot)
        return slot.waited_s

    async def __aexit__(self, *error: object) -> None:
        self._free(self._entered.pop())

    def in_use(self) -> int:
        """Slots held now, by anybody."""
        with self._mutex:
            return self._current(self._clock(), check=True).in_use()

    def waiting(self) -> int:
        """Processes that stand in line now, this one included."""
        with self._mutex:
            return self._current(self._clock(), check=True).line.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.slots, self.timeout_s)

    def _begin_anew(self) -> None:
        """Forget who waits, and look at the file before the next hold; for a forked child."""
        self._mutex = threading.RLock()  # reentrant: a finalizer may free a slot at any moment
        self._line = Line()
        self._check_at = -math.inf

    def _take(self, timeout_s: float | None) -> "_Slot":
        if (slot := self._try()) is not None:
            return slot
        entered = self._clock()
        self._left_s(entered, timeout_s)
        place = ThreadPlace()
        try:
            self._join(place)
            while self._line.first is not place:
                place.wait(self._left_s(entered, timeout_s))
            return run(self._poll(entered, timeout_s), self._sleep)
        finally:
            self._leave(place)

    async def _take_async(self, timeout_s: float | None) -> "_Slot":
        if (slot := self._try()) is not None:
            return slot
        entered = self._clock()
        self._left_s(entered, timeout_s)
        place = TaskPlace()
        try:
            self._join(place)
            while self._line.first is not place:
                await place.wait(self._left_s(entered, timeout_s))
            return await run_async(self._poll(entered, timeout_s), self._sleep_async)
        finally:
            self._leave(place)

    def _try(self) -> "_Slot | None":
        """A slot at once, unless somebody waits for one."""
        with self._mutex:
            if self._line.first is not None:
                return None
            file = self._current(self._clock())
            byte = file.take(self.slots) if file.line.is_empty() else None
            return None if byte is None else _Slot(file, byte, 0.0)

    def _poll(self, entered: float, timeout_s: float | None) -> Steps["_Slot"]:
        """What the first caller in line does; returns its slot."""
        poll_s, free_since = _FIRST_POLL_S, None
        while True:
            with self._mutex:
                now = self._clock()
                file = self._current(now, check=True)
                ahead = file.line.stand()
                if not ahead and (byte := file.take(self._tries)) is not None:
                    file.line.leave()
                    return _Slot(file, byte, now - entered)
                if not ahead or not file.has_free():
                    free_since = None
                elif free_since is None:
                    free_since = now
                elif now - free_since >= _PATIENCE_S:
                    place = file.line.pass_over_first()
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

    def _join(self, place: Place) -> None:
        with self._mutex:
            self._line.join(place)

    def _leave(self, place: Place) -> None:
        with self._mutex:
            self._line.leave(place)
            if self._line.first is None:
                self._file.line.leave()

    def _free(self, slot: "_Slot") -> None:
        with self._mutex:
            slot.file.free(slot.byte)

    def _current(self, now: float, check: bool = False) -> "SlotFile":
        """The file, opened again where it was deleted or replaced since."""
        if check or now >= self._check_at:
            self._check_at = now + _CHECK_S
            if not self._file.is_at(self.path):
                file = SlotFile(self.path, self.slots)
                self._file.line.leave()
                self._file = file  # the old one closes with the last slot that refers to it
        return self._file


class _Slot(NamedTuple):
    file: SlotFile
    byte: int
    waited_s: float


_all_slots: weakref.WeakSet[FileSlots] = weakref.WeakSet()


def _begin_anew_after_fork() -> None:
    for slots in list(_all_slots):
        slots._begin_anew()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_begin_anew_after_fork)
