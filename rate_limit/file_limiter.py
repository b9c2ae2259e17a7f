"""A rate limit for all processes of a host: reserve a slot in a shared file, then sleep until the
slot.

A caller locks the file only to reserve. Nobody polls, and nobody holds the file while sleeping.
Calls are served in the order of reservation. Coroutines that ask in one pass of their event loop
reserve together, in their order. With `shares`, the order holds within a source, except for calls
that take a token that no source used.

docs/limiter.md has what the limiter promises and what not. It promises no limit over several hosts,
over containers with their own boot clocks (virtual machines, gVisor), or over files on NFS, because
locks or clocks may not reach the others; if it notices this, it raises an error. `across_hosts` is
for folders whose locks were tested; use `RayRateLimiter` otherwise. If a process that has the file
locked is stopped (SIGSTOP), callers with `timeout_s` get an error, and the others wait.
"""

import asyncio
import math
import os
import time
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rate_limit import shares as shared
from rate_limit.forks import after_fork
from rate_limit.gcra import (
    SECOND_NS,
    YEAR_NS,
    GcraState,
    LimiterTimeout,
    Rate,
    overloaded,
    pace_at,
    pause_ns,
    reserve,
)
from rate_limit.shares import Reservation, SharedState
from rate_limit.snapshot import ABANDONED, REFUSED, WAITING, Snapshot, of_passed
from rate_limit.state_file import (
    FARTHEST_NS,
    WALL_CLOCK,
    OnConfigChange,
    State,
    StateFile,
    arithmetic_of,
    boottime_ns,
    wall_clock,
)
from rate_limit.stats import Stats, snapshot_of
from rate_limit.waiting import RateLimiter, Steps, run, run_async

__all__ = ["FileRateLimiter", "LimiterTimeout", "boottime_ns"]

_LOCK_GRACE_NS = SECOND_NS // 50
"""Time that a caller with no timeout left still waits for the file."""
_LONGEST_S = YEAR_NS / SECOND_NS
_MOST_CALLS = 10**12
_FIRST_RETRY_S = 0.0002
_LAST_RETRY_S = 0.02


class _Want(NamedTuple):
    """The request of a caller."""

    n: int
    source: str
    entered_ns: int
    deadline_ns: float  # infinite without a timeout

    def waited_s(self, now_ns: int) -> float:
        return max(0, now_ns - self.entered_ns) / SECOND_NS


class _Slot(NamedTuple):
    """A reservation: its time, and the state before and after it."""

    reservation: Reservation
    epoch: int
    want: _Want
    made_ns: int
    before: State
    after: State

    @property
    def start_ns(self) -> int:
        return self.reservation.start_ns

    @property
    def passes_at_once(self) -> bool:
        return self.is_due(self.made_ns)

    def is_due(self, now_ns: int) -> bool:
        return self.reservation.start_ns <= now_ns and self.reservation.mark is None


class FileRateLimiter(RateLimiter):
    """A rate limit that all processes with the same `path` share.

    It is safe with threads, in asyncio (the file never blocks the event loop), after a fork, and
    when pickled to other processes of this host. The slot of a cancelled caller is given back if it
    was the last one reserved; otherwise the next caller of this process gets it. The slot of a
    killed process is lost.

    Args:
        path: the state file; each file has its own limit.
        per_minute, burst, min_interval_s: as in `Rate`.
        shares: source -> weight of its share of the rate, for `acquire(source=...)`. All sources
            may use what a source does not use. Sources without a weight together have the smallest
            weight.
        adaptive: many overloads (`penalise`) halve the rate, which then recovers.
        on_config_change: if the file has other limits: "refuse" them, or "adopt" the new limits for
            all processes.
        across_hosts: several hosts share the file's folder, and its locks reach all of them. The
            limit then uses the wall clock of the process's start. It is exceeded by the calls of
            the time by which the hosts' clocks differ; a clock that is more than a second from the
            folder's time is refused. The statistics are those of this host.
        clock_ns: the time in nanoseconds, the same clock for all processes; None for the time since
            boot.

    Raises:
        ValueError: a limit is out of range, or the file belongs to other limits.
        OSError: the file cannot be used, or not safely; see `StateFile`.
        RuntimeError: with `across_hosts`, this host's clock is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        per_minute: float,
        burst: int = 1,
        min_interval_s: float = 0.0,
        *,
        shares: Mapping[str, float] | None = None,
        adaptive: bool = False,
        on_config_change: OnConfigChange = "refuse",
        across_hosts: bool = False,
        clock_ns: Callable[[], int] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.adaptive = adaptive
        if clock_ns is None:
            clock_ns = wall_clock() if across_hosts else boottime_ns
        self.across_hosts = across_hosts
        self._clock_ns, self._sleep, self._sleep_async = clock_ns, sleep, sleep_async
        rate = Rate(
            per_minute=per_minute, burst=burst, min_interval_s=min_interval_s, shares=shares
        )
        clock_id = WALL_CLOCK if across_hosts else None
        self._file = StateFile(path, rate, clock_ns, on_config_change, clock_id)
        self.path: Path = self._file.path
        self._stats = Stats(self.path, across_hosts)
        self._begin_anew()
        _all_limiters.add(self)

    def _begin_anew(self) -> None:
        """Forget waiting and cancelled callers; in a forked child they belong to the parent."""
        self._left: list[_Slot] = []  # by cancelled callers
        self._batch: _Batch | None = None

    @property
    def rate(self) -> Rate:
        """The limits of the file, as last read."""
        return self._file.rate

    def acquire(self, n: int = 1, timeout_s: float | None = None, source: str = "") -> float:
        if self._pass_now(n, source, blocking=timeout_s is None):
            return 0.0
        return run(self._acquire(n, timeout_s, source, blocking=timeout_s is None), self._sleep)

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        if n != 1 or timeout_s is not None:
            timeout_s = self._checked(n, timeout_s)
        loop = asyncio.get_running_loop()
        batch = self._batch
        if batch is None or batch.closed or batch.loop is not loop:
            batch = self._batch = _Batch(loop, self._clock_ns())
        entered_ns = batch.entered_ns
        deadline_ns = math.inf if timeout_s is None else entered_ns + int(timeout_s * SECOND_NS)
        place = len(batch.wants)
        batch.wants.append((n, source, entered_ns, deadline_ns))
        try:
            await _next_tick()  # afterwards all callers of this pass are in the batch
            if not batch.closed:
                batch.closed = True
                self._serve(batch)
            if batch.served is not None:
                await self._until_served(batch.served, deadline_ns)
        except BaseException as error:
            batch.wants[place] = None
            if not any(batch.wants):
                batch.closed = True  # later callers start another batch
            if batch.done:
                self._leave(batch.slots.get(place), n, source)
            if isinstance(error, LimiterTimeout):
                self._stats.add(source, {REFUSED: n})
            raise
        slot = batch.slots.get(place)
        if slot is None:
            return 0.0
        if isinstance(slot, BaseException):
            raise slot
        if batch.served is None and slot.passes_at_once:
            return 0.0
        return await run_async(self._see_through(slot), self._sleep_async)

    def penalise(self, retry_after_s: float = 0.0) -> None:
        """Pause all calls, including waiting ones, because a server answered 429 or 503.

        After the pause, calls pass at the sustained rate without a burst. If the limiter is
        `adaptive`, each call of this method counts as an overload too.

        Args:
            retry_after_s: the server's `Retry-After` in seconds, 0 to 86400; 0 if there was none. A
                pause that ends before the current one changes nothing.
        """
        run(self._penalise(retry_after_s, blocking=True), self._sleep)

    async def penalise_async(self, retry_after_s: float = 0.0) -> None:
        """`penalise` for coroutines."""
        await run_async(self._penalise(retry_after_s, blocking=False), self._sleep_async)

    def snapshot(self) -> Snapshot:
        """What all processes with this file have done so far; takes no lock."""
        self._stats.write()
        return snapshot_of(self.path, self._clock_ns)

    def close(self) -> None:
        """Close the files; the next call opens them again."""
        self._file.close()
        self._stats.close()

    def __reduce__(self) -> tuple[Any, ...]:
        rate = self.rate
        values = (rate.per_minute, rate.burst, rate.min_interval_s)
        shares = dict(rate.weights) or None
        options = {"adaptive": self.adaptive, "across_hosts": self.across_hosts}
        return partial(type(self), shares=shares, **options), (self.path, *values)

    def _acquire(
        self, n: int, timeout_s: float | None, source: str, *, blocking: bool
    ) -> Steps[float]:
        timeout_s = self._checked(n, timeout_s)
        entered_ns = self._clock_ns()
        deadline_ns = math.inf if timeout_s is None else entered_ns + int(timeout_s * SECOND_NS)
        want = _Want(n, source, entered_ns, deadline_ns)
        waited = yield from self._lock(deadline_ns, blocking, want)
        try:
            state, now_ns = self._read()
            slot, after = self._next(state, now_ns, want)
            if after is not state:
                self._file.write(after)
            self._count_at_once(slot)
        finally:
            self._file.unlock()
        if not waited and slot.passes_at_once:
            return 0.0
        return (yield from self._see_through(slot, blocking=blocking))

    def _pass_now(self, n: int, source: str, *, blocking: bool) -> bool:
        """Let n calls pass if they need not wait: `_acquire` for the common case, in half of its
        time."""
        if not self._file.lock(blocking=blocking):
            return False
        try:
            return n > 0 and self._pass_together(*self._read(), {source: n})
        finally:
            self._file.unlock()

    def _pass_together(self, state: State, now_ns: int, by_source: dict[str, int]) -> bool:
        """Let calls of several callers pass now, if all of them may; the lock must be held."""
        file, total = self._file, sum(by_source.values())
        rate = file.rate
        if self._left or rate.weights or rate.min_interval_ns or total > rate.burst:
            return False
        assert isinstance(state, GcraState)
        start_ns, after = reserve(state, now_ns, total, rate, pace_at(file.throttle, now_ns))
        if start_ns > now_ns:
            return False
        file.write(after)
        self._stats.count(by_source)
        return True

    def _serve(self, batch: "_Batch") -> None:
        """Reserve for all callers of a batch under one lock, later if the file is locked."""
        places = [place for place, want in enumerate(batch.wants) if want is not None]
        try:
            if not self._file.lock(blocking=False):
                batch.served = batch.served or asyncio.Event()
                batch.loop.call_later(batch.retry_s, self._serve, batch)
                batch.retry_s = min(2 * batch.retry_s, _LAST_RETRY_S)
                return
            try:
                self._reserve_for(batch, places)
            finally:
                self._file.unlock()
        except Exception as error:  # the waiting callers raise it
            batch.slots = dict.fromkeys(places, error)
        except BaseException:
            batch.slots = dict.fromkeys(places, asyncio.CancelledError())
            raise
        batch.done = True
        if batch.served is not None:
            batch.served.set()

    def _reserve_for(self, batch: "_Batch", places: list[int]) -> None:
        """Reserve under the lock; does nothing if all callers have left."""
        if not places:
            return
        state, now_ns = self._read()
        by_source: dict[str, int] = {}
        for want in batch.wants:
            if want is not None:
                by_source[want[1]] = by_source.get(want[1], 0) + want[0]
        if self._pass_together(state, now_ns, by_source):
            return
        for place in places:
            want = batch.wants[place]
            assert want is not None
            try:
                slot, state = self._next(state, now_ns, _Want(*want))
            except (LimiterTimeout, OverflowError) as error:
                batch.slots[place] = error
            else:
                batch.slots[place] = slot
                self._count_at_once(slot)
        self._file.write(state)

    async def _until_served(self, served: asyncio.Event, deadline_ns: float) -> None:
        left_ns = max(0, deadline_ns + _LOCK_GRACE_NS - self._clock_ns())
        try:
            left_s = None if left_ns == math.inf else left_ns / SECOND_NS
            await asyncio.wait_for(served.wait(), left_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise self._held() from None

    def _see_through(self, slot: _Slot, *, blocking: bool = False) -> Steps[float]:
        """Sleep until the slot, or until another one if this one is void by then; returns the
        seconds since the caller entered."""
        want, now_ns, done = slot.want, self._clock_ns(), {}
        if not slot.passes_at_once:
            self._stats.add(want.source, {WAITING: 1})
            try:
                now_ns = yield from self._sleep_until_due(slot, blocking)
                done = of_passed(want.n, want.waited_s(now_ns))
            finally:
                self._stats.add(want.source, {WAITING: -1, **done})
        return want.waited_s(now_ns)

    def _sleep_until_due(self, slot: _Slot, blocking: bool) -> Steps[int]:
        """Sleep until the slot; returns the time afterwards."""
        while not slot.is_due(now_ns := self._clock_ns()):
            try:
                while (left_ns := slot.start_ns - self._clock_ns()) > 0:  # a sleep may end early
                    yield left_ns / SECOND_NS
                if slot.reservation.mark is None and self._file.still(slot.epoch):
                    continue
                deadline_ns = max(slot.want.deadline_ns, slot.start_ns)
                yield from self._lock(deadline_ns, blocking, slot.want)
            except BaseException:
                self._leave(slot, slot.want.n, slot.want.source)
                raise
            try:
                slot = self._look_again(slot)
            finally:
                self._file.unlock()
        return now_ns

    def _look_again(self, slot: _Slot) -> _Slot:
        """Under the lock, at the slot's time: the slot, or another one if it is void.

        Raises:
            LimiterTimeout: the other slot is beyond the deadline; nothing is reserved.
        """
        state, now_ns = self._read()
        is_void = self._file.throttle.epoch != slot.epoch
        if not is_void and slot.reservation.mark is None:
            return slot
        counted_on = None if is_void else slot.reservation
        try:
            again, after = self._granted(state, now_ns, slot.want, counted_on)
        except LimiterTimeout:
            if not is_void and isinstance(state, SharedState):
                self._file.write(shared.leave(slot.reservation, state, slot.want.n))
            raise
        self._file.write(after._replace(granted=state.granted))  # counted at the first reservation
        return again

    def _read(self) -> tuple[State, int]:
        """The state and the time; the lock must be held."""
        state, now_ns = self._file.read(), self._file.now_ns
        self._stats.sample(now_ns, state.granted, self._file.throttle.epoch)
        return state, now_ns

    def _count_at_once(self, slot: _Slot) -> None:
        if slot.passes_at_once:
            self._stats.count({slot.want.source: slot.want.n})

    def _next(self, state: State, now_ns: int, want: _Want) -> tuple[_Slot, State]:
        """The next slot, and the state after it."""
        if self._left and (slot := self._reuse(want, now_ns)) is not None:
            return slot, state
        return self._granted(state, now_ns, want)

    def _granted(
        self, state: State, now_ns: int, want: _Want, counted_on: Reservation | None = None
    ) -> tuple[_Slot, State]:
        """A new slot, and the state after it.

        `counted_on` is the caller's earlier reservation of spare tokens, which may be void.
        """
        n, source, entered_ns, deadline_ns = want
        rate, throttle = self._file.rate, self._file.throttle
        pace = pace_at(throttle, now_ns)
        if isinstance(state, GcraState):
            start_ns, after = reserve(state, now_ns, n, rate, pace)
            reservation = Reservation(start_ns)
        elif counted_on is None:
            reservation, after = shared.reserve(state, now_ns, n, rate, pace, source)
        else:
            reservation, after = shared.confirm(counted_on, state, now_ns, n, rate, pace, source)
        if arithmetic_of(rate).latest_ns(after, rate) > now_ns + FARTHEST_NS + rate.burst_ns:
            raise OverflowError(
                f"cannot reserve n={n} calls from {self.path}: the last one is more than a year "
                "away; raise the rate"
            )
        if reservation.start_ns > max(deadline_ns, now_ns):
            self._stats.add(source, {REFUSED: n})
            raise LimiterTimeout(
                f"no slot for n={n} calls from {self.path}: the next is "
                f"{(reservation.start_ns - entered_ns) / SECOND_NS:.3f} s away, beyond "
                f"timeout_s={(deadline_ns - entered_ns) / SECOND_NS}; wait longer or raise the rate"
            )
        return _Slot(reservation, throttle.epoch, want, now_ns, state, after), after

    def _reuse(self, want: _Want, now_ns: int) -> _Slot | None:
        """The next slot of a cancelled caller that fits; drops slots whose time has passed."""
        epoch, latest_ns = self._file.throttle.epoch, max(want.deadline_ns, now_ns)
        for slot in [s for s in self._left if s.start_ns <= now_ns or s.epoch != epoch]:
            self._left.remove(slot)  # in place, because another thread may be adding one
            self._stats.add(slot.want.source, {ABANDONED: slot.want.n})
        fitting = [
            slot
            for slot in self._left
            if slot.want.n == want.n
            and slot.start_ns <= latest_ns
            and (not self.rate.weights or slot.want.source == want.source)
        ]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.start_ns)
        self._left.remove(slot)
        return slot._replace(want=want, made_ns=now_ns)

    def _leave(self, slot: _Slot | BaseException | None, n: int, source: str) -> None:
        """Give back a slot that will not be used, or keep it for the next caller. `slot` is None if
        the n calls may already have passed."""
        if isinstance(slot, BaseException):
            return
        if slot is None or slot.is_due(self._clock_ns()):
            self._stats.add(source, {ABANDONED: n})
            return
        self._left.append(slot)
        file = self._file
        try:
            if not file.lock(blocking=False):
                return
        except (OSError, ValueError):
            return  # the caller leaves for another reason; the next caller gets the error
        try:
            state = file.read()
            while (without := self._without_one_left(state)) is not None:
                state = without
                file.write(state)
        finally:
            file.unlock()

    def _without_one_left(self, state: State) -> State | None:
        """The state after giving back one slot of `_left`; None if none can be given back."""
        for slot in self._left:
            n, source, rate = slot.want.n, slot.want.source, self.rate
            if slot.epoch != self._file.throttle.epoch:
                without = None
            elif isinstance(state, GcraState) or isinstance(slot.after, GcraState):
                without = slot.before if state == slot.after else None
            elif slot.reservation.mark is not None:
                without = shared.leave(slot.reservation, state, n)
            else:
                assert isinstance(slot.before, SharedState)
                without = shared.undo(slot.before, slot.made_ns, slot.after, state, n, rate, source)
            if without is not None:
                self._left.remove(slot)
                return without
        return None

    def _penalise(self, retry_after_s: float, *, blocking: bool) -> Steps[None]:
        length_ns = pause_ns(retry_after_s)
        yield from self._lock(math.inf, blocking)
        file = self._file
        try:
            state, now_ns = self._read()
            state, throttle = arithmetic_of(file.rate).penalise(
                state, file.throttle, now_ns, length_ns, file.rate
            )
            file.write(state, overloaded(throttle, now_ns) if self.adaptive else throttle)
        finally:
            file.unlock()

    def _lock(self, deadline_ns: float, blocking: bool, want: _Want | None = None) -> Steps[bool]:
        """Take the file's lock: at once, by waiting in the kernel, or by trying again later;
        returns whether another process had it first."""
        if self._file.lock(blocking=False):
            return False
        if blocking:
            return self._file.lock(blocking=True)
        retry_s = _FIRST_RETRY_S
        while True:
            yield retry_s
            if self._file.lock(blocking=False):
                return True
            if self._clock_ns() > deadline_ns + _LOCK_GRACE_NS:
                if want is not None:
                    self._stats.add(want.source, {REFUSED: want.n})
                raise self._held()
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _held(self) -> LimiterTimeout:
        return LimiterTimeout(
            f"cannot lock {self.path} in time: another process holds it; look for a stopped one "
            "(fuser names them)"
        )

    def _checked(self, n: int, timeout_s: float | None) -> float | None:
        """The timeout, None for no limit; refuses impossible requests."""
        if not 1 <= n <= _MOST_CALLS or self.rate.for_calls_ns(n) > YEAR_NS:
            raise ValueError(
                f"cannot acquire n={n} from {self.path}: n must be at least 1, and calls of a year "
                "at most"
            )
        if timeout_s is None or timeout_s == math.inf:
            return None
        if not timeout_s <= _LONGEST_S:
            raise ValueError(
                f"cannot wait timeout_s={timeout_s} for {self.path}: give seconds, or None"
            )
        return timeout_s


class _Batch:
    """The coroutines of one event loop that asked in one pass; they reserve under one lock."""

    __slots__ = ("closed", "done", "entered_ns", "loop", "retry_s", "served", "slots", "wants")

    def __init__(self, loop: asyncio.AbstractEventLoop, entered_ns: int):
        self.loop, self.entered_ns = loop, entered_ns
        self.wants: list[tuple[int, str, int, float] | None] = []
        """The requests in order; None for a caller that left."""

        self.slots: dict[int, _Slot | BaseException] = {}
        """Place in `wants` -> its result; empty if all passed at once."""

        self.closed = False  # no caller may join any more
        self.done = False
        self.served: asyncio.Event | None = None
        """Set when done; used only if another process had locked the file."""

        self.retry_s = _FIRST_RETRY_S


@types.coroutine
def _next_tick() -> Generator[None]:
    """Let other coroutines run; the same as `asyncio.sleep(0)` with one step fewer."""
    yield


_all_limiters = after_fork(FileRateLimiter._begin_anew)  # pyright: ignore[reportPrivateUsage]
