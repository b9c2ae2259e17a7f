"""Files that survive a kill."""

import json

import pytest

from agent_loop.run_folder import MetricsFile, numbers_of, read_lines


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
