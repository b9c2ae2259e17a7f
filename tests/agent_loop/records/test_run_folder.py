"""Files that survive a kill."""

import json
from pathlib import Path

import pytest

from agent_loop.records.run_folder import (
    MetricsFile,
    numbers_of,
    read_metrics,
    whole_checkpoint,
    write_text,
)
from tests.json_lines import read_lines


def test_a_line_torn_by_a_kill_is_dropped_on_rewind(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(4):
        metrics.append({"step": step, "time": 0, "metrics": {}})
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "met')
    metrics.rewind(2, None)
    assert [record["step"] for record in read_lines(metrics.path)] == [0, 1, 2]


def test_a_step_whose_line_a_kill_took_comes_back_from_its_checkpoint(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "time": 0, "metrics": {"a": 1}})
    metrics.rewind(2, {"step": 2, "time": 0, "metrics": {"a": 2}})
    metrics.rewind(2, {"step": 2, "time": 0, "metrics": {"a": 3}})
    assert [record["metrics"] for record in read_lines(metrics.path)] == [{"a": 1}, {"a": 2}]


def test_only_names_that_verl_writes_are_checkpoints(tmp_path: Path):
    for name in ("global_step_3", "global_step_5", "global_step_9_old", "backup", "copy_of_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.pt").touch()
    (tmp_path / "global_step_6").mkdir()
    assert (whole_checkpoint(tmp_path), whole_checkpoint(tmp_path, 4)) == (5, 3)


NO_METRICS = (
    b"torn in the mid",
    b"\xff\xfe\x00",
    b"null",
    b'{"time": 0, "metrics": {}}',
    b'{"step": 1, "time": 0, "metrics": []}',
    b'{"step": 1, "time": 1e308, "metrics": {}}',
)


@pytest.mark.parametrize("raw", NO_METRICS)
def test_a_finished_line_that_is_none_is_counted_and_outlives_a_resume(tmp_path, raw):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "time": 0, "metrics": {"a": 1, "of verl": "text"}})
    with metrics.path.open("ab") as file:
        file.write(raw + b"\n")
    for step in (2, 3):
        metrics.append({"step": step, "time": 0, "metrics": {}})
    before = metrics.path.read_bytes().splitlines()

    lines, passed_over = read_metrics(metrics.path)
    assert ([line["step"] for line in lines], passed_over) == ([1, 2, 3], 1)
    assert lines[0]["metrics"] == {"a": 1}

    metrics.rewind(2, None)

    assert metrics.path.read_bytes().splitlines() == before[:-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "text", [1], None])
def test_only_finite_numbers_reach_the_metrics_file(value):
    assert json.dumps(numbers_of({"good": 1, "odd": value})) == '{"good": 1.0}'


def test_a_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_text(page, "old")
    write_text(page, "a \ud800 b")
    (tmp_path / "folder").mkdir()

    with pytest.raises(OSError, match="not a regular file"):
        write_text(tmp_path / "folder", "new")

    assert page.read_text() == "a ? b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "page.html"]
