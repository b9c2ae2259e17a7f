"""What was decided: in the plan's difference, in the report, and in the audit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from samplers.audit import audit
from samplers.ledger import Decision, Ledger, LedgerEntry, Line, read_ledger
from samplers.mixture_plan import MixturePlan
from tests.fakes.run_folder import write_run
from tests.samplers.adaptive.test_windows import make_plan, trained
from verl_mixed.run.state import RunFolder
from verl_mixed.views.decisions import decided, sentences, table_of, trained_in_units
from verl_mixed.views.mixture_rows import ratio_rows
from verl_mixed.views.plan.text import describe_decisions
from verl_mixed.views.report.page import render
from verl_mixed.views.report.runs import load_run

STEPS = 12
FACTS = {"a": (0, 0.0, 30), "b": (2, 0.9, 20), "c": (3, 0.5, 10)}
"""Source -> solved of 4, advantage, tokens; `a` never has a difference."""


def write(path: Path, *, steps: int = STEPS) -> tuple[MixturePlan, list[Line]]:
    """A ledger whose shares are decided every 2 steps."""
    plan, ledger = make_plan(), Ledger(path)
    ledger.begin(plan.description())
    window: list[LedgerEntry] = []
    for step in range(1, steps + 1):
        entries = []
        for prompt in plan.take(plan.batch_size):
            where = {"draw": prompt.draw, "row": prompt.row}
            name = f"{prompt.source}:{prompt.row}"
            facts = FACTS[prompt.source]
            entries.append(trained(step, prompt.source, facts, row_id=name, **where))
        window += entries
        decision = None
        if step % 2 == 0:
            decision, window = plan.decide(window), []
        ledger.append_step(step, entries, plan.drawn, decision)
    return plan, read_ledger(path)


def problems(lines: Sequence[Line]) -> str:
    return "\n".join(audit(lines, make_plan()).problems)


def test_a_ledger_with_decisions_is_audited_by_them(tmp_path: Path):
    plan, lines = write(tmp_path / "ledger.jsonl")
    report = audit(lines, make_plan())
    assert report.ok and report.worst_batch == 0 and report.cumulative_error < 1
    assert report.trained["a"] < report.trained["b"]
    assert [line for line in lines if isinstance(line, Decision)] == plan.decisions[1:]
    assert all(row.error == 0 for row in ratio_rows([], lines))


def _other(line: Line, number: int, /, **changes: object) -> Line:
    is_it = isinstance(line, Decision) and line.window == number
    return replace(line, **changes) if is_it else line  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda line: _other(line, 2, prompts={"a": 8, "b": 6, "c": 6}),
            "the decision for the steps from 5 on has prompts=",
        ),
        (lambda line: _other(line, 3, held=[]), "the decision for the steps from 7 on has held=[]"),
        (
            lambda line: (
                replace(line, solved=4)
                if isinstance(line, LedgerEntry) and (line.step, line.source) == (3, "b")
                else line
            ),
            "the decision for the steps from 5 on has inputs=",
        ),
    ],
)
def test_a_decision_that_does_not_follow_its_rule_is_named(tmp_path: Path, change, words: str):
    _, lines = write(tmp_path / "ledger.jsonl")
    assert words in problems([change(line) for line in lines])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": {"b": 10, "c": 10}}, "has prompts of ['b', 'c'], want ['a', 'b', 'c']"),
        ({"prompts": {"a": 9, "b": 9, "c": 9}}, "want numbers that sum to 20"),
        ({"foreseen": {"a": "0", "b": "1", "c": "1"}}, "want fractions above 0"),
        ({"window": 7}, "is window=7, want 2"),
        ({"from_step": 7}, "on is written in step 4"),
    ],
)
def test_a_decision_that_cannot_be_followed_is_a_problem_and_no_error(
    tmp_path: Path, change: dict[str, object], words: str
):
    _, lines = write(tmp_path / "ledger.jsonl")
    assert words in problems([_other(line, 2, **change) for line in lines])


@pytest.mark.parametrize("kept", [0, 3, 5])
def test_decisions_that_are_missing_are_a_problem(tmp_path: Path, kept: int):
    _, lines = write(tmp_path / "ledger.jsonl")
    without = [line for line in lines if not isinstance(line, Decision) or line.window <= kept]
    words = f"step {2 * (kept + 1)} ends a window without a decision"
    assert words in problems(without)


def test_a_batch_that_does_not_follow_its_decision_is_named(tmp_path: Path):
    _, lines = write(tmp_path / "ledger.jsonl")
    without = [line for line in lines if not isinstance(line, Decision) or line.window < 2]
    assert "step 5 trained" in problems(without)


@pytest.mark.parametrize("step", [1, 4, 5, 11])
def test_a_ledger_goes_back_with_its_decisions(tmp_path: Path, step: int):
    path = tmp_path / "ledger.jsonl"
    write(path)
    Ledger(path).rewind(step)
    _, shorter = write(tmp_path / "shorter.jsonl", steps=step)
    assert read_ledger(path) == shorter
    raw = path.read_bytes()
    path.write_bytes(raw[:-9])  # a kill cut the last step short
    assert Ledger(path).last_step == step - 1


def test_the_table_and_the_sentence_of_a_source_that_was_held(tmp_path: Path):
    _, lines = write(tmp_path / "ledger.jsonl")
    own = decided(lines)
    assert own is not None and own.held == {"a": 5}
    head, rows = table_of(own)
    assert head == ["steps", "a", "b", "c"] and len(rows) == 1 + STEPS // 2
    assert rows[0][:2] == ["1-2", "0.500: 10"]
    assert "held" in rows[-1][1] and rows[-1][1].startswith("0.100: 2 (pass 0.00, |A| 0.00)")
    assert sentences(own)[0].startswith("a was held at its lowest share from step 5 on")
    described = describe_decisions(lines)
    assert described[1].startswith("decided by progress: share of prompts")
    assert len(described) == 3 + len(rows) + 1
    assert trained_in_units(lines)["tokens"]["b"] == 20 * trained_in_units(lines)["prompts"]["b"]


def test_the_report_shows_decisions_and_shares_in_all_units(tmp_path: Path):
    folder = tmp_path / "run"
    write_run(folder, STEPS, sources=("a", "b", "c"), batch_size=10)
    (folder / "ledger.jsonl").unlink()
    write(folder / "ledger.jsonl")
    page = render([load_run(RunFolder(folder))])
    section = page.split('<h2 id="decided-shares">')[1].split("</section>")[0]
    assert "a was held at its lowest share from step 5 on" in section
    assert "Share of prompts, decided by progress" in page
    assert "trained tokens" in page


def test_a_run_with_fixed_ratios_has_no_decisions(tmp_path: Path):
    write_run(tmp_path / "run", 3)
    lines = read_ledger(tmp_path / "run/ledger.jsonl")
    assert decided(lines) is None and describe_decisions(lines) == []
    page = render([load_run(RunFolder(tmp_path / "run"))])
    assert "No controller: the shares are the ratios." in page
