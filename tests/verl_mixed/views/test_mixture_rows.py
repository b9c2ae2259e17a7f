"""Planned and trained prompts of each step."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from samplers.ledger import LedgerEntry, Line, read_ledger
from tests.fakes.run_folder import write_run
from verl_mixed.views.mixture_rows import evictions, missing_steps, ratio_rows


def changed(ledger: list[Line], step: int, source: str, outcome: str) -> list[Line]:
    """The ledger, with the first prompt of a source in a step evicted."""
    found = next(
        i
        for i, line in enumerate(ledger)
        if isinstance(line, LedgerEntry) and (line.step, line.source) == (step, source)
    )
    entry = ledger[found]
    assert isinstance(entry, LedgerEntry)
    ledger[found] = replace(entry, outcome=outcome, trajectories=0, reward_mean=None)
    return ledger


def test_rows_of_the_ledger_equal_a_count_of_its_lines(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", 7, batch_size=7)
    raw = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    counted = Counter((e["step"], e["source"]) for e in raw if e.get("outcome") == "trained")

    rows = ratio_rows(lines, read_ledger(tmp_path / "run/ledger.jsonl"))

    assert [row.step for row in rows] == list(range(1, 8))
    for row in rows:
        assert row.planned == row.trained
        assert row.trained == {source: counted[row.step, source] for source in row.trained}
        assert (row.error, row.logged) == (0, True)
        assert row.cumulative is not None and 0 <= row.cumulative < 1
    # 7 prompts at 2 : 1 : 1 are 3.5, 1.75 and 1.75: no step can be exactly due
    assert max(row.cumulative or 0 for row in rows) > 0


def test_a_prompt_that_was_not_trained_shows_in_its_step_and_since(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", 4)
    ledger = changed(read_ledger(tmp_path / "run/ledger.jsonl"), 2, "nq", "filtered")

    rows = ratio_rows(lines, ledger)

    assert [row.error for row in rows] == [0, 1, 0, 0]
    assert [row.cumulative for row in rows] == [0, 1, 1, 1]
    assert [row.logged for row in rows] == [True, False, True, True]
    assert evictions(lines, ledger) == {"nq": {"filtered": 1}}


def test_without_a_ledger_the_metrics_say_it_and_no_plan_is_made_up() -> None:
    metrics = {
        "mixed/math/count": 3.0,
        "mixed/math/reward/mean": 0.5,
        "mixed/math/evicted/stale": 2.0,
        "mixed/ratio_error/max": 1.0,
        "mixed/ratio_error/cumulative_max": 1.5,
    }
    lines = [{"step": 1, "time": 0.0, "metrics": metrics}, {"step": 2, "time": 1.0, "metrics": {}}]

    (row,) = ratio_rows(lines)

    assert row.trained == {"math": 3}
    assert (row.planned, row.error, row.cumulative) == (None, 1, 1.5)
    assert evictions(lines) == {"math": {"stale": 2}}


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_the_ledger_has_not_ended_is_no_row(tmp_path: Path, steps: int) -> None:
    lines = write_run(tmp_path / "run", steps, total=9)
    ledger = tmp_path / "run/ledger.jsonl"
    with ledger.open("a") as file:
        file.write('{"step": 4, "source": "math", "draw": 99, "ro')

    assert len(ratio_rows(lines, read_ledger(ledger))) == steps


def test_steps_without_a_row_are_found_in_the_middle_and_at_the_end(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", 9)
    ledger = read_ledger(tmp_path / "run/ledger.jsonl")

    def without(*steps: int) -> list[Line]:
        return [line for line in ledger if getattr(line, "step", None) not in steps]

    assert missing_steps(lines, ratio_rows(lines, ledger)) == []
    assert missing_steps(lines[:4], ratio_rows(lines[:4], ledger)) == []  # it has steps first
    assert missing_steps(lines, ratio_rows(lines, without(1, 4, 5, 8, 9))) == [
        (1, 1),
        (4, 5),
        (8, 9),
    ]
    assert missing_steps(lines, []) == [(1, 9)]
    assert missing_steps([], []) == []
