"""64 processes hammer one file; of all windows there are, none holds too many granted calls.

What is promised is the granted instant, so that is recorded: the start of a reservation that was
written, and with shares the nanosecond at which the spare token came into being that a waiter had
counted on. Nothing is sampled or rounded.
"""

import asyncio
import multiprocessing
import pickle
import random
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rate_limit import file_limiter, shares
from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout, boottime_ns
from rate_limit.gcra import SECOND_NS, Rate, Throttle
from rate_limit.shares import Reservation, SharedState
from rate_limit.state_file import State, StateFile

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

FORK = multiprocessing.get_context("fork")
PROCESSES = 64
ONE_BY_ONE_S, MIXED_S = 0.7, 1.5


@dataclass(kw_only=True)
class Record:
    """What was granted in one process."""

    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Instants and calls."""

    spare: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Marks of the spare clock, when they had been reached at the latest, and calls."""

    unused: int = 0
    """Calls that were granted, and whose waiters had given up before a spare token came."""

    states: list[SharedState] = field(default_factory=list[SharedState])
    """States written, where the rate has shares."""


class Recorder:
    """Fills a `Record`."""

    def __init__(self) -> None:
        self.record = Record()
        self._tried: dict[State, tuple[State, list[Any], tuple[int | None, ...] | None]] = {}

    def read(self) -> None:
        """What was tried before was written and is recorded, or was not."""
        self._tried.clear()

    def tries(self, reserve: Callable[..., Any]) -> Callable[..., Any]:
        """`reserve`, of any law; noted until its state is written."""

        def noted(state: State, now_ns: int, n: int, *args: Any) -> Any:
            reservation, after = reserve(state, now_ns, n, *args)
            found = Reservation(reservation) if isinstance(reservation, int) else reservation
            granted = (found.start_ns, n) if found.mark is None else None
            self._tried[_key(after)] = state, self.record.reserved, granted
            return reservation, after

        return noted

    def looks_again(
        self, confirm: Callable[..., tuple[Reservation, SharedState]]
    ) -> Callable[..., Any]:
        """`confirm`; noted likewise."""

        def noted(
            counted_on: Reservation, state: SharedState, now_ns: int, n: int, *args: Any
        ) -> Any:
            reservation, after = confirm(counted_on, state, now_ns, n, *args)
            kept: list[Any] = self.record.reserved
            granted = (reservation.start_ns, n) if reservation.mark is None else None
            if granted and counted_on.generation == state.generation == after.generation:
                kept, granted = self.record.spare, (counted_on.mark, now_ns, n)
            self._tried[_key(after)] = state, kept, granted
            return reservation, after

        return noted

    def written(self, state: State) -> None:
        """All reservations that led to this state are granted."""
        if isinstance(state, SharedState):
            self.record.states.append(state)
        while found := self._tried.pop(_key(state), None):
            state, kept, granted = found
            if granted:
                kept.append(granted)


def _key(state: State) -> State:
    """Who looks again is not counted again."""
    return state._replace(granted=0)


RECORDER = Recorder()
"""Of this process: the children are forked, and each uses its own."""


class RecordedFile(StateFile):
    """Tells `RECORDER` what it lets pass."""

    def read(self) -> State:
        RECORDER.read()
        return super().read()

    def write(self, state: State, throttle: Throttle | None = None) -> None:
        super().write(state, throttle)
        RECORDER.written(state)


def limiter_of(path: Path, rate: Rate) -> FileRateLimiter:
    return FileRateLimiter(path, rate.per_minute, rate.burst, shares=dict(rate.weights) or None)


def hammer(place: int, path: Path, rate: Rate, begin: "Event", ends_ns: Any) -> None:
    """Call in the manner of this place until the end, and leave the record beside the file."""
    file_limiter.StateFile = RecordedFile
    file_limiter.reserve = RECORDER.tries(file_limiter.reserve)
    shares.reserve = RECORDER.tries(shares.reserve)
    shares.confirm = RECORDER.looks_again(shares.confirm)
    begin.wait()
    limiter = limiter_of(path, rate)
    sources = [name for name, _ in rate.weights if name] or [""]
    source, rng = sources[place // 4 % len(sources)], random.Random(place)
    one_by_one_end_ns, end_ns = ends_ns

    def try_until(end_ns: int, most: int) -> None:
        while boottime_ns() < end_ns:
            if not limiter.try_acquire(rng.randint(1, most), source):
                time.sleep(rng.uniform(0, 0.005))  # as somebody who comes back later

    def wait() -> None:
        while boottime_ns() < end_ns:
            limiter.acquire(rng.randint(1, 3), source=source)

    def wait_or_give_up() -> None:
        while boottime_ns() < end_ns:
            with suppress(LimiterTimeout):
                limiter.acquire(rng.randint(1, 2), timeout_s=rng.uniform(0, 0.3), source=source)

    async def wait_async() -> None:
        while boottime_ns() < end_ns:
            await limiter.acquire_async(rng.randint(1, 3), source=source)

    async def wait_in_eight_coroutines() -> None:
        await asyncio.gather(*(wait_async() for _ in range(8)))

    try_until(one_by_one_end_ns, most=1)  # nobody waits yet
    if place % 4 == 0:
        try_until(end_ns, most=2)
    elif place % 4 == 1:
        asyncio.run(wait_in_eight_coroutines())
    else:
        work = wait if place % 4 == 2 else wait_or_give_up
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work) for _ in range(4)]:
                done.result()
    RECORDER.record.unused = sum(slot.want.n for slot in limiter._left)
    path.with_name(f"{place}.record").write_bytes(pickle.dumps(RECORDER.record))


def hammered(path: Path, rate: Rate) -> list[Record]:
    """What each process got, when all start at once on a missing file."""
    begin, ends_ns = FORK.Event(), FORK.Array("q", 2, lock=False)
    running = [
        FORK.Process(target=hammer, args=(place, path, rate, begin, ends_ns))
        for place in range(PROCESSES)
    ]
    for process in running:
        process.start()
    first_end_ns = boottime_ns() + int(ONE_BY_ONE_S * SECOND_NS)
    ends_ns[:] = [first_end_ns, first_end_ns + int(MIXED_S * SECOND_NS)]
    begin.set()
    for process in running:
        process.join()
        assert process.exitcode == 0
    return [
        pickle.loads(path.with_name(f"{place}.record").read_bytes()) for place in range(PROCESSES)
    ]


def grants_of(records: list[Record], rate: Rate) -> list[tuple[int, int]]:
    """Instants and calls, in order."""
    grants = [grant for record in records for grant in record.reserved]
    states = [state for record in records for state in record.states]
    states.sort(key=lambda state: (state.spilt, sum(state.own)))
    for mark, now_ns, n in [spare for record in records for spare in record.spare]:
        before = states[bisect_left(states, mark, key=attrgetter("spilt")) - 1]
        grants.append((reached_ns(before, mark, now_ns, rate), n))
    return sorted(grants)


def reached_ns(state: SharedState, mark: int, now_ns: int, rate: Rate) -> int:
    """When the spare clock comes to the mark; nobody calls after this state until then."""
    speeds = [weight * rate.parts_per_ns for _, weight in rate.weights]

    def spilt(at_ns: int) -> int:
        pairs = zip(state.own, speeds, strict=True)
        return state.spilt + sum(max(0, at_ns * speed - tat) for tat, speed in pairs)

    return bisect_left(range(now_ns), mark, key=spilt)


def most_beyond(grants: list[tuple[int, int]], rate: Rate) -> Fraction:
    """Calls in [t_i, t_j] less rate * (t_j - t_i), the most over all i <= j."""
    per_ns = Fraction(str(rate.per_minute)) / (60 * SECOND_NS)
    passed = most = 0  # in parts of a call, to stay whole
    least = -grants[0][0] * per_ns.numerator
    for at_ns, n in grants:
        earned = at_ns * per_ns.numerator
        least = min(least, passed - earned)
        passed += n * per_ns.denominator
        most = max(most, passed - earned - least)
    return Fraction(most, per_ns.denominator)


def fullest(grants: list[tuple[int, int]], window_ns: int) -> int:
    """Most calls in [t, t + window], over all t."""
    first = calls = most = 0
    for at_ns, n in grants:
        calls += n
        while grants[first][0] < at_ns - window_ns:
            calls -= grants[first][1]
            first += 1
        most = max(most, calls)
    return most


def test_the_checks_find_the_fullest_window():
    grants = [(0, 1), (5 * SECOND_NS, 2), (6 * SECOND_NS, 1), (6 * SECOND_NS + 1, 1), (10**11, 1)]
    assert most_beyond(grants, Rate(per_minute=60, burst=1)) == 3 - Fraction(1, SECOND_NS)
    windows_ns = (0, 1, SECOND_NS, SECOND_NS + 1)
    assert [fullest(grants, window_ns) for window_ns in windows_ns] == [2, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [None, {"a": 3, "b": 1}], ids=["no shares", "shares"])
def test_64_processes_keep_the_rate_in_every_window_and_use_it_up(
    tmp_path: Path, shares: dict[str, float] | None
):
    rate, used = Rate(per_minute=60_000, burst=100, shares=shares), 0.0
    least_used = 0.9 if shares is None else 0.5
    for attempt in range(8):  # on a busy machine those who wait for what others leave wake late
        path = tmp_path / f"folder{attempt}" / "rate"
        records = hammered(path, rate)
        grants, unused = grants_of(records, rate), sum(record.unused for record in records)
        calls = sum(n for _, n in grants)
        earned = rate.per_minute * (grants[-1][0] - grants[0][0]) / (60 * SECOND_NS)
        snapshot = limiter_of(path, rate).snapshot()
        assert calls + unused + snapshot.abandoned == snapshot.granted
        assert most_beyond(grants, rate) <= rate.burst
        assert any(record.spare for record in records) == (shares is not None)
        used = max(used, calls / earned)
        if used >= least_used:
            break
    assert used >= least_used


@pytest.mark.slow
def test_64_processes_keep_a_strict_limit_in_every_window(tmp_path: Path):
    path, rate = tmp_path / "rate", Rate.within_window(350, 0.25, burst=100)
    records = hammered(path, rate)
    grants = grants_of(records, rate)
    assert sum(n for _, n in grants) == limiter_of(path, rate).snapshot().granted
    assert 200 < fullest(grants, SECOND_NS // 4) <= 350
