"""How the open groups are shared out: laws, and the worked example of the module."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.lead import FlightTimes, lead_of, to_start

NAMES = ("fast", "other", "slow")


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    names = NAMES[: draw(st.integers(1, 3))]
    least = {name: draw(st.integers(0, 20)) for name in names}
    quotas = {name: own + draw(st.floats(0.0, 0.9)) for name, own in least.items()}
    return {
        "quotas": quotas,
        "least": least,
        "most": {name: own + draw(st.integers(0, 200)) for name, own in least.items()},
        "seconds": {name: draw(st.floats(0.01, 1000.0)) for name in names},
        "total": sum(least.values()) + draw(st.integers(0, 200)),
        "training_s": draw(st.floats(0.0, 100.0)),
    }


@given(cases())
def test_each_source_has_its_quota_and_none_more_than_its_bound_or_all_more_than_the_total(case):
    lead = lead_of(**case)
    for source, groups in lead.groups.items():
        assert case["least"][source] <= groups <= case["most"][source]
    assert sum(lead.groups.values()) <= case["total"]
    room = sum(case["most"][source] for source in lead.groups)
    assert sum(lead.groups.values()) >= min(case["total"], room) - 1
    assert lead.step_s >= case["training_s"]
    assert (lead.source is not None) == (lead.limit == "staleness")


@given(cases(), st.data())
def test_no_more_is_started_than_may_be_open_unless_a_quota_needs_it(case, data):
    lead, least = lead_of(**case), case["least"]
    is_open = {name: data.draw(st.integers(0, 50)) for name in least}
    start = to_start(lead.groups, least, is_open, case["total"])
    after = {name: count + start.get(name, 0) for name, count in is_open.items()}
    assert all(after[name] >= need for name, need in least.items())
    for name, count in start.items():
        assert 0 < count <= max(lead.groups.get(name, 0), least[name]) - is_open[name]
    needed = sum(max(count, least[name]) for name, count in is_open.items())
    assert sum(after.values()) <= max(case["total"], needed)


def shared_out(**changed: Any) -> Any:
    case: dict[str, Any] = {
        "quotas": {"fast": 36.0, "slow": 4.0},
        "least": {"fast": 36, "slow": 4},
        "most": {"fast": 10**6, "slow": 10**6},
        "seconds": {"fast": 1.0, "slow": 20.0},
        "total": 80,
        "training_s": 0.0,
    }
    return lead_of(**case | changed)


@pytest.mark.parametrize(
    ("changed", "groups", "limit"),
    [
        ({}, {"fast": 36, "slow": 44}, "in_flight"),
        ({"seconds": {"fast": 1.0, "slow": 1.0}}, {"fast": 72, "slow": 8}, "in_flight"),
        # 2 s of training: 18 + 18 fast groups and 40 + 2 slow ones; 2 are left
        ({"training_s": 2.0}, {"fast": 38, "slow": 42}, "training"),
        # 20 s of training, in which all groups end: everybody is as many batches ahead
        ({"training_s": 100.0}, {"fast": 72, "slow": 8}, "training"),
        # no slow group may wait for more than 2 batches, so a step takes 10 s
        ({"most": {"fast": 72, "slow": 8}}, {"fast": 72, "slow": 8}, "staleness"),
    ],
)
def test_open_groups_follow_share_and_latency(
    changed: dict[str, Any], groups: dict[str, int], limit: str
):
    lead = shared_out(**changed)
    assert (lead.groups, lead.limit) == (groups, limit)


def test_the_source_at_its_bound_sets_a_pace_of_its_latency_over_the_bound():
    lead = shared_out(most={"fast": 72, "slow": 8})
    assert (lead.source, lead.step_s) == ("slow", 10.0)


def test_groups_in_flight_that_do_not_end_make_a_source_slow_before_one_has_ended():
    flights, quotas = FlightTimes(), {"fast": 5.0, "slow": 5.0}
    assert flights.means(quotas) == {"fast": 1.0, "slow": 1.0}
    for _ in range(10):
        flights.elapse(1.0, {"fast": 5, "slow": 5})
        flights.end("fast", 5, 5)
    means = flights.means(quotas)
    assert means["fast"] == pytest.approx(1.0, abs=0.1)
    assert means["slow"] > 20 * means["fast"]


@given(st.integers(1, 30), st.floats(0.1, 100.0), st.floats(0.2, 1.0))
def test_seconds_are_latency_over_yield_whatever_was_before(groups, latency_s, share):
    """`share` of the groups can be trained, and another latency was measured before."""
    flights, kept = FlightTimes(), max(1, round(groups * share))
    flights.elapse(1000.0, {"a": 40})
    flights.end("a", 40, 10)
    for _ in range(2000):
        flights.elapse(latency_s, {"a": groups})
        flights.end("a", kept, 10)
    wanted = latency_s * groups / kept
    assert flights.means({"a": 1.0})["a"] == pytest.approx(wanted, rel=0.05)
