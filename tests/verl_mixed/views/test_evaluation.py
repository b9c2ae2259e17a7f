"""Tables and files of evaluations, and the rows that changed."""

import csv
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.records import of_policy, record
from verl_mixed.run.evaluations import Evaluation
from verl_mixed.views.evaluation import (
    cells_of,
    changed_lines,
    changed_rows,
    compared,
    comparison_note,
    differences_json,
    differences_table,
    head_of,
    results_table,
    summary_of,
    write_csv,
)


def evaluation(label: str, chances: list[float], seed: int = 0, samples: int = 2) -> Evaluation:
    records = of_policy(chances, samples, seed) + of_policy(chances[::-1], samples, seed, "math")
    return Evaluation(label=label, step=0, records=records)


def test_a_row_is_a_source_of_an_evaluation():
    summaries = [
        summary_of(evaluation(label, [share] * 30, seed), (1, 2))
        for seed, (label, share) in enumerate({"step_0": 0.0, "step_9": 1.0}.items())
    ]
    head, cells = head_of(summaries), cells_of(summaries)
    assert head[3:6] == ["reward", "pass@1", "pass@2"]
    assert [row[:3] for row in cells] == [
        ["math", "step_0", "30 x 2"],
        ["math", "step_9", "30 x 2"],
        ["nq", "step_0", "30 x 2"],
        ["nq", "step_9", "30 x 2"],
    ]
    assert cells[0][3] == "0.00 [0.00, 0.11]" and cells[1][3] == "1.00 [0.89, 1.00]"
    assert cells[0][6:] == ["12", "1.0", "2.0", "0"]
    console = Console(width=160, record=True)
    console.print(results_table(summaries))
    assert "1.00 [0.89, 1.00]" in console.export_text()


def test_a_source_that_lost_everything_has_no_number():
    lost = Evaluation(label="a", step=0, records=[record(lost=True)])
    summary = summary_of(lost, (1,))
    assert summary["sources"]["nq"]["reward"] is None
    assert cells_of([summary])[0][2:4] == ["0 x 0", "-"]


def test_each_difference_is_corrected_for_all_of_them():
    steps = [evaluation(f"step_{i}", [0.1 + i / 4] * 80, seed=i) for i in range(3)]
    found = compared(steps)
    assert [(one.source, one.first, one.last) for one in found] == [
        ("math", "step_0", "step_1"),
        ("math", "step_0", "step_2"),
        ("nq", "step_0", "step_1"),
        ("nq", "step_0", "step_2"),
    ]
    assert {one.difference.comparisons for one in found} == {4}
    assert {one.difference.verdict for one in found} == {"improved"}
    assert comparison_note(4).startswith("paired by prompt; 4 comparisons, each interval at 98.8 %")
    assert differences_json(found)[0]["verdict"] == "improved"
    assert differences_table(found).row_count == 4
    assert compared(steps[:1]) == []


def test_a_comparison_of_unequal_numbers_of_samples_says_what_it_leaves_out():
    few, many = evaluation("few", [0.5] * 9, samples=1), evaluation("many", [0.5] * 9, samples=4)
    found = compared([few, many])
    assert [one.left_out for one in found] == [27, 27]
    assert differences_json(found)[0]["left_out"] == 27
    assert "both sides have are compared: 54 judged samples are left out" in str(
        differences_table(found).caption
    )
    assert "left out" not in str(differences_table(compared([few, few])).caption)


def test_the_csv_has_a_row_for_each_source_and_evaluation(tmp_path: Path):
    summaries = [summary_of(evaluation(label, [0.5] * 9), (1, 2)) for label in "ab"]
    write_csv(summaries, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["source"], row["label"]) for row in rows] == [
        ("math", "a"),
        ("math", "b"),
        ("nq", "a"),
        ("nq", "b"),
    ]
    own = summaries[0]["sources"]["math"]
    assert float(rows[0]["pass@2"]) == own["pass_at"]["2"]["mean"]
    assert float(rows[0]["reward_low"]) == pytest.approx(own["reward"]["interval"][0])


def test_a_pass_at_k_of_fewer_prompts_says_how_many(tmp_path: Path):
    records = [
        record(row=row, sample=i, lost=row == "0" and i > 0) for row in "012" for i in range(4)
    ]
    summary = summary_of(Evaluation(label="a", step=0, records=records), (1, 4))
    (row,) = cells_of([summary])
    assert row[2] == "3 x 3" and row[4].startswith("1.00 [") and "of" not in row[4]
    assert row[5].startswith("1.00 [") and row[5].endswith("] of 2")
    assert "pass@k of N: over the N prompts" in str(results_table([summary]).caption)
    assert summary["sources"]["nq"]["pass_at"]["4"]["prompts"] == 2
    write_csv([summary], tmp_path / "out.csv")
    (written,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert (written["prompts"], written["pass@1_prompts"], written["pass@4_prompts"]) == (
        "3",
        "3",
        "2",
    )
    whole = summary_of(evaluation("b", [0.5] * 9), (1, 2))
    assert "pass@k of N" not in str(results_table([whole]).caption)


def test_rows_that_changed_are_told_with_their_questions():
    first = [record(row="0"), record(row="1", reward=0.0), record(row="2"), record(row="3")]
    last = [
        record(row="0", reward=0.0),
        record(row="1"),
        record(row="2", reward=1.5),  # solved before and after
        record(row="3", reward=0.0, lost=True),  # lost is not unsolved
    ]
    changed = changed_rows(first, last)
    assert [(row.row_id, row.first, row.last) for row in changed] == [
        ("nq:0", 1.0, 0.0),
        ("nq:1", 0.0, 1.0),
    ]
    lines = list(changed_lines(changed))
    assert lines[0] == "nq: 1 row solved less often, by 1.00 on average"
    assert lines[1] == "  solved -> unsolved  nq:0  What is 0?"
    assert lines[3] == "  unsolved -> solved  nq:1  What is 1?"


def test_only_the_first_rows_are_printed():
    first = [record(row=str(i)) for i in range(5)]
    last = [record(row=str(i), reward=0.0) for i in range(5)]
    lines = list(changed_lines(changed_rows(first, last), most=2))
    assert len(lines) == 4 and lines[-1] == "  and 3 more; --json lists all"
