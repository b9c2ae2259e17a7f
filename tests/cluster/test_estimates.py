"""How sure a mean is."""

from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.estimates import improvements, pass_rate_band, reward_band, validations, wilson


def validated(step: int, reward: float, count: float = 100.0, **more: float) -> dict[str, Any]:
    metrics = {"mixed/math/val/reward/mean": reward, "mixed/math/val/count": count}
    return {"step": step, "time": float(step), "metrics": metrics | more}


def trained(rewards: list[float], **more: float) -> list[dict[str, Any]]:
    return [
        {"step": i, "time": float(i), "metrics": {"mixed/math/reward/mean": reward} | more}
        for i, reward in enumerate(rewards, 1)
    ]


def test_wilson_gives_the_published_intervals() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I
    for solved, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(solved / count, count) == pytest.approx((low, high), abs=5e-5)
    for solved, count, low, high in ((0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        assert wilson(solved / count, count) == pytest.approx((low, high), abs=5e-5)


@given(share=st.floats(0, 1), count=st.integers(1, 10_000))
def test_wilson_holds_the_mean_stays_in_its_range_and_narrows_with_the_count(
    share: float, count: int
) -> None:
    low, high = wilson(share, count)
    low_4, high_4 = wilson(share, 4 * count)

    assert 0 <= low <= share <= high <= 1
    assert high_4 - low_4 <= high - low


def test_validation_is_compared_first_to_last_with_newcombes_interval() -> None:
    lines = [validated(0, 56 / 70, 70), validated(5, 0.1), validated(9, 48 / 80, 80)]

    (one,) = improvements(lines)

    assert (one.source, one.measure) == ("math", "validation reward")
    assert one.change == pytest.approx(-0.2)
    # Newcombe 1998, table II, example (a), method 10
    assert (one.low, one.high) == pytest.approx((-0.3339, -0.0524), abs=5e-5)
    assert one.verdict == "got worse"


@pytest.mark.parametrize(
    ("last", "verdict"), [(0.30, "no clear change"), (0.60, "improved"), (0.02, "got worse")]
)
def test_a_change_counts_only_when_its_interval_leaves_out_zero(last: float, verdict: str) -> None:
    (one,) = improvements([validated(0, 0.25), validated(9, last)])

    assert one.verdict == verdict


def test_rewards_outside_of_zero_to_one_have_no_interval() -> None:
    lines = [validated(0, 0.2), validated(9, 0.8, **{"critic/score/min": -1.0})]

    (one,) = improvements(lines)

    assert one.verdict == "interval unknown" and one.change == pytest.approx(0.6)
    assert all(estimate.low is None for estimate in validations(lines, "math"))


def test_without_two_validations_the_first_and_last_steps_of_training_are_compared() -> None:
    rewards = [0.1, 0.2] * 5 + [0.9] * 7 + [0.5, 0.7] * 5

    (one,) = improvements([validated(0, 0.3), *trained(rewards)])

    assert one.measure == "training reward"
    assert (one.first.steps, one.last.steps) == ((1, 10), (18, 27))
    assert (one.first.mean, one.last.mean) == pytest.approx((0.15, 0.6))
    # half of Student's interval for nine degrees of freedom
    half = 2.26 * 0.05 * sqrt(10 / 9) / sqrt(10)
    assert (one.first.low, one.first.high) == pytest.approx((0.15 - half, 0.15 + half))
    assert one.verdict == "improved"


@given(steps=st.integers(0, 40))
def test_no_step_is_both_first_and_last(steps: int) -> None:
    found = improvements(trained([0.5] * steps))

    assert bool(found) == (steps > 1)
    for one in found:
        assert one.first.steps[1] < one.last.steps[0]
        assert one.last.steps[1] == steps


def test_a_reward_band_is_the_interval_of_the_mean_of_its_window() -> None:
    lines = trained([0.2, 0.4, 0.6], **{"mixed/math/reward/ci95": 0.3})

    band = reward_band(lines, "math", over=2)

    assert [point.mean for point in band] == pytest.approx([0.2, 0.3, 0.5])
    assert band[2].high - band[2].mean == pytest.approx(0.3 / sqrt(2))
    assert reward_band(trained([0.2]), "math") == []


def test_a_pass_rate_band_counts_each_group_once() -> None:
    metrics = {"mixed/math/pass_rate": 0.25, "mixed/math/count": 8.0}
    lines = trained([0.25, 0.25], **metrics)

    band = pass_rate_band(lines, "math", over=5)

    assert (band[0].low, band[0].high) == wilson(0.25, 8)
    assert (band[1].low, band[1].high) == wilson(0.25, 16)
