"""95 % intervals, and what training changed."""

import random
from collections.abc import Sequence
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.evaluation_records import Record
from agent_loop.records.source_metrics import validation_metrics
from agent_loop.records.statistics import wilson
from tests.fakes.records import of_policy, record
from verl_mixed.views.estimates import (
    comparison_words,
    improvements,
    not_comparable,
    pass_rate_band,
    reward_band,
    validations,
)


def validated(step: int, reward: float, count: float = 100.0, **more: float) -> dict[str, Any]:
    metrics = {"mixed/math/val/reward/mean": reward, "mixed/math/val/count": count}
    return {"step": step, "time": float(step), "metrics": metrics | more}


def trained(rewards: list[float], **more: float) -> list[dict[str, Any]]:
    return [
        {"step": i, "time": float(i), "metrics": {"mixed/math/reward/mean": reward} | more}
        for i, reward in enumerate(rewards, 1)
    ]


def test_validation_is_compared_first_to_last_with_newcombes_interval() -> None:
    lines = [validated(0, 56 / 70, 70), validated(5, 0.1), validated(9, 48 / 80, 80)]

    (one,) = improvements(lines)

    assert (one.source, one.measure) == ("math", "validation reward")
    assert one.change == pytest.approx(-0.2)
    # Newcombe 1998, table II, example (a), method 10
    assert one.interval == pytest.approx((-0.3339, -0.0524), abs=5e-5)
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
    assert all(estimate.interval is None for estimate in validations(lines, "math"))


def test_another_sources_rewards_take_no_interval_from_a_source_that_is_solved_or_not() -> None:
    ends = [{"mixed/math/val/pass_rate": share} for share in (0.2, 0.8)]
    lines = [validated(0, 0.2, **ends[0]), validated(9, 0.8, **ends[1])]
    lines[1]["metrics"]["critic/score/min"] = -1.0

    (one,) = improvements(lines)

    assert (one.measure, one.verdict) == ("validation reward", "improved")
    assert one.first.interval == wilson(0.2, 100)


def test_a_source_with_rewards_outside_of_zero_to_one_is_compared_by_its_pass_rate() -> None:
    ends = [{"mixed/math/val/pass_rate": share, "critic/score/min": -1.0} for share in (0.1, 0.4)]
    lines = [validated(0, -0.8, **ends[0]), validated(9, -0.2, **ends[1])]

    (one,) = improvements(lines)

    assert (one.measure, one.verdict) == ("validation pass rate", "improved")
    assert (one.first.mean, one.last.mean) == (0.1, 0.4)
    assert one.last.interval == wilson(0.4, 100)
    assert all(estimate.interval is None for estimate in validations(lines, "math"))


def test_a_source_that_lost_everything_is_named_with_what_it_lacks() -> None:
    lines = [validated(0, 0.2), *trained([0.5])]
    for line in lines:
        line["metrics"]["mixed/nq/infra_error_rate"] = 1.0

    assert improvements(lines) == []
    assert not_comparable(lines) == {
        "math": "nothing to compare: it has a reward in 1 validation and 1 training step; it takes "
        "two of either",
        "nq": "nothing to compare: it has a reward in no validation and no training step; it takes "
        "two of either",
    }
    assert not_comparable([*lines, validated(0, 0.4)]).keys() == {"math", "nq"}  # the same policy
    assert not_comparable([*lines, validated(9, 0.3)]).keys() == {"nq"}


def test_without_two_validations_the_first_and_last_steps_of_training_are_compared() -> None:
    rewards = [0.1, 0.2] * 5 + [0.9] * 7 + [0.5, 0.7] * 5

    (one,) = improvements([validated(0, 0.3), *trained(rewards)])

    assert one.measure == "training reward"
    assert (one.first.steps, one.last.steps) == ((1, 10), (18, 27))
    assert (one.first.mean, one.last.mean) == pytest.approx((0.15, 0.6))
    # half of Student's interval for nine degrees of freedom
    half = 2.262157 * 0.05 * sqrt(10 / 9) / sqrt(10)
    assert one.first.interval == pytest.approx((0.15 - half, 0.15 + half))
    assert one.verdict == "improved"


@given(steps=st.integers(0, 40))
def test_no_step_is_both_first_and_last(steps: int) -> None:
    changes = improvements(trained([0.5] * steps))

    assert bool(changes) == (steps > 1)
    for one in changes:
        assert one.first.steps[1] < one.last.steps[0]
        assert one.last.steps[1] == steps


def test_a_reward_band_is_the_interval_of_the_mean_of_its_window() -> None:
    lines = trained([0.2, 0.4, 0.6], **{"mixed/math/reward/ci95": 0.3})

    band = reward_band(lines, "math", over=2)

    assert [point.mean for point in band] == pytest.approx([0.2, 0.3, 0.5])
    half = 0.3 / sqrt(2)
    assert band[2].interval == pytest.approx((band[2].mean - half, band[2].mean + half))
    assert reward_band(trained([0.2]), "math") == []


@pytest.mark.parametrize(
    "rewards", [[0.5, 0.56], [0.5, 0.5, 0.56, 0.56], [0.5] * 3 + [0.56] * 3, [0.1, 0.2, 0.8, 0.9]]
)
def test_few_or_equal_steps_tell_no_interval_but_the_one_that_groups_give(
    rewards: list[float],
) -> None:
    (one,) = improvements(trained(rewards))
    (flat,) = improvements(trained(rewards, **{"mixed/math/reward/ci95": 0.0}))
    (known,) = improvements(trained(rewards, **{"mixed/math/reward/ci95": 0.3}))

    assert flat.verdict == "interval unknown"
    assert one.verdict == "interval unknown" and one.first.interval is None
    half = 0.3 / sqrt(len(rewards) // 2)
    assert known.first.interval is not None and known.interval is not None
    assert known.first.interval[0] == pytest.approx(known.first.mean - half)
    assert known.interval[1] > known.change


def test_a_pass_rate_band_counts_each_judged_group_once_and_weights_steps_by_them() -> None:
    metrics = {"mixed/math/count": 100.0}
    lines = trained([0.25, 0.75], **metrics)
    for line, share, judged in zip(lines, (0.25, 0.75), (6.0, 2.0), strict=True):
        line["metrics"] |= {"mixed/math/pass_rate": share, "mixed/math/judged": judged}

    band = pass_rate_band(lines, "math", over=5)

    assert band[0].interval == wilson(0.25, 6)
    assert band[1].mean == pytest.approx(0.375)
    assert band[1].interval == wilson(0.375, 8)


def test_where_judged_groups_are_not_logged_lost_trajectories_take_groups_away() -> None:
    metrics = {
        "mixed/math/pass_rate": 0.5,
        "mixed/math/count": 100.0,
        "mixed/math/infra_error_rate": 0.75,
        "mixed/math/loop_error_rate": 0.125,
    }

    (point,) = pass_rate_band(trained([0.5], **metrics), "math")

    assert point.interval == wilson(0.5, 12.5)


# --- the same questions ---------------------------------------------------------------------------


def lines_of(*validations: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {"step": records[0].step, "time": 0.0, "metrics": validation_metrics(records)}
        for records in validations
    ]


def validation(step: int, chances: Sequence[float], seed: int) -> list[Record]:
    return [
        each
        for source in ("math", "nq", "taco")
        for each in of_policy(chances, 1, seed, source, step)
    ]


def test_the_change_of_validations_with_records_is_that_of_the_same_questions() -> None:
    chances = [0.1, 0.9] * 50
    first, last = validation(0, chances, 1), validation(8, [c + 0.1 for c in chances], 2)
    lines = lines_of(first, last)

    changes = improvements(lines, {0: first, 8: last})
    unpaired = improvements(lines)

    assert [one.source for one in changes] == ["math", "nq", "taco"]
    for one, other in zip(changes, unpaired, strict=True):
        assert one.paired is not None and one.comparisons == 3
        assert one.change == pytest.approx(other.change)
        assert one.interval is not None and other.interval is not None
        assert one.interval[1] - one.interval[0] < other.interval[1] - other.interval[0]
        assert one.first.interval is not None


def test_what_is_said_of_a_change_says_how_many_were_looked_at() -> None:
    first, last = validation(0, [0.5] * 40, 1), validation(8, [0.5] * 40, 2)
    lines = lines_of(first, last)

    paired = comparison_words(improvements(lines, {0: first, 8: last}))
    unpaired = comparison_words(improvements(lines))
    (one,) = improvements([validated(0, 0.25), validated(9, 0.3)])

    assert paired == (
        "Paired by question; 3 comparisons, each interval at 98.3 %, together 95 % (Bonferroni)."
    )
    assert unpaired.startswith("Unpaired; 3 comparisons, each interval at 98.3 %")
    assert comparison_words([one]) == "Unpaired; 1 comparison, its interval at 95 %."
    assert comparison_words([]) == ""


def test_records_of_one_validation_alone_make_no_pairs() -> None:
    first, last = validation(0, [0.5] * 40, 1), validation(8, [0.5] * 40, 2)

    changes = improvements(lines_of(first, last), {8: last})

    assert all(one.paired is None for one in changes)


def test_rewards_outside_of_zero_to_one_are_compared_by_pairs() -> None:
    first = [record("math", str(i), reward=-1.0 + i % 2) for i in range(30)]
    last = [record("math", str(i), reward=0.5 + (i % 3) / 10, step=8) for i in range(30)]

    (one,) = improvements(lines_of(first, last), {0: first, 8: last})

    assert (one.measure, one.verdict) == ("validation reward", "improved")


@pytest.mark.slow
def test_without_learning_one_of_twenty_runs_at_most_has_a_verdict() -> None:
    """As three sources at a learning rate of 0, each validated on the same 100 questions."""
    chance, wrong, runs = random.Random(0), 0, 200
    for seed in range(runs):
        chances = [chance.random() for _ in range(100)]
        first, last = validation(0, chances, 2 * seed), validation(16, chances, 2 * seed + 1)
        verdicts = [
            one.verdict for one in improvements(lines_of(first, last), {0: first, 16: last})
        ]
        wrong += any(verdict != "no clear change" for verdict in verdicts)
    assert wrong / runs <= 0.05
