"""Shares of a rate against the law, every window of every history, and what they are for."""

import asyncio
import heapq
import multiprocessing
import pickle
from collections import Counter
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rate_limit import shares
from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout
from rate_limit.gcra import SECOND_NS, Rate, Throttle
from rate_limit.shares import Reservation, SharedState
from rate_limit.snapshot import SourceSnapshot
from tests.rate_limit.fake_clock import FakeClock

SOURCES = ["taco", "nq", "math", "unknown"]
RATE = Rate(per_minute=60_000, burst=20, shares={"taco": 0.5, "nq": 0.3, "math": 0.2})
MS = SECOND_NS // 1000

calls = st.tuples(
    st.integers(0, 30 * MS), st.sampled_from(SOURCES), st.integers(1, 4), st.integers(1, 6)
)
"""Nanoseconds after those before, source, n, callers."""

rates = st.builds(
    lambda per_minute, burst, weights: Rate(
        per_minute=per_minute, burst=burst, shares=dict(zip(SOURCES, weights, strict=False))
    ),
    st.sampled_from([600, 7_000, 60_000, 1_000_000]),
    st.integers(5, 40),
    st.lists(st.sampled_from([0.1, 1 / 3, 1, 2.5, 10, 100]), min_size=1, max_size=3),
)


def burst_of(source: str, rate: Rate) -> int:
    """Calls of a source that may pass at once, whatever the other sources do."""
    buckets = shares._buckets(rate)
    return buckets.sizes[buckets.place.get(source, buckets.place[""])] // buckets.token


def test_the_example_of_the_module():
    rate = Rate(per_minute=60, burst=6, shares={"a": 3, "b": 1, "": 1})
    state, reservations = shares.drained(0, rate), list[Reservation]()
    for _ in range(6):
        reservation, state = shares.reserve(state, 0, 1, rate, source="a")
        reservations.append(reservation)
    expected_s = [1.67, 3.33, 5.0, 6.67, 7.5, 8.33]
    assert [round(each.start_ns / SECOND_NS, 2) for each in reservations] == expected_s
    assert [each.mark is not None for each in reservations] == [False] * 4 + [True, False]
    of_b, state = shares.reserve(state, 6 * SECOND_NS, 1, rate, source="b")
    assert of_b.start_ns == 6 * SECOND_NS
    again, _ = shares.confirm(reservations[4], state, 7500 * MS, 1, rate, source="a")
    assert again == Reservation(10 * SECOND_NS)


class Callers:
    """Callers that sleep as they are told, and look again when they wake."""

    def __init__(self, rate: Rate, state: SharedState | None = None):
        self.rate, self.now_ns = rate, 0
        self.state = shares.idle(rate) if state is None else state
        self.passed: list[tuple[int, str, int]] = []
        """Instant, source, n."""

        self._asleep: list[tuple[int, int, Reservation, str, int, int]] = []
        self._number = 0
        self.looks = 0
        self.longest_ns = 0
        """Longest wait of those who passed or looked again."""

    def call(self, source: str, n: int = 1) -> None:
        reservation, self.state = shares.reserve(
            self.state, self.now_ns, n, self.rate, source=source
        )
        if reservation.start_ns <= self.now_ns:
            self.passed.append((self.now_ns, source, n))
        else:
            self._sleep(reservation, source, n, self.now_ns)

    def advance_to(self, until_ns: int) -> None:
        """Everybody who is due by then passes or sleeps on."""
        while self._asleep and self._asleep[0][0] <= until_ns:
            self.now_ns, _, reservation, source, n, called_ns = heapq.heappop(self._asleep)
            self.longest_ns = max(self.longest_ns, self.now_ns - called_ns)
            if reservation.mark is None:
                self._pass_by_own(reservation.start_ns, source, n)
                continue
            self.looks += 1
            reservation, self.state = shares.confirm(
                reservation, self.state, self.now_ns, n, self.rate, source=source
            )
            if reservation.start_ns <= self.now_ns and reservation.mark is None:
                self.passed.append((self.now_ns, source, n))
            else:
                self._sleep(reservation, source, n, called_ns)
        self.now_ns = until_ns

    def advance(self) -> None:
        """Until nobody waits."""
        while self._asleep:
            self.advance_to(self._asleep[0][0])

    def _pass_by_own(self, at_ns: int, source: str, n: int) -> None:
        """n calls at once, or those beyond the burst one by one before."""
        weights = dict(self.rate.weights)
        per_call_ns = self.rate.for_calls_ns(sum(weights.values())) // weights.get(
            source, weights[""]
        )
        burst = burst_of(source, self.rate)
        for i in range(max(0, n - burst)):
            self.passed.append((at_ns - (n - burst - i) * per_call_ns, source, 1))
        self.passed.append((at_ns, source, min(n, burst)))

    def _sleep(self, reservation: Reservation, source: str, n: int, called_ns: int) -> None:
        self._number += 1
        heapq.heappush(
            self._asleep, (reservation.start_ns, self._number, reservation, source, n, called_ns)
        )


def assert_no_window_holds_too_many(passed: list[tuple[int, str, int]], rate: Rate) -> None:
    """An instant is rounded up to whole nanoseconds, so a window may look shorter by one."""
    per_call = Fraction(rate.interval_parts, rate.parts_per_ns)
    level, last_ns = Fraction(rate.burst), 0
    for instant_ns, _, n in sorted(passed):
        level = min(Fraction(rate.burst), level + (instant_ns - last_ns) / per_call)
        last_ns = instant_ns
        level -= n
        assert level > -1 / per_call - Fraction(len(passed), 10**6)


@given(rate=rates, history=st.lists(calls, max_size=60))
def test_no_window_of_any_history_holds_more_than_burst_plus_rate_times_time(rate, history):
    callers = Callers(rate)
    for gap_ns, source, n, times in history:
        callers.advance_to(callers.now_ns + gap_ns)
        for _ in range(times):
            callers.call(source, n)
    callers.advance()
    assert sum(n for *_, n in callers.passed) == sum(n * times for *_, n, times in history)
    assert_no_window_holds_too_many(callers.passed, rate)


@given(rate=rates, history=st.lists(calls, max_size=30), pause_ns=st.integers(1, SECOND_NS))
def test_nobody_passes_in_a_pause_nor_in_a_burst_after_it(rate, history, pause_ns):
    callers = Callers(rate)
    for gap_ns, source, _, times in history:
        callers.advance_to(callers.now_ns + gap_ns)
        for _ in range(times):
            callers.call(source)
    paused_ns = callers.now_ns + pause_ns
    state, throttle = shares.penalise(callers.state, Throttle(), callers.now_ns, pause_ns, rate)
    assert throttle == Throttle(epoch=1, penalties=1, paused_ns=paused_ns)
    after = Callers(rate, state)
    after.advance_to(callers.now_ns)
    for source in SOURCES * 5:
        after.call(source)
    after.advance()
    per_call = Fraction(rate.interval_parts, rate.parts_per_ns)
    for instant_ns, _, _ in after.passed:
        assert instant_ns >= paused_ns
        so_far = sum(1 for other_ns, _, _ in after.passed if other_ns <= instant_ns)
        assert so_far <= (instant_ns - paused_ns) / per_call + 1


@given(rate=rates, history=st.lists(calls, max_size=30))
def test_an_empty_bucket_covers_whatever_passed_before(rate, history):
    callers = Callers(rate)
    for gap_ns, source, n, times in history:
        callers.advance_to(callers.now_ns + gap_ns)
        for _ in range(times):
            callers.call(source, min(n, burst_of(source, rate)))
    before = [call for call in callers.passed if call[0] <= callers.now_ns]
    after = Callers(rate, shares.drained(callers.now_ns, rate))
    after.advance_to(callers.now_ns)
    for source in SOURCES * 5:
        after.call(source)
    after.advance()
    assert_no_window_holds_too_many(before + after.passed, rate)


def counts(passed: list[tuple[int, str, int]], begin_ns: int, end_ns: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for instant_ns, source, n in passed:
        if begin_ns <= instant_ns < end_ns:
            found[source] += n
    return found


def saturate(callers: Callers, sources: list[str], until_ns: int, each: int = 40) -> None:
    """`each` callers of each source that ask again as soon as they passed."""
    for source in sources:
        for _ in range(each):
            callers.call(source)
    seen = len(callers.passed)
    while callers.now_ns < until_ns:
        callers.advance_to(callers.now_ns + MS)
        for _, source, _ in callers.passed[seen:]:
            if source in sources:
                callers.call(source)
        seen = len(callers.passed)


def test_sources_that_all_want_more_get_their_shares_and_what_nobody_uses():
    callers = Callers(RATE)
    saturate(callers, ["taco", "nq", "math"], 10 * SECOND_NS)
    found = counts(callers.passed, SECOND_NS, 10 * SECOND_NS)
    assert 8990 <= sum(found.values()) <= 9020  # 1000/s, of which a sixth is nobody's
    for source, weight in (("taco", 5), ("nq", 3), ("math", 2)):
        assert 9000 * weight / 12 - 20 <= found[source]


def test_one_source_alone_gets_the_whole_rate():
    callers = Callers(RATE)
    saturate(callers, ["math"], 10 * SECOND_NS)
    assert 8950 <= counts(callers.passed, SECOND_NS, 10 * SECOND_NS)["math"] <= 9020
    assert callers.looks <= 1.1 * len(callers.passed)  # a sleeper is right about its time


def test_what_a_source_uses_now_and_then_leaves_the_rest_to_the_others():
    callers = Callers(RATE)
    for _ in range(64):
        callers.call("math")
    seen = 0
    while callers.now_ns < 10 * SECOND_NS:
        callers.advance_to(callers.now_ns + MS)
        if callers.now_ns % (20 * MS) == 0:
            callers.call("taco")
        for _, source, _ in callers.passed[seen:]:
            if source == "math":
                callers.call(source)
        seen = len(callers.passed)
    found = counts(callers.passed, SECOND_NS, 10 * SECOND_NS)
    assert found["taco"] == 450
    assert 8540 <= found["math"] <= 8570


def test_a_source_that_wakes_up_gets_its_share_from_that_instant():
    callers = Callers(RATE)
    saturate(callers, ["taco"], 5 * SECOND_NS, each=2000)  # two seconds of waiters
    woken_ns = callers.now_ns
    for _ in range(200):
        callers.call("math")
    callers.advance_to(woken_ns + 2 * SECOND_NS)
    found = counts(callers.passed, woken_ns, woken_ns + SECOND_NS)
    assert found["math"] >= 1000 * 2 / 12 - 2
    assert 980 <= sum(found.values()) <= 1020
    first_ns = min(at_ns for at_ns, source, _ in callers.passed if source == "math")
    assert first_ns == woken_ns


def test_nobody_starves_behind_sources_that_wake_up():
    callers = Callers(RATE)
    for _ in range(300):
        callers.call("math")  # most of them count on the others to be idle
    saturate(callers, [*SOURCES], 8 * SECOND_NS)
    # 340 callers at a sixth of 1000/s take two seconds, and so do those it goes behind then.
    assert callers.longest_ns <= 4.2 * SECOND_NS


WEIGHTS = {"taco": 2, "nq": 1}  # and 1 for the others: 4 calls in all


def limiter_at(path: Path, clock: FakeClock, burst: int = 8) -> FileRateLimiter:
    """4 calls a second: 2 of taco, 1 of nq, 1 of the others; a burst of 2, 1, 1 and 4 spare."""
    return FileRateLimiter(
        path,
        per_minute=240,
        burst=burst,
        shares=WEIGHTS,
        clock_ns=clock,
        sleep=clock.sleep,
        sleep_async=clock.sleep_async,
    )


def drain(limiter: FileRateLimiter) -> None:
    """Use taco's burst and the spare one."""
    while limiter.try_acquire(source="taco"):
        pass


def test_a_burst_is_the_sources_own_and_the_spare_one(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    assert sum(limiter.try_acquire(source="taco") for _ in range(8)) == 6
    assert sum(limiter.try_acquire(source="nq") for _ in range(8)) == 1
    assert sum(limiter.try_acquire(source="math") for _ in range(8)) == 1
    assert limiter.snapshot().granted == 8


def test_a_source_alone_waits_for_the_whole_rate_and_looks_again_where_others_come(tmp_path: Path):
    clock = FakeClock()
    limiter, other = limiter_at(tmp_path / "rate", clock), limiter_at(tmp_path / "rate", clock)
    drain(limiter)
    waited_s = [limiter.acquire(source="taco") for _ in range(5)]
    assert sum(waited_s) == pytest.approx(1.5)  # by its own share: 2.5
    assert len(clock.slept_s) == 3
    clock.meanwhile = lambda: other.acquire(source="nq")
    assert limiter.acquire(2, source="taco") == pytest.approx(1.0)
    assert limiter.snapshot().granted == 6 + 5 + 1 + 2


def test_a_timeout_consumes_nothing(tmp_path: Path):
    clock = FakeClock()
    limiter = limiter_at(tmp_path / "rate", clock)
    drain(limiter)
    before = (tmp_path / "rate").read_bytes()
    with pytest.raises(LimiterTimeout, match="no slot"):
        limiter.acquire(4, timeout_s=0.5, source="taco")
    assert (tmp_path / "rate").read_bytes() == before


async def test_a_cancelled_waiter_gives_back_what_it_counted_on(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=8, shares=WEIGHTS)
    drain(limiter)
    waiters = [asyncio.ensure_future(limiter.acquire_async(n, source="taco")) for n in (1, 2, 3, 4)]
    while limiter.snapshot().waiting < 4:  # noqa: ASYNC110 - other tasks run meanwhile
        await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert limiter.snapshot().granted == 6
    assert limiter.snapshot().abandoned == 0


def test_it_pickles_with_its_shares(tmp_path: Path):
    clock = FakeClock()
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=8, shares=WEIGHTS)
    drain(limiter)
    twin = pickle.loads(pickle.dumps(limiter))
    assert twin.rate == limiter.rate
    assert not twin.try_acquire(source="taco")
    assert twin.try_acquire(source="nq")
    assert clock.slept_s == []


def test_other_shares_on_one_file_are_refused_and_adopted_on_request(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    limiter = limiter_at(path, clock)
    limiter.acquire(source="nq")
    with pytest.raises(ValueError, match=r"shares=.*'taco': 2.*asked for is.*shares=.*'nq': 5"):
        FileRateLimiter(path, 240, 8, shares={"taco": 1, "nq": 5}, clock_ns=clock)
    with pytest.raises(ValueError, match="asked for is per_minute=240"):
        FileRateLimiter(path, 240, 8, clock_ns=clock)
    plain = FileRateLimiter(path, 240, 8, clock_ns=clock, on_config_change="adopt")
    assert not plain.try_acquire()
    assert not limiter.try_acquire(source="nq")
    assert limiter.rate == plain.rate
    again = FileRateLimiter(
        path, 240, 8, shares=WEIGHTS, clock_ns=clock, on_config_change="adopt", sleep=clock.sleep
    )
    assert not plain.try_acquire()
    assert plain.rate == again.rate
    assert again.acquire(source="nq") == pytest.approx(1.0)


def test_a_torn_record_and_a_deleted_file_start_with_empty_buckets(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    limiter = limiter_at(path, clock)
    limiter.acquire(source="nq")
    path.write_bytes(path.read_bytes()[:-1])
    assert not any(limiter.try_acquire(source=source) for source in SOURCES)
    clock.now_ns += 2 * SECOND_NS
    assert all(limiter.try_acquire(source=source) for source in ("taco", "nq", "math"))
    path.unlink()
    clock.now_ns += SECOND_NS // 50
    assert not any(limiter.try_acquire(source=source) for source in ("nq", "math"))


@pytest.mark.parametrize(
    "shares_, burst, interval_s, rule",
    [
        ({"taco": 0}, 8, 0, "above 0"),
        ({"taco": float("nan")}, 8, 0, "above 0"),
        ({"taco": 1, "nq": 1}, 2, 0, "burst=2 must be at least 4"),
        ({"taco": 1}, 8, 0.5, "min_interval_s=0.5 cannot be kept with shares"),
        ({"taco": 1, "nq": 1}, 3, 0, "burst=3 must be at least 4"),
        ({str(i): 1 for i in range(17)}, 100, 0, "at most 17"),
        ({"x" * 64: 1}, 8, 0, "names of 63 bytes"),
    ],
)
def test_shares_that_cannot_be_are_refused(shares_, burst, interval_s, rule):
    with pytest.raises(ValueError, match=rule):
        Rate(per_minute=60, burst=burst, min_interval_s=interval_s, shares=shares_)


@pytest.mark.parametrize(
    ("shares_", "weights"),
    [
        ({"taco": 0.5, "nq": 0.3, "math": 0.2}, {"": 2, "math": 2, "nq": 3, "taco": 5}),
        ({"taco": 3, "": 1}, {"": 1, "taco": 3}),
        ({"taco": 1 / 3, "nq": 1}, {"": 1, "nq": 3, "taco": 1}),
        ({"taco": 1e-9, "nq": 1e9}, {"": 1, "nq": 10_000, "taco": 1}),
        ({"x" * 63: 1}, {"": 1, "x" * 63: 1}),
        ({str(i): 1 for i in range(16)}, dict.fromkeys(["", *sorted(map(str, range(16)))], 1)),
    ],
)
def test_shares_become_smallest_whole_numbers_and_others_get_the_least_of_them(shares_, weights):
    rate = Rate(per_minute=60, burst=len(weights) + 1, shares=shares_)
    assert rate.weights == tuple(weights.items())
    assert str(rate).endswith(f" shares={weights}")
    assert str(Rate(per_minute=60, burst=2)) == "per_minute=60.0 burst=2 min_interval_s=0.0"


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-9, 1e9), min_size=1))
def test_weights_in_lowest_numbers_are_their_own_weights(weights):
    rate = Rate(per_minute=60, burst=100, shares=weights)
    assert Rate(per_minute=60, burst=100, shares=dict(rate.weights)) == rate
    assert all(weight >= 1 for _, weight in rate.weights)


def call_often(limiter: FileRateLimiter, source: str, times: int, report: Connection) -> None:
    before = limiter.snapshot()
    for _ in range(times):
        limiter.acquire(source=source)
    report.send((before, limiter.snapshot()))


@pytest.mark.slow
def test_a_chatty_source_does_not_starve_another_in_real_processes(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    limiter = FileRateLimiter(
        tmp_path / "rate", per_minute=12_000, burst=20, shares={"taco": 1, "nq": 1}
    )
    receiver, sender = context.Pipe(duplex=False)
    chatty = [
        context.Process(target=call_often, args=(limiter, "taco", 10**6, sender)) for _ in range(6)
    ]
    for process in chatty:
        process.start()
    while limiter.snapshot().sources.get("taco", SourceSnapshot()).waiting < 6:
        limiter.try_acquire(source="nq")
    quiet = context.Process(target=call_often, args=(limiter, "nq", 100, sender))
    quiet.start()
    before, after = receiver.recv()
    for process in chatty:
        process.kill()
    for process in (*chatty, quiet):
        process.join()
    gained = {name: after.sources[name].granted - before.sources[name].granted for name in WEIGHTS}
    assert gained["nq"] == 100
    assert gained["taco"] <= 400  # by shares 200, without them 600
