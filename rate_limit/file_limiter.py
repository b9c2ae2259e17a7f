"""One rate for all processes of a host: reserve a slot in the shared file, let go, sleep until it.

Nobody polls for permission and nobody holds the file while sleeping. Order of reservation is order
of service; coroutines that ask in one tick of their loop reserve together, in the order they asked.

What it does not promise:

- the instant of the call: what is promised is the granted instant, and a process that the system
  wakes late passes late.
- a rate per account: it is kept per state file. Two files for one account are twice the rate.
- several hosts, or containers with boot clocks of their own (virtual machines, gVisor), on one
  file, or files on NFS: the lock or the clock may not reach the others. There it is an error where
  it can be noticed.
- progress while a process that has the file locked is stopped (SIGSTOP): callers with `timeout_s`
  are told, those without wait until it goes on or is killed. Event loops go on meanwhile.
"""

import asyncio
import os
import time
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple

from rate_limit.gcra import (
    SECOND_NS,
    Arrivals,
    LimiterTimeout,
    Rate,
    overloaded,
    pace_at,
    penalise,
    reserve,
)
from rate_limit.state_file import OnConfigChange, StateFile, boottime_ns
from rate_limit.waiting import Steps, run, run_async

__all__ = ["FileRateLimiter", "LimiterTimeout", "boottime_ns"]

_LOCK_GRACE_NS = SECOND_NS // 50
"""How long a caller that will not wait for a slot still waits for the file."""
_FIRST_RETRY_S = 0.0002
_LAST_RETRY_S = 0.02


class _Slot(NamedTuple):
    """A reservation: when it may be used, and what it made of the state."""

    start_ns: int
    epoch: int
    n: int
    before: Arrivals
    after: Arrivals


class FileRateLimiter:
    """A rate limit that every process with the same `path` shares.

    Safe with threads, in asyncio (the loop is never blocked on the file), after fork, and pickled
    to other processes of this host. The slot of a cancelled waiter goes back where it was the last
    one reserved, and otherwise to the next caller of this process; that of a killed one is lost.

    Args:
        path: the state file; the limit is kept per file.
        per_minute: sustained calls a minute.
        burst: calls that may pass back to back after an idle spell.
        min_interval_s: least time between two calls, bursts included.
        adaptive: a storm of overloads (`penalise`) halves the rate, which then recovers.
        on_config_change: where the file has other limits: "refuse", or "adopt" these for all.
        clock_ns: the time; one clock for all sharers.
        sleep: waits, for threads.
        sleep_async: waits, for coroutines.

    Raises:
        ValueError: a limit is out of range, or the file belongs to other limits.
        OSError: the file cannot be used, or not safely (`StateFile`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        per_minute: float,
        burst: int,
        min_interval_s: float = 0.0,
        *,
        adaptive: bool = False,
        on_config_change: OnConfigChange = "refuse",
        clock_ns: Callable[[], int] = boottime_ns,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.adaptive = adaptive
        self.abandoned = 0
        """Slots of cancelled waiters of this process that nobody could use."""

        self._clock_ns, self._sleep, self._sleep_async = clock_ns, sleep, sleep_async
        rate = Rate(per_minute=per_minute, burst=burst, min_interval_s=min_interval_s)
        self._file = StateFile(path, rate, clock_ns, on_config_change)
        self.path = self._file.path
        self._left: list[_Slot] = []  # by cancelled waiters
        self._batch: _Batch | None = None

    @property
    def rate(self) -> Rate:
        """The limits in force: those of the file, as last read."""
        return self._file.rate

    def acquire(self, n: int = 1, timeout_s: float | None = None) -> float:
        """Wait until n calls may pass together.

        Args:
            n: calls, >= 1. More than the burst pass one by one; the last of them is waited for.
            timeout_s: longest wait; None waits as long as it takes.

        Returns:
            Seconds waited; 0.0 when there was nothing to wait for.

        Raises:
            LimiterTimeout: the slot lies beyond `timeout_s`; it was not reserved.
            ValueError: n is below 1.
        """
        if n == 1 and self._file.pass_now(timeout_s is None):
            return 0.0
        return run(self._acquire(n, timeout_s, blocking=timeout_s is None), self._sleep)

    async def acquire_async(self, n: int = 1, timeout_s: float | None = None) -> float:
        """`acquire` for coroutines; lets the loop go on in any case."""
        if n < 1:
            raise self._no_such_n(n)
        loop = asyncio.get_running_loop()
        batch = self._batch
        if batch is None or batch.closed or batch.loop is not loop:
            batch = self._batch = _Batch(loop, self._clock_ns())
        entered_ns = batch.entered_ns
        deadline_ns = None if timeout_s is None else entered_ns + int(timeout_s * SECOND_NS)
        place = len(batch.wants)
        batch.wants.append((n, deadline_ns))
        try:
            await _next_tick()  # all who ask in this tick are in the batch then
            if not batch.closed:
                batch.closed = True
                self._serve(batch)
            if batch.served is not None:
                await self._until_served(batch.served, deadline_ns)
        except BaseException:
            batch.wants[place] = None
            if batch.done:
                self._leave(batch.slots.get(place), n)
            raise
        slot = batch.slots.get(place)
        if slot is None:
            return 0.0
        if isinstance(slot, Exception):
            raise slot
        if batch.served is None and slot.start_ns <= self._clock_ns():
            return 0.0
        steps = self._see_through(slot, entered_ns, deadline_ns)
        return await run_async(steps, self._sleep_async)

    def try_acquire(self, n: int = 1) -> bool:
        """Let n calls pass if they may now; waits for nothing but the file, 20 ms at most."""
        try:
            self.acquire(n, timeout_s=0.0)
        except LimiterTimeout:
            return False
        return True

    def penalise(self, retry_after_s: float = 0.0, *, until_s: float | None = None) -> None:
        """A server said 429 or 503: let nobody pass for a while, those who wait already included.

        After it, calls come at the sustained rate without a burst. Where the limiter is `adaptive`,
        each report counts as an overload too.

        Args:
            retry_after_s: the server's `Retry-After`, 0 to 86400; 0 where it named none. A pause
                shorter than the one in force changes nothing.
            until_s: in its place, the end of the pause on the clock of `boottime_ns`, in seconds.
        """
        run(self._penalise(retry_after_s, until_s, blocking=True), self._sleep)

    async def penalise_async(
        self, retry_after_s: float = 0.0, *, until_s: float | None = None
    ) -> None:
        """`penalise` for coroutines."""
        await run_async(self._penalise(retry_after_s, until_s, blocking=False), self._sleep_async)

    def close(self) -> None:
        """Close the state file; the next call opens it again."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        rate = self.rate
        values = (rate.per_minute, rate.burst, rate.min_interval_s)
        return _again, (type(self), self.path, values, self.adaptive)

    def _acquire(self, n: int, timeout_s: float | None, *, blocking: bool) -> Steps[float]:
        """Returns seconds waited."""
        if n < 1:
            raise self._no_such_n(n)
        entered_ns = self._clock_ns()
        deadline_ns = None if timeout_s is None else entered_ns + int(timeout_s * SECOND_NS)
        waited = yield from self._lock(deadline_ns, blocking)
        try:
            slot = self._reserve(n, entered_ns, deadline_ns)
        finally:
            self._file.unlock()
        if not waited and slot.start_ns <= self._clock_ns():
            return 0.0
        return (yield from self._see_through(slot, entered_ns, deadline_ns, blocking=blocking))

    def _serve(self, batch: "_Batch") -> None:
        """Reserve for all of a batch under one lock, now or, where it is locked, a little later."""
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
        except Exception as error:  # it belongs to those who wait, and they raise it
            batch.slots = dict.fromkeys(places, error)
        batch.done = True
        if batch.served is not None:
            batch.served.set()

    def _reserve_for(self, batch: "_Batch", places: list[int]) -> None:
        """Under the lock; nothing where all have left."""
        if not places:
            return
        file = self._file
        arrivals, now_ns = file.read(), self._clock_ns()
        total = sum(want[0] for want in batch.wants if want is not None)
        if not self._left and not file.rate.min_interval_ns and total <= file.rate.burst:
            pace = pace_at(file.terms, now_ns)
            start_ns, after = reserve(arrivals, now_ns, total, file.rate, pace)
            if start_ns <= now_ns:
                file.write(after)
                return
        for place in places:
            want = batch.wants[place]
            assert want is not None
            try:
                slot, arrivals = self._next(arrivals, now_ns, want[0], batch.entered_ns, want[1])
            except (LimiterTimeout, OverflowError) as error:
                batch.slots[place] = error
            else:
                batch.slots[place] = slot
        file.write(arrivals)

    async def _until_served(self, served: asyncio.Event, deadline_ns: int | None) -> None:
        if deadline_ns is None:
            await served.wait()
            return
        left_ns = deadline_ns + _LOCK_GRACE_NS - self._clock_ns()
        try:
            await asyncio.wait_for(served.wait(), max(0, left_ns) / SECOND_NS)
        except (TimeoutError, asyncio.TimeoutError):
            raise self._held() from None

    def _see_through(
        self, slot: _Slot, entered_ns: int, deadline_ns: int | None, *, blocking: bool = False
    ) -> Steps[float]:
        """Sleep until the slot, and reserve again where it is void by then.

        Returns:
            Seconds since `entered_ns`.
        """
        now_ns = self._clock_ns()
        while slot.start_ns > now_ns:
            try:
                while (left_ns := slot.start_ns - self._clock_ns()) > 0:  # a sleep may end early
                    yield left_ns / SECOND_NS
            except BaseException:
                self._leave(slot, slot.n)
                raise
            now_ns = self._clock_ns()
            if self._file.still(slot.epoch):
                break
            lock_deadline_ns = None if deadline_ns is None else max(deadline_ns, slot.start_ns)
            yield from self._lock(lock_deadline_ns, blocking)
            try:
                self._file.read()
                if self._file.terms.epoch == slot.epoch:
                    break
                slot = self._reserve(slot.n, entered_ns, deadline_ns)
            finally:
                self._file.unlock()
        return max(0, now_ns - entered_ns) / SECOND_NS

    def _reserve(self, n: int, entered_ns: int, deadline_ns: int | None) -> _Slot:
        """Under the lock.

        Raises:
            LimiterTimeout: the slot lies beyond the deadline; it was not reserved.
        """
        arrivals, now_ns = self._file.read(), self._clock_ns()
        slot, after = self._next(arrivals, now_ns, n, entered_ns, deadline_ns)
        if after is not arrivals:
            self._file.write(after)
        return slot

    def _next(
        self,
        arrivals: Arrivals,
        now_ns: int,
        n: int,
        entered_ns: int,
        deadline_ns: int | None,
    ) -> tuple[_Slot, Arrivals]:
        """The next slot, and the state after it."""
        rate, terms = self._file.rate, self._file.terms
        latest_ns = None if deadline_ns is None else max(deadline_ns, now_ns)
        if self._left and (slot := self._reuse(n, now_ns, latest_ns, terms.epoch)) is not None:
            return slot, arrivals
        start_ns, after = reserve(arrivals, now_ns, n, rate, pace_at(terms, now_ns))
        if latest_ns is not None and start_ns > latest_ns:
            assert deadline_ns is not None
            raise LimiterTimeout(
                f"no slot for n={n} calls from {self.path}: the next is "
                f"{(start_ns - entered_ns) / SECOND_NS:.3f} s away, beyond "
                f"timeout_s={(deadline_ns - entered_ns) / SECOND_NS}; wait longer or raise the rate"
            )
        return _Slot(start_ns, terms.epoch, n, arrivals, after), after

    def _reuse(self, n: int, now_ns: int, latest_ns: int | None, epoch: int) -> _Slot | None:
        """The next slot that a cancelled waiter left, if it fits; forgets those that are over."""
        for slot in [s for s in self._left if s.start_ns <= now_ns or s.epoch != epoch]:
            self._left.remove(slot)  # in place: another thread may be adding one
            self.abandoned += slot.n
        fitting = [
            s for s in self._left if s.n == n and (latest_ns is None or s.start_ns <= latest_ns)
        ]
        if not fitting:
            return None
        slot = min(fitting)
        self._left.remove(slot)
        return slot

    def _leave(self, slot: _Slot | Exception | None, n: int) -> None:
        """Give back a slot that will not be used; keep it for others where that cannot be.

        Args:
            slot: None where the n calls might have passed already.
        """
        if isinstance(slot, Exception):
            return
        if slot is None or slot.start_ns <= self._clock_ns():
            self.abandoned += n
            return
        self._left.append(slot)
        file = self._file
        try:
            if not file.lock(blocking=False):
                return
        except (OSError, ValueError):
            return  # the waiter leaves for another reason; who comes next is told
        try:
            arrivals = file.read()
            while True:
                last = [s for s in self._left if s.after == arrivals]
                if not last or last[0].epoch != file.terms.epoch:
                    return
                self._left.remove(last[0])
                arrivals = last[0].before
                file.write(arrivals)
        finally:
            file.unlock()

    def _penalise(
        self, retry_after_s: float, until_s: float | None, *, blocking: bool
    ) -> Steps[None]:
        if until_s is not None:
            retry_after_s = max(0.0, until_s - self._clock_ns() / SECOND_NS)
        if not 0 <= retry_after_s <= 86400:
            raise ValueError(
                f"cannot penalise by retry_after_s={retry_after_s}: must be from 0 to 86400"
            )
        yield from self._lock(None, blocking)
        file = self._file
        try:
            arrivals = file.read()
            now_ns = self._clock_ns()
            pause_ns = int(retry_after_s * SECOND_NS)
            arrivals, terms = penalise(arrivals, file.terms, now_ns, pause_ns, file.rate)
            file.write(arrivals, overloaded(terms, now_ns) if self.adaptive else terms)
        finally:
            file.unlock()

    def _lock(self, deadline_ns: int | None, blocking: bool) -> Steps[bool]:
        """Take the file's lock: at once, by waiting in the kernel, or by coming back.

        Returns:
            Whether somebody else had it first.
        """
        if self._file.lock(blocking=False):
            return False
        if blocking:
            return self._file.lock(blocking=True)
        retry_s = _FIRST_RETRY_S
        while True:
            yield retry_s
            if self._file.lock(blocking=False):
                return True
            if deadline_ns is not None and self._clock_ns() > deadline_ns + _LOCK_GRACE_NS:
                raise self._held()
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _held(self) -> LimiterTimeout:
        return LimiterTimeout(
            f"cannot lock {self.path} in time: another process holds it; look for a stopped one "
            "(fuser names them)"
        )

    def _no_such_n(self, n: int) -> ValueError:
        return ValueError(f"cannot acquire n={n} from {self.path}: n must be at least 1")


def _again(
    kind: type[FileRateLimiter],
    path: os.PathLike[str],
    values: tuple[float, int, float],
    adaptive: bool,
) -> FileRateLimiter:
    return kind(path, *values, adaptive=adaptive)


class _Batch:
    """The coroutines of one loop that asked in one tick: they reserve under one lock."""

    __slots__ = ("closed", "done", "entered_ns", "loop", "retry_s", "served", "slots", "wants")

    def __init__(self, loop: asyncio.AbstractEventLoop, entered_ns: int):
        self.loop, self.entered_ns = loop, entered_ns
        self.wants: list[tuple[int, int | None] | None] = []
        """Calls and deadline, in the order they asked; None of those who left."""

        self.slots: dict[int, _Slot | Exception] = {}
        """Place in `wants` -> what came of it; empty where all passed at once."""

        self.closed = False
        """Nobody joins any more."""

        self.done = False
        self.served: asyncio.Event | None = None
        """Set when done; only where the file was locked by somebody else."""

        self.retry_s = _FIRST_RETRY_S


@types.coroutine
def _next_tick() -> Generator[None]:
    """Let the loop go on; as `asyncio.sleep(0)`, in one step fewer."""
    yield
