"""The law of a pace."""

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.gateway.server import Pace


@given(
    gaps_s=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60),
    per_second=st.floats(0.5, 50.0),
    burst=st.integers(1, 8),
)
def test_no_window_sees_more_than_burst_plus_rate_times_window(
    gaps_s: list[float], per_second: float, burst: int
):
    pace, now, begun_at = Pace(per_second, burst), 0.0, list[float]()
    for gap_s in gaps_s:
        now += gap_s
        begun_at.append(now + pace.wait_s(now))
    for first, start in enumerate(begun_at):
        for last, end in enumerate(begun_at[first:], first):
            assert last - first + 1 <= burst + per_second * (end - start) + 1e-6


def test_after_a_burst_each_waits_for_its_turn_and_a_large_one_for_more():
    pace = Pace(per_second=2.0, burst=2)
    assert [pace.wait_s(10.0) for _ in range(4)] == [0.0, 0.0, 0.5, 1.0]
    assert pace.wait_s(10.0, cost=4.0) == 3.0
