"""Metrics per source, counted by hand."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.source_metrics import (
    eviction_metrics,
    loop_lag_metrics,
    source_metrics,
    staleness_metrics,
    validation_metrics,
)
from agent_loop.records.trajectory_record import Call, TrajectoryRecord, Turn
from tests.fakes.records import record

_session = count()


def trajectory(
    source,
    uid,
    acc,
    *,
    stop="answered",
    calls=1,
    refused=0,
    mask=(1, 0, 1, 1),
    error=None,
    versions=(3, 3),
    sampled=None,
):
    sampled = sum(mask) if sampled is None else sampled
    return TrajectoryRecord(
        key=f"{uid}_{next(_session)}_0",
        source=source,
        row_id=f"{source}:0",
        reward=acc,
        acc=acc,
        prompt_tokens=1,
        response_tokens=len(mask),
        trained_tokens=sum(mask),
        stop_reason=stop,
        fault="503" if stop in ("infra_error", "deadline") else None,
        fault_tool="loop"
        if error
        else {"infra_error": "search", "deadline": "engine"}.get(stop, ""),
        loop_error=error,
        turns=[
            Turn(generate_s=0.5, tools_s=0.25, tokens=tokens, min_global_steps=version)
            for tokens, version in zip(
                (sampled - sampled // 3, sampled // 3), versions, strict=True
            )
        ],
        calls=[
            Call(
                turn=1,
                action="search",
                status="rejected" if number < refused else "ok",
                tool="retrieve",
                latency_s=0.1 * (number + 1),
                limiter_wait_s=0.2,
                server_wait_s=1.5,
                attempts=0 if number < refused else 1,
            )
            for number in range(calls)
        ],
    )


def test_each_source_has_its_own_numbers():
    metrics = source_metrics(
        [
            trajectory("nq", "a", 1.0),
            trajectory("nq", "a", 1.0),
            trajectory("nq", "b", 0.0),
            trajectory("nq", "b", 1.0, stop="infra_error", calls=2, refused=1),
            trajectory("math", "c", 0.0, stop="response_budget", calls=0),
            trajectory("math", "c", 0.0, stop="infra_error", calls=0, error="Traceback"),
            trajectory("taco", "d", 0.0, stop="max_turns", calls=0),
            trajectory("taco", "d", 1.0, stop="deadline", mask=(0, 0), calls=0),
        ]
    )
    assert metrics["mixed/nq/count"] == 2
    assert metrics["mixed/nq/judged"] == 2
    assert metrics["mixed/nq/trajectories"] == 4
    assert metrics["mixed/math/judged"] == 1
    assert metrics["mixed/nq/pass_rate"] == pytest.approx(2 / 3)
    assert metrics["mixed/nq/solved_all"] == 0.5
    assert metrics["mixed/nq/solved_none"] == 0.5
    assert metrics["mixed/nq/zero_variance"] == 0.5
    assert metrics["mixed/nq/too_small"] == 0.5
    assert metrics["mixed/nq/turns/mean"] == 2
    assert metrics["mixed/nq/infra_error_rate"] == 0.25
    assert metrics["mixed/nq/loop_error_rate"] == 0
    assert metrics["mixed/nq/infra_errors/search"] == 1
    assert metrics["mixed/nq/tool_calls/mean"] == 1.25
    assert metrics["mixed/nq/tool_error_rate"] == 0.2
    assert metrics["mixed/nq/tool_latency_s/p50"] == pytest.approx(0.1)
    assert metrics["mixed/nq/tools/retrieve/calls"] == 5
    assert metrics["mixed/nq/tools/retrieve/error_rate"] == 0.2
    assert metrics["mixed/nq/tools/retrieve/latency_s/p95"] == pytest.approx(0.185)
    assert metrics["mixed/tools/retrieve/calls"] == 5
    assert not [name for name in metrics if name.startswith("mixed/math/tools/")]
    assert metrics["mixed/nq/generate_s/mean"] == 1
    assert metrics["mixed/nq/tools_s/mean"] == 0.5
    assert metrics["mixed/nq/prompt_length/mean"] == 1
    assert metrics["mixed/nq/response_length/max"] == 4
    assert metrics["mixed/nq/limiter_wait_s/mean"] == pytest.approx(0.2)
    assert metrics["mixed/nq/server_wait_s/sum"] == 1.5 * 5
    assert metrics["mixed/math/server_wait_s/sum"] == 0
    assert metrics["mixed/nq/masked_fraction"] == 0.25
    assert metrics["mixed/math/solved_none"] == 1
    assert metrics["mixed/math/truncated_rate"] == 0.5
    assert metrics["mixed/math/loop_error_rate"] == 0.5
    assert metrics["mixed/math/infra_error_rate"] == 0
    assert metrics["mixed/math/tool_error_rate"] == 0
    assert metrics["mixed/taco/truncated_rate"] == metrics["mixed/taco/deadline_rate"] == 0.5
    assert metrics["mixed/taco/reward/mean"] == 0  # not of the trajectory that was late
    assert metrics["mixed/taco/infra_errors/engine"] == 1
    assert metrics["mixed/taco/infra_error_rate"] == 0


def test_the_rows_of_a_session_are_counted_by_why_they_began():
    first, compacted, summed_up = (trajectory("nq", "a", 1.0) for _ in range(3))
    for place, (row, cause) in enumerate(
        ((first, ""), (compacted, "compaction"), (summed_up, "a summary"))
    ):
        row.key, row.cause, row.rows = f"a_s_{place}", cause, 3
    alone = trajectory("nq", "b", 0.0)
    alone.cause, alone.rows = "compaction", 1
    other = trajectory("math", "c", 0.0)
    metrics = source_metrics([first, compacted, summed_up, alone, other])
    assert metrics["mixed/nq/trajectories"] == 2 and metrics["mixed/nq/rows/mean"] == 2
    assert metrics["mixed/nq/rows/compaction"] == metrics["mixed/nq/rows/a_summary"] == 0.5
    assert not [
        name for name in metrics if name.startswith("mixed/math/rows/") and "mean" not in name
    ]
    assert not [name for name in source_metrics([alone]) if name.endswith("/compaction")]


def test_staleness_is_counted_over_trained_tokens_by_the_oldest_weights_of_each_turn():
    rows = [
        trajectory("nq", "a", 1.0, versions=(3, 4)),  # 2 tokens and 1
        trajectory("nq", "b", 1.0, versions=(4, 4)),
        trajectory("nq", "c", 0.0, versions=(0, 0), stop="infra_error", mask=(0, 0), sampled=2),
        trajectory("math", "d", 0.0, versions=(0, 0), stop="infra_error", mask=(0, 0), sampled=2),
    ]
    assert staleness_metrics(rows, current=4) == {
        "mixed/nq/staleness/mean": pytest.approx(2 / 6),
        "mixed/nq/staleness/max": 1.0,
    }


def test_the_lag_of_a_step_is_that_of_all_but_one_in_a_hundred_trajectories():
    rows = [trajectory("nq", f"{i}", 1.0) for i in range(300)]
    assert loop_lag_metrics(rows) == {}  # of a checkpoint of release 1.0.0
    for at, row in enumerate(rows[1:]):
        row.loop_lag_s = 0.2 if at < 297 else 9.0
    assert loop_lag_metrics(rows) == {"mixed/loop_lag_s/p99": pytest.approx(0.2)}


def test_validation_is_counted_per_source_and_without_what_was_lost():
    metrics = validation_metrics(
        [
            record("nq", "0", reward=1.0),
            record("math", "0", reward=0.5),
            record("nq", "1", reward=0.0),
            record("nq", "2", reward=0.0, lost=True),
        ]
    )
    rewards = {name: metrics[f"mixed/nq/val/reward/{name}"] for name in ("mean", "min", "max")}
    assert rewards == {"mean": 0.5, "min": 0.0, "max": 1.0}
    assert metrics["mixed/nq/val/reward/std"] == 0.5
    assert metrics["mixed/nq/val/pass_rate"] == 0.5
    assert metrics["mixed/math/val/pass_rate"] == 0
    assert metrics["mixed/nq/val/count"] == 2
    assert metrics["mixed/nq/val/infra_error_rate"] == pytest.approx(1 / 3)


def test_a_source_that_lost_everything_has_no_reward_instead_of_a_reward_of_zero():
    lost = [trajectory("nq", "a", 0.0, stop="infra_error", mask=(0, 0)) for _ in range(2)]
    metrics = source_metrics([*lost, trajectory("math", "b", 1.0)])
    rewards = ("reward/mean", "reward/std", "reward/min", "reward/max")
    for name in (*rewards, "pass_rate", "solved_all", "solved_none"):
        assert f"mixed/nq/{name}" not in metrics
        assert f"mixed/math/{name}" in metrics
    assert metrics["mixed/nq/count"] == 1
    assert metrics["mixed/nq/infra_error_rate"] == 1

    validated = validation_metrics([record("nq", lost=True), record("math")])
    assert {name for name in validated if "/nq/" in name} == {
        "mixed/nq/val/count",
        "mixed/nq/val/infra_error_rate",
    }
    assert validated["mixed/math/val/reward/mean"] == 1


def test_a_trajectory_that_was_late_before_its_first_token_is_in_no_mean():
    late = trajectory("nq", "a", 0.0, stop="deadline", mask=(0,))
    metrics = source_metrics([late, trajectory("nq", "a", 1.0), trajectory("nq", "a", 1.0)])
    for name in ("mean", "min", "max"):
        assert metrics[f"mixed/nq/reward/{name}"] == 1
    assert metrics["mixed/nq/pass_rate"] == 1
    assert metrics["mixed/nq/solved_all"] == 1
    assert metrics["mixed/nq/zero_variance"] == 1
    assert metrics["mixed/nq/infra_error_rate"] == 0
    assert metrics["mixed/nq/deadline_rate"] == pytest.approx(1 / 3)


def test_each_part_of_a_reward_is_a_metric_of_its_source():
    group = [trajectory("taco", "a", 1.0) for _ in range(2)]
    lost = trajectory("taco", "a", 0.0, stop="infra_error")
    for each, passed in zip([*group, lost], (1.0, 0.5, 0.0), strict=True):
        parts = {"score": passed, "passed": passed, "infra_error": 0.0, "loop_error": 0.0}
        each.reward_parts = parts
    metrics = source_metrics([*group, lost, trajectory("nq", "b", 1.0)])
    assert metrics["mixed/taco/reward_parts/passed"] == 0.75
    assert metrics["mixed/taco/reward_parts/score"] == 0.75
    assert {name for name in metrics if "reward_parts" in name} == {
        "mixed/taco/reward_parts/passed",
        "mixed/taco/reward_parts/score",
    }


def test_the_interval_of_a_mean_is_over_groups_and_a_single_group_has_none():
    groups = [trajectory("nq", uid, acc) for uid, acc in (("a", 1.0), ("b", 0.0), ("c", 1.0))]
    again = [trajectory("nq", uid, acc) for uid, acc in (("a", 1.0), ("b", 0.0), ("c", 1.0))]
    twice = source_metrics(groups + again)  # a second trajectory of a prompt says nothing new
    assert twice["mixed/nq/reward/ci95"] == pytest.approx(4.302653 * (1 / 3) ** 0.5 / 3**0.5)
    assert "mixed/nq/reward/ci95" not in source_metrics(groups[:1])


def test_prompts_that_were_replaced_are_counted_by_reason():
    ledger = [("nq", "filtered"), ("nq", "filtered"), ("nq", "trained"), ("math", "stale")]
    assert eviction_metrics([*ledger, ("math", "unfinished")]) == {
        "mixed/nq/evicted/filtered": 2,
        "mixed/math/evicted/stale": 1,
    }


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)), min_size=1))
def test_the_calls_of_all_sources_are_the_sum_of_each(rows: list[tuple[str, int]]):
    metrics = source_metrics(
        [trajectory(source, f"u{i}", 0.0, calls=calls) for i, (source, calls) in enumerate(rows)]
    )
    called = {source: sum(calls for name, calls in rows if name == source) for source in "ab"}
    for source, calls in called.items():
        assert metrics.get(f"mixed/{source}/tools/retrieve/calls", 0) == calls
    assert metrics.get("mixed/tools/retrieve/calls", 0) == sum(called.values())
