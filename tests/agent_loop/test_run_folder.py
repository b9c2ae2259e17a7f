"""Metrics per source, and files that survive a kill."""

import json

import pytest

from agent_loop.run_folder import MetricsFile, numbers_of, read_lines
from agent_loop.source_metrics import (
    TrainedTrajectory,
    prompts_per_source,
    ratio_error,
    source_metrics,
    validation_metrics,
)


def trajectory(
    source, uid, acc, *, stop="answered", calls=1, refused=0, mask=(1, 0, 1, 1), error=None
):
    return TrainedTrajectory(
        key=f"{uid}_0_0",
        uid=uid,
        draw=0,
        source=source,
        row_id=f"{source}:0",
        reward=acc,
        acc=acc,
        prompt_ids=[1],
        response_ids=[0] * len(mask),
        response_mask=list(mask),
        log_probs=[0.0] * len(mask),
        record={
            "stop_reason": stop,
            "fault_tool": "" if stop != "infra_error" else "loop" if error else "search",
            "loop_error": error,
            "turns": [{}, {}],
            "calls": [
                {
                    "status": "rejected" if number < refused else "ok",
                    "tool": "",
                    "latency_s": 0.1,
                    "limiter_wait_s": 0.2,
                }
                for number in range(calls)
            ],
        },
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
        ]
    )
    assert metrics["mixed/nq/count"] == 2
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
    assert metrics["mixed/nq/limiter_wait_s/mean"] == pytest.approx(0.2)
    assert metrics["mixed/nq/masked_fraction"] == 0.25
    assert metrics["mixed/math/solved_none"] == 1
    assert metrics["mixed/math/truncated_rate"] == 0.5
    assert metrics["mixed/math/loop_error_rate"] == 0.5
    assert metrics["mixed/math/infra_error_rate"] == 0
    assert metrics["mixed/math/tool_error_rate"] == 0


def test_ratio_error_is_the_largest_difference_in_prompts():
    trained = prompts_per_source([trajectory("nq", "a", 1.0), trajectory("math", "b", 1.0)])
    assert ratio_error({"nq": 1, "math": 1}, trained) == 0
    assert ratio_error({"nq": 2, "taco": 1}, trained) == 1


def test_validation_is_counted_per_source_and_without_what_was_lost():
    metrics = validation_metrics(
        ["nq", "math", "nq", "nq"], [1.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [False] * 3 + [True]
    )
    assert metrics["mixed/nq/val/reward/mean"] == 0.5
    assert metrics["mixed/nq/val/pass_rate"] == 0.5
    assert metrics["mixed/math/val/pass_rate"] == 0
    assert metrics["mixed/nq/val/count"] == 2
    assert metrics["mixed/nq/val/infra_error_rate"] == pytest.approx(1 / 3)


def test_a_source_that_lost_everything_has_no_reward_instead_of_a_reward_of_zero():
    lost = [trajectory("nq", "a", 0.0, stop="infra_error", mask=(0, 0)) for _ in range(2)]
    metrics = source_metrics([*lost, trajectory("math", "b", 1.0)])
    for name in ("reward/mean", "reward/std", "pass_rate", "solved_all", "solved_none"):
        assert f"mixed/nq/{name}" not in metrics
        assert f"mixed/math/{name}" in metrics
    assert metrics["mixed/nq/count"] == 1
    assert metrics["mixed/nq/infra_error_rate"] == 1

    validated = validation_metrics(["nq", "math"], [0.0, 1.0], [0.0, 1.0], [True, False])
    assert {name for name in validated if "/nq/" in name} == {
        "mixed/nq/val/count",
        "mixed/nq/val/infra_error_rate",
    }
    assert validated["mixed/math/val/reward/mean"] == 1


def test_a_trajectory_that_was_late_before_its_first_token_is_in_no_mean():
    late = trajectory("nq", "a", 0.0, stop="deadline", mask=(0,))
    metrics = source_metrics([late, trajectory("nq", "a", 1.0), trajectory("nq", "a", 1.0)])
    assert metrics["mixed/nq/reward/mean"] == 1
    assert metrics["mixed/nq/pass_rate"] == 1
    assert metrics["mixed/nq/solved_all"] == 1
    assert metrics["mixed/nq/zero_variance"] == 1
    assert metrics["mixed/nq/infra_error_rate"] == 0
    assert metrics["mixed/nq/deadline_rate"] == pytest.approx(1 / 3)


def test_a_line_torn_by_a_kill_is_dropped_on_rewind(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(4):
        metrics.append({"step": step, "metrics": {}})
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "met')
    metrics.rewind(2, None)
    assert [record["step"] for record in read_lines(metrics.path)] == [0, 1, 2]


def test_a_step_whose_line_a_kill_took_comes_back_from_its_checkpoint(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "metrics": {"a": 1}})
    metrics.rewind(2, {"step": 2, "metrics": {"a": 2}})
    metrics.rewind(2, {"step": 2, "metrics": {"a": 3}})
    assert [record["metrics"] for record in read_lines(metrics.path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "text", [1], None])
def test_only_finite_numbers_reach_the_metrics_file(value):
    assert json.dumps(numbers_of({"good": 1, "odd": value})) == '{"good": 1.0}'


def test_each_part_of_a_reward_is_a_metric_of_its_source():
    group = [trajectory("taco", "a", 1.0) for _ in range(2)]
    lost = trajectory("taco", "a", 0.0, stop="infra_error")
    for each, passed in zip([*group, lost], (1.0, 0.5, 0.0), strict=True):
        parts = {"score": passed, "passed": passed, "infra_error": 0.0, "loop_error": 0.0}
        each.record["reward_parts"] = parts
    metrics = source_metrics([*group, lost, trajectory("nq", "b", 1.0)])
    assert metrics["mixed/taco/reward_parts/passed"] == 0.75
    assert metrics["mixed/taco/reward_parts/score"] == 0.75
    assert {name for name in metrics if "reward_parts" in name} == {
        "mixed/taco/reward_parts/passed",
        "mixed/taco/reward_parts/score",
    }
