"""The law of the limiter, for any order of reservations, pauses and losses of state."""

import heapq
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rate_limit.gcra import (
    FULL_PACE,
    RECOVERY_NS,
    SLOWEST_PACE,
    STORM_NS,
    GcraState,
    Rate,
    Throttle,
    drained,
    idle,
    overloaded,
    pace_at,
    pause_ns,
    penalise,
    reserve,
)

MILLISECOND_NS = 10**6


def test_burst_passes_at_once_then_one_per_emission_interval():
    rate, state, waits_ns = Rate(per_minute=120, burst=3), idle(), []
    for _ in range(5):
        start_ns, state = reserve(state, 10**12, 1, rate)
        waits_ns.append(start_ns - 10**12)
    assert waits_ns == [0, 0, 0, 500 * MILLISECOND_NS, 1000 * MILLISECOND_NS]


def test_idle_time_refills_the_burst_and_no_more():
    rate = Rate(per_minute=60, burst=2)
    _, state = reserve(idle(), 10**12, 2, rate)
    starts_ns = []
    for _ in range(3):
        start_ns, state = reserve(state, 2 * 10**12, 1, rate)
        starts_ns.append(start_ns - 2 * 10**12)
    assert starts_ns == [0, 0, 10**9]


def test_calls_keep_their_least_interval_inside_a_burst_too():
    rate, state, waits_ns = Rate(per_minute=60, burst=9, min_interval_s=0.1), idle(), []
    for _ in range(3):
        start_ns, state = reserve(state, 10**12, 1, rate)
        waits_ns.append(start_ns - 10**12)
    assert waits_ns == [0, 100 * MILLISECOND_NS, 200 * MILLISECOND_NS]


@given(per_minute=st.floats(60.0, 5.9e10), calls=st.sampled_from([1, 10**3, 10**9]))
def test_a_billion_calls_take_as_long_as_the_rate_says_to_the_nanosecond(
    per_minute: float, calls: int
):
    rate = Rate(per_minute=per_minute, burst=1)
    exact_ns = calls * 60 * 10**9 / Fraction(str(per_minute))
    _, state = reserve(GcraState(0, 0, 0, 0), 0, calls, rate)
    assert state.tat_ns + 1 > exact_ns - 1
    assert state.tat_ns < exact_ns + 1


def test_one_by_one_nothing_is_rounded_away():
    rate = Rate(per_minute=7, burst=1)  # 8571428571.43 ns each
    state, start_ns = idle(), 0
    for _ in range(7001):
        start_ns, state = reserve(state, 10**12, 1, rate)
    assert start_ns == 10**12 + 1000 * 60 * 10**9


def test_more_calls_than_a_burst_are_served_over_time():
    rate = Rate(per_minute=60, burst=5)
    start_ns, state = reserve(idle(), 10**12, 12, rate)
    assert start_ns == 10**12 + 7 * 10**9
    next_ns, _ = reserve(state, 10**12, 1, rate)
    assert next_ns == start_ns + 10**9


def test_a_slot_centuries_away_is_refused():
    rate = Rate(per_minute=1, burst=1)
    with pytest.raises(OverflowError, match="centuries away"):
        reserve(idle(), 10**12, 10**10, rate)


@given(
    limit=st.integers(2, 60),
    spare=st.integers(1, 59),
    window_s=st.floats(0.01, 100.0),
    gaps_ms=st.lists(st.integers(0, 4000), min_size=1, max_size=120),
)
def test_no_window_of_the_strict_mode_sees_more_than_its_limit(
    limit: int, spare: int, window_s: float, gaps_ms: list[int]
):
    rate = Rate.within_window(limit, window_s, burst=max(1, limit - spare))
    state, now_ns, starts_ns = idle(), 10**12, []
    for gap_ms in gaps_ms:
        now_ns += gap_ms * MILLISECOND_NS
        start_ns, state = reserve(state, now_ns, 1, rate)
        starts_ns.append(start_ns)
    for first, start_ns in enumerate(starts_ns):
        inside = [s for s in starts_ns[first:] if s < start_ns + window_s * 10**9 - 1]
        assert len(inside) <= limit


def test_a_window_needs_room_above_its_burst():
    with pytest.raises(ValueError, match="the limit above burst=10; lower the burst"):
        Rate.within_window(10, 60, burst=10)


@pytest.mark.parametrize("min_interval_s", [0, 1])
def test_after_a_pause_calls_come_one_by_one(min_interval_s: float):
    rate = Rate(per_minute=60, burst=5, min_interval_s=min_interval_s)
    state, _ = penalise(idle(), Throttle(), 10**12, 3 * 10**9, rate)
    waits_s = []
    for _ in range(3):
        start_ns, state = reserve(state, 10**12, 1, rate)
        waits_s.append((start_ns - 10**12) / 10**9)
    assert waits_s == [3, 4, 5]


def test_a_pause_shorter_than_the_wait_brings_nobody_forward():
    rate = Rate(per_minute=60, burst=5)
    _, state = reserve(idle(), 10**12, 5, rate)
    start_ns, _ = reserve(penalise(state, Throttle(), 10**12, 1, rate)[0], 10**12, 1, rate)
    assert start_ns >= 10**12 + 10**9


def test_a_pause_that_ends_sooner_than_the_one_in_force_is_only_counted():
    rate = Rate(per_minute=60, burst=5)
    paused, throttle = penalise(idle(), Throttle(), 10**12, 3 * 10**9, rate)
    again, counted = penalise(paused, throttle, 10**12, 2 * 10**9, rate)
    assert again is paused
    assert counted == throttle._replace(penalties=2)
    assert penalise(paused, throttle, 10**12, 4 * 10**9, rate)[1].epoch != throttle.epoch


def test_a_pause_is_a_day_at_most():
    assert pause_ns(86400) == 86400 * 10**9
    for seconds in (86400.5, -0.001, float("nan")):
        with pytest.raises(ValueError, match="must be from 0 to 86400"):
            pause_ns(seconds)


def test_a_storm_of_overloads_halves_the_rate_once():
    throttle = Throttle()
    for _ in range(50):
        throttle = overloaded(throttle, 10**12)
    assert pace_at(throttle, 10**12) == FULL_PACE // 2


def test_single_overloads_change_nothing():
    throttle = Throttle()
    for second in range(50):
        now_ns = 10**12 + 2 * second * STORM_NS
        throttle = overloaded(throttle, now_ns)
        assert pace_at(throttle, now_ns) == FULL_PACE


def test_a_halved_rate_recovers_by_equal_steps_up_to_the_full_one():
    throttle = Throttle(pace=FULL_PACE // 2, paced_ns=10**12)
    quarter_ns = RECOVERY_NS // 4
    paces = [pace_at(throttle, 10**12 + i * quarter_ns) / FULL_PACE for i in range(4)]
    assert paces == [0.5, 0.75, 1.0, 1.0]


def test_storm_after_storm_leaves_a_rate_to_recover_from():
    throttle = Throttle()
    for storm in range(40):
        for _ in range(3):
            throttle = overloaded(throttle, 10**12 + 2 * storm * STORM_NS)
    assert throttle.pace >= SLOWEST_PACE


def test_a_slowed_down_rate_spaces_calls_wider():
    rate, state, waits_s = Rate(per_minute=60, burst=1), idle(), []
    for _ in range(3):
        start_ns, state = reserve(state, 10**12, 1, rate, FULL_PACE // 4)
        waits_s.append((start_ns - 10**12) / 10**9)
    assert waits_s == [0, 4, 8]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"per_minute": 0}, "per_minute=0"),
        ({"per_minute": float("nan")}, "per_minute=nan"),
        ({"per_minute": float("inf")}, "per_minute=inf"),
        ({"per_minute": 6e10}, "per_minute=60000000000.0"),
        ({"burst": 0}, "burst=0"),
        ({"burst": 2.5}, "burst=2.5"),
        ({"min_interval_s": -1}, "min_interval_s=-1"),
        ({"per_minute": 0.001, "burst": 10**6}, "more than a year"),
    ],
)
def test_a_rate_out_of_range_is_refused_by_name(values: dict[str, Any], word: str):
    with pytest.raises(ValueError, match="cannot limit a rate") as caught:
        Rate(**{"per_minute": 60, "burst": 1, **values})
    assert word in str(caught.value)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3000),  # ms since the event before
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(1, 8)),
            st.tuples(st.just("penalise"), st.integers(0, 4000)),
            st.tuples(st.just("overload"), st.just(0)),
            st.tuples(st.just("lose"), st.just(0)),
        ),
    ),
    min_size=1,
    max_size=50,
)


@given(
    events=EVENTS,
    per_minute=st.floats(20.0, 3000.0),
    burst=st.integers(1, 8),
    min_interval_s=st.sampled_from([0.0, 0.0, 0.05, 0.7]),
)
def test_no_window_sees_more_than_burst_plus_rate_times_window(
    events: list[tuple[int, tuple[str, int]]],
    per_minute: float,
    burst: int,
    min_interval_s: float,
):
    rate = Rate(per_minute=per_minute, burst=burst, min_interval_s=min_interval_s)
    state, throttle, now_ns = idle(), Throttle(), 10**12
    waiting: list[tuple[int, int, int, int]] = []  # start, order, n, epoch
    passed: list[tuple[int, int]] = []  # start, n
    pauses: list[tuple[int, int]] = []

    def let_pass(state: GcraState, until_ns: int) -> GcraState:
        while waiting and waiting[0][0] <= until_ns:
            start_ns, order, n, own_epoch = heapq.heappop(waiting)
            if own_epoch == throttle.epoch:
                passed.append((start_ns, n))
            else:  # as the limiter does: a void reservation is made again when its time comes
                pace = pace_at(throttle, start_ns)
                again_ns, state = reserve(state, start_ns, n, rate, pace)
                heapq.heappush(waiting, (again_ns, order, n, throttle.epoch))
        return state

    for order, (gap_ms, (kind, value)) in enumerate(events):
        now_ns += gap_ms * MILLISECOND_NS
        state = let_pass(state, now_ns)
        if kind == "reserve":
            n = min(value, burst)
            pace = pace_at(throttle, now_ns)
            start_ns, state = reserve(state, now_ns, n, rate, pace)
            heapq.heappush(waiting, (start_ns, order, n, throttle.epoch))
            state = let_pass(state, now_ns)
        elif kind == "overload":
            for _ in range(3):
                throttle = overloaded(throttle, now_ns)
        elif kind == "penalise":
            state, throttle = penalise(state, throttle, now_ns, value * MILLISECOND_NS, rate)
            pauses.append((now_ns, now_ns + value * MILLISECOND_NS))
        else:
            state, throttle = drained(now_ns, rate), Throttle(epoch=1000 * (order + 1))
            pauses.clear()  # known to nobody any more
            passed.append((now_ns, 0))
    let_pass(state, 10**30)

    for first, (start_ns, _) in enumerate(passed):
        calls = 0
        for end_ns, n in passed[first:]:
            calls += n
            took = (end_ns - start_ns + 1) * rate.parts_per_ns  # instants are whole nanoseconds
            assert (calls - burst) * rate.interval_parts <= took
    calls_only = [(start_ns, n) for start_ns, n in passed if n]
    for (before_ns, n), (after_ns, _) in pairwise(calls_only):
        assert after_ns - before_ns >= n * rate.min_interval_ns
    for start_ns, _ in calls_only:
        assert not any(paused_ns < start_ns < end_ns for paused_ns, end_ns in pauses)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 4)), min_size=2, max_size=40))
def test_order_of_reservation_is_order_of_service(calls: list[tuple[int, int]]):
    rate, state, now_ns, starts_ns = Rate(per_minute=90, burst=4), idle(), 10**12, []
    for gap_ms, n in calls:
        now_ns += gap_ms * MILLISECOND_NS
        start_ns, state = reserve(state, now_ns, n, rate)
        starts_ns.append(start_ns)
    assert starts_ns == sorted(starts_ns)


@given(st.integers(1, 8), st.floats(20.0, 3000.0), st.integers(1, 8))
def test_a_drained_bucket_gives_its_first_call_one_emission_interval_later(
    burst: int, per_minute: float, n: int
):
    rate = Rate(per_minute=per_minute, burst=burst)
    start_ns, _ = reserve(drained(10**12, rate, 0), 10**12, min(n, burst), rate)
    assert 0 <= start_ns - 10**12 - rate.for_calls_ns(min(n, burst)) <= 1
