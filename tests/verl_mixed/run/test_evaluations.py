"""Records of validations and evaluations, found by name."""

import json
from pathlib import Path

import pytest

from agent_loop.records.evaluation_records import write_records
from config.disk import BrokenFile
from tests.fakes.records import record
from verl_mixed.run.evaluations import (
    named_evaluation,
    selected_records,
    summaries_of,
    validation_file,
    validations_of,
)


def run_with(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        write_records(validation_file(tmp_path, step), [record(step=step)])
    return tmp_path


def validated(step: int) -> dict[str, object]:
    return {"step": step, "time": 0.0, "metrics": {"mixed/nq/val/reward/mean": 0.5}}


def test_a_run_at_a_step_is_its_validation_or_else_its_evaluation(tmp_path: Path):
    run = run_with(tmp_path, 4)
    evaluated = run / "evaluations" / "step_6" / "records.jsonl"
    write_records(evaluated, [record(step=6), record(row="1", step=6)])

    assert named_evaluation(f"{run}@4").step == 4
    assert len(named_evaluation(f"{run}@6").records) == 2
    assert named_evaluation(str(evaluated.parent)).label == "step_6"
    assert named_evaluation(str(validation_file(run, 4))).label == "4"
    with pytest.raises(ValueError, match=r"no records of .*@5: validations .* are 4; run"):
        named_evaluation(f"{run}@5")
    with pytest.raises(ValueError, match="no records at nothing"):
        named_evaluation("nothing")


def test_only_first_and_last_validation_of_the_metrics_are_read(tmp_path: Path):
    run = run_with(tmp_path, 0, 2, 4, 9)  # 9 is of before the run went back
    lines = [validated(0), validated(2), {"step": 3, "metrics": {}}, validated(4)]

    assert validations_of(run, lines).keys() == {0, 4}
    assert validations_of(run, lines[:1]).keys() == {0}
    assert validations_of(tmp_path / "older", lines) == {}


def test_a_damaged_validation_is_as_none_because_a_change_needs_no_pairs(tmp_path: Path):
    run = run_with(tmp_path, 0, 4)
    validation_file(run, 4).write_text("broken\n")

    assert validations_of(run, [validated(0), validated(4)]).keys() == {0}


def test_records_are_those_of_the_last_call(tmp_path: Path):
    records = [record(row=row, sample=sample) for row in "01" for sample in range(3)]
    (tmp_path / "selected.json").write_text(json.dumps([["nq", "nq:1"]]))

    assert [(each.row_id, each.sample) for each in selected_records(tmp_path, records, 2)] == [
        ("nq:1", 0),
        ("nq:1", 1),
    ]


def test_a_named_evaluation_has_the_rows_of_its_last_call_and_says_if_it_is_unfinished(
    tmp_path: Path,
):
    folder = tmp_path / "mine"
    write_records(
        folder / "records.jsonl", [record(row=row, sample=i) for row in "01" for i in range(3)]
    )
    one = named_evaluation(str(folder))
    assert (len(one.records), one.is_finished) == (6, False)
    (folder / "selected.json").write_text(json.dumps([["nq", "nq:1"]]))
    (folder / "job.json").write_text(json.dumps({"selection": {"samples": 2}}))
    one = named_evaluation(str(folder))
    assert (len(one.records), one.is_finished) == (2, False)
    (folder / "summary.json").write_text("{}")
    assert named_evaluation(str(folder / "records.jsonl")).is_finished
    with (folder / "records.jsonl").open("a") as file:
        file.write("{}\n")
    one = named_evaluation(str(folder))
    assert (len(one.records), one.is_finished) == (2, False)


def test_summaries_are_in_order_of_steps_and_a_broken_one_is_named(tmp_path: Path):
    for step in (10, 2):
        folder = tmp_path / "evaluations" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"label": folder.name, "step": step}))
    assert [one["step"] for one in summaries_of(tmp_path)] == [2, 10]
    (folder / "summary.json").write_text("{")
    with pytest.raises(BrokenFile, match=r"step_2/summary\.json: no summary"):
        summaries_of(tmp_path)
