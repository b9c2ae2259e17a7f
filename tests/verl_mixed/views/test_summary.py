"""Means, tables and phase times of a run."""

from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.run_folder import write_run
from verl_mixed.views.summary import (
    PHASE_WORDS,
    in_buckets,
    increments,
    limits_of,
    mean_of_last,
    moving_average,
    phase_means,
    restarts_of,
    reward_rows,
    source_table,
    tool_rows,
)

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=60)


def points_of(values: list[float]) -> list[tuple[int, float]]:
    return [(2 * i + 1, value) for i, value in enumerate(values)]


def lines_of(*metrics: dict[str, float]) -> list[dict[str, Any]]:
    return [{"step": i, "time": float(i), "metrics": bucket} for i, bucket in enumerate(metrics, 1)]


@given(values=VALUES, over=st.integers(1, 80))
def test_a_moving_average_is_the_mean_of_each_window_and_looks_back_only(
    values: list[float], over: int
) -> None:
    points = points_of(values)

    averaged = moving_average(points, over)

    assert [step for step, _ in averaged] == [step for step, _ in points]
    for i, (_, value) in enumerate(averaged):
        window = values[: i + 1][-over:]
        assert value == pytest.approx(sum(window) / len(window), abs=1e-6)


@given(values=VALUES.filter(bool), over=st.integers(1, 80))
def test_the_mean_of_the_last_points_lies_between_them(values: list[float], over: int) -> None:
    last = values[-over:]

    mean = mean_of_last(points_of(values), over)

    assert mean is not None
    assert mean == pytest.approx(fmean(last))
    slack = 1e-9 * max(map(abs, last))  # a mean of equal floats may be off by one bit
    assert min(last) - slack <= mean <= max(last) + slack


def test_no_point_has_no_mean() -> None:
    assert mean_of_last([]) is None


@given(gains=st.lists(st.integers(0, 1000), max_size=40), reset=st.integers(0, 40))
@example(gains=[5, 3, 4], reset=1)
def test_increments_give_back_the_gains_of_a_counter_that_was_set_back(
    gains: list[int], reset: int
) -> None:
    counter, points = 0, []
    for i, gain in enumerate(gains):
        counter = gain if i == reset else counter + gain
        points.append((i, float(counter)))
    fell = 0 < reset < len(gains) and points[reset][1] < points[reset - 1][1]

    result = [value for _, value in increments(points)]

    expected = [float(gain) for gain in gains]
    if not fell and 0 < reset < len(gains):  # not to be told from a gain
        expected[reset] = points[reset][1] - points[reset - 1][1]
    assert result == expected


def test_a_source_table_shows_first_and_last_steps_and_no_absent_fact() -> None:
    lines = lines_of(*({"mixed/math/reward/mean": float(i)} for i in range(30)))

    table = source_table(lines)

    assert table == {"reward/mean": {"math": (4.5, 24.5)}}
    # of a run of sixteen steps no step is in both
    assert source_table(lines[:16])["reward/mean"]["math"] == (3.5, 11.5)
    assert source_table(lines[2:3])["reward/mean"]["math"] == (2.0,)


def test_tools_are_summed_over_steps_by_calls_and_not_by_steps() -> None:
    lines = lines_of(
        {"mixed/tools/code/calls": 10.0, "mixed/tools/code/error_rate": 0.5},
        {"mixed/nq/count": 3.0},
        {"mixed/tools/code/calls": 90.0, "mixed/tools/code/error_rate": 0.1},
    )

    (row,) = tool_rows(lines)

    assert (row.tool, row.calls, row.failed, row.error_rate) == ("code", 100, 14, 0.14)
    assert row.p50_s is None and row.worst_p95_s is None
    assert tool_rows(lines, "nq") == []


def test_tools_of_the_sources_are_those_of_the_run(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", 12)

    (code,) = tool_rows(lines, "math")

    assert [row.tool for row in tool_rows(lines)] == ["code", "search"]
    assert code.calls == sum(
        line["metrics"].get("mixed/math/tools/code/calls", 0) for line in lines
    )


def test_the_longest_phase_limits_a_step_and_validation_is_not_part_of_it() -> None:
    lines = lines_of(
        {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 3.0},
        {
            "timing_s/step": 20.0,
            "timing_s/gen": 8.0,
            "timing_s/update_actor": 9.0,
            "timing_s/testing": 50.0,
        },
    )

    limits = limits_of(lines)

    assert limits is not None
    assert (limits.phase, limits.phase_s, limits.step_s) == ("gen", 7.0, 15.0)
    assert limits.share == pytest.approx(7 / 15)
    assert limits.validation_s == 25.0
    assert limits.tool_share is None and limits.limiter_share is None
    assert next(iter(phase_means(lines))) == "testing"


def test_inside_generation_the_time_of_trajectories_is_split_by_who_took_it() -> None:
    metrics = {
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "mixed/math/reward/mean": 0.5,
        "mixed/math/count": 2.0,
        "mixed/math/generate_s/mean": 6.0,
        "mixed/math/tools_s/mean": 4.0,
        "mixed/math/tool_calls/mean": 2.0,
        "mixed/math/limiter_wait_s/mean": 0.5,
    }

    limits = limits_of(lines_of(metrics))

    assert limits is not None
    assert limits.tool_share == pytest.approx(0.3)
    assert limits.limiter_share == pytest.approx(0.1)


@pytest.mark.parametrize("metrics", [{}, {"timing_s/gen": 1.0}, {"timing_s/step": 0.0}])
def test_without_times_nothing_limits_a_step(metrics: dict[str, float]) -> None:
    assert limits_of(lines_of(metrics)) is None
    assert limits_of([]) is None


def test_a_restart_sets_a_counter_back_even_where_it_does_not_fall() -> None:
    lines = lines_of({}, {}, {}, {})  # steps 1 to 4, at 1 to 4 s

    restarts = restarts_of(lines, [0.5, 1.5, 2.5, 9.0])

    assert restarts == [2, 3, 5]  # the first start has no step before it
    points = [(1, 150.0), (2, 160.0), (4, 200.0)]
    assert increments(points, restarts) == [(1, 150.0), (2, 160.0), (4, 200.0)]
    assert increments(points) == [(1, 150.0), (2, 10.0), (4, 40.0)]


@given(steps=st.lists(st.integers(0, 300), min_size=1, max_size=60), most=st.integers(1, 40))
def test_buckets_hold_every_step_once_and_are_few(steps: list[int], most: int) -> None:
    buckets = in_buckets(steps, most)

    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(steps)))
    assert all(buckets) and len(buckets) <= most
    tops = [max(steps[i] for i in bucket) for bucket in buckets]
    assert tops == sorted(tops)


def test_the_time_of_a_trajectory_is_weighted_by_trajectories_and_not_by_prompts() -> None:
    metrics = {"timing_s/step": 10.0, "timing_s/gen": 6.0}
    for source, trajectories, tools_s in (("math", 24.0, 0.0), ("nq", 8.0, 4.0)):
        metrics |= {
            f"mixed/{source}/reward/mean": 0.5,
            f"mixed/{source}/count": 4.0,
            f"mixed/{source}/trajectories": trajectories,
            f"mixed/{source}/generate_s/mean": 4.0 - tools_s,
            f"mixed/{source}/tools_s/mean": tools_s,
        }

    limits = limits_of(lines_of(metrics))

    assert limits is not None and limits.tool_share == 0.25


def test_every_phase_of_our_trainer_has_a_word() -> None:
    assert PHASE_WORDS["accounts"] == "accounts" and PHASE_WORDS["testing"] == "validation"


@given(
    rewards=st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=6),
    over=st.integers(1, 4),
)
def test_the_rewards_of_a_source_are_those_of_all_trajectories_of_the_last_steps(
    rewards: list[list[float]], over: int
) -> None:
    named = {"mean": fmean, "std": pstdev, "min": min, "max": max}
    lines = lines_of(
        *(
            {f"mixed/a/reward/{name}": float(f(step)) for name, f in named.items()}
            for step in rewards
        )
    )
    (row,) = reward_rows(lines, over)
    last = [reward for step in rewards[-over:] for reward in step]
    assert (row.source, row.steps) == ("a", min(over, len(rewards)))
    assert (row.least, row.most) == (min(last), max(last))
    assert (row.mean, row.std) == pytest.approx((fmean(last), pstdev(last)), abs=1e-6)


def test_rewards_of_a_run_of_an_older_release_have_no_least_and_most() -> None:
    (row,) = reward_rows(lines_of({"mixed/a/reward/mean": 0.5, "mixed/a/reward/std": 0.1}))
    assert (row.mean, row.std, row.least, row.most) == (0.5, pytest.approx(0.1), None, None)
