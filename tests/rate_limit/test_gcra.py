"""The law of the limiter, for any order of reservations, pauses and losses of state."""

import heapq
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rate_limit.gcra import Arrivals, Rate, drained, idle, push_back, reserve

MILLISECOND_NS = 10**6


def test_burst_passes_at_once_then_one_per_emission_interval():
    rate, arrivals, waits_ns = Rate(per_minute=120, burst=3), idle(0), []
    for _ in range(5):
        start_ns, arrivals = reserve(arrivals, 10**12, 1, rate)
        waits_ns.append(start_ns - 10**12)
    assert waits_ns == [0, 0, 0, 500 * MILLISECOND_NS, 1000 * MILLISECOND_NS]


def test_idle_time_refills_the_burst_and_no_more():
    rate = Rate(per_minute=60, burst=2)
    _, arrivals = reserve(idle(0), 10**12, 2, rate)
    starts_ns = []
    for _ in range(3):
        start_ns, arrivals = reserve(arrivals, 2 * 10**12, 1, rate)
        starts_ns.append(start_ns - 2 * 10**12)
    assert starts_ns == [0, 0, 10**9]


def test_calls_keep_their_least_interval_inside_a_burst_too():
    rate, arrivals, waits_ns = Rate(per_minute=60, burst=9, min_interval_s=0.1), idle(0), []
    for _ in range(3):
        start_ns, arrivals = reserve(arrivals, 10**12, 1, rate)
        waits_ns.append(start_ns - 10**12)
    assert waits_ns == [0, 100 * MILLISECOND_NS, 200 * MILLISECOND_NS]


def test_the_emission_interval_is_rounded_up_so_that_the_rate_is_never_exceeded():
    assert Rate(per_minute=7, burst=1).emission_interval_ns == 8_571_428_572


def test_after_a_pause_calls_come_one_by_one():
    rate = Rate(per_minute=60, burst=5)
    arrivals = push_back(idle(0), 10**12, 3 * 10**9, rate)
    waits_s = []
    for _ in range(3):
        start_ns, arrivals = reserve(arrivals, 10**12, 1, rate)
        waits_s.append((start_ns - 10**12) / 10**9)
    assert waits_s == [3, 4, 5]


def test_a_pause_shorter_than_the_wait_brings_nobody_forward():
    rate = Rate(per_minute=60, burst=5)
    _, arrivals = reserve(idle(0), 10**12, 5, rate)
    start_ns, _ = reserve(push_back(arrivals, 10**12, 1, rate), 10**12, 1, rate)
    assert start_ns == 10**12 + 10**9


def test_a_pause_that_ends_sooner_than_the_one_in_force_changes_nothing():
    rate = Rate(per_minute=60, burst=5)
    paused = push_back(idle(0), 10**12, 3 * 10**9, rate)
    assert push_back(paused, 10**12, 2 * 10**9, rate) is paused
    assert push_back(paused, 10**12, 4 * 10**9, rate).epoch != paused.epoch


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"per_minute": 0}, "per_minute=0"),
        ({"per_minute": float("nan")}, "per_minute=nan"),
        ({"per_minute": float("inf")}, "per_minute=inf"),
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
            st.tuples(st.just("push_back"), st.integers(0, 4000)),
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
    arrivals, now_ns = idle(0), 10**12
    waiting: list[tuple[int, int, int, int]] = []  # start, order, n, epoch
    passed: list[tuple[int, int]] = []  # start, n
    pauses: list[tuple[int, int]] = []

    def let_pass(arrivals: Arrivals, until_ns: int) -> Arrivals:
        while waiting and waiting[0][0] <= until_ns:
            start_ns, order, n, own_epoch = heapq.heappop(waiting)
            if own_epoch == arrivals.epoch:
                passed.append((start_ns, n))
            else:  # as the limiter does: a void reservation is made again when its time comes
                again_ns, arrivals = reserve(arrivals, start_ns, n, rate)
                heapq.heappush(waiting, (again_ns, order, n, arrivals.epoch))
        return arrivals

    for order, (gap_ms, (kind, value)) in enumerate(events):
        now_ns += gap_ms * MILLISECOND_NS
        arrivals = let_pass(arrivals, now_ns)
        if kind == "reserve":
            n = min(value, burst)
            start_ns, arrivals = reserve(arrivals, now_ns, n, rate)
            heapq.heappush(waiting, (start_ns, order, n, arrivals.epoch))
            arrivals = let_pass(arrivals, now_ns)
        elif kind == "push_back":
            arrivals = push_back(arrivals, now_ns, value * MILLISECOND_NS, rate)
            pauses.append((now_ns, now_ns + value * MILLISECOND_NS))
        else:
            arrivals = drained(now_ns, rate, epoch=1000 * (order + 1))
            pauses.clear()  # known to nobody any more
            passed.append((now_ns, 0))
    let_pass(arrivals, 10**30)

    for first, (start_ns, _) in enumerate(passed):
        calls = 0
        for end_ns, n in passed[first:]:
            calls += n
            assert (calls - burst) * rate.emission_interval_ns <= end_ns - start_ns
    calls_only = [(start_ns, n) for start_ns, n in passed if n]
    for (before_ns, n), (after_ns, _) in pairwise(calls_only):
        assert after_ns - before_ns >= n * rate.min_interval_ns
    for start_ns, _ in calls_only:
        assert not any(paused_ns < start_ns < end_ns for paused_ns, end_ns in pauses)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 4)), min_size=2, max_size=40))
def test_order_of_reservation_is_order_of_service(calls: list[tuple[int, int]]):
    rate, arrivals, now_ns, starts_ns = Rate(per_minute=90, burst=4), idle(0), 10**12, []
    for gap_ms, n in calls:
        now_ns += gap_ms * MILLISECOND_NS
        start_ns, arrivals = reserve(arrivals, now_ns, n, rate)
        starts_ns.append(start_ns)
    assert starts_ns == sorted(starts_ns)


@given(st.integers(1, 8), st.floats(20.0, 3000.0), st.integers(1, 8))
def test_a_drained_bucket_gives_its_first_call_one_emission_interval_later(
    burst: int, per_minute: float, n: int
):
    rate = Rate(per_minute=per_minute, burst=burst)
    start_ns, _ = reserve(drained(10**12, rate, 0), 10**12, min(n, burst), rate)
    assert start_ns == 10**12 + min(n, burst) * rate.emission_interval_ns
