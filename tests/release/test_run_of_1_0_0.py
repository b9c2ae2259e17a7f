"""A run that release 1.0.0 began can be resumed, audited, reported and viewed.

`run_of_1_0_0/` holds two of the sixteen steps of that release's demo (PROFILE=laptop, seed 0), with
three of 320 trajectories; `/checkout` stands for the folder that the run was started in. What is
expected here was printed by release 1.0.0 for these files.
"""

import copy
import pkgutil
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config.lookup import at, flatten
from samplers.ledger import LedgerEntry, read_ledger
from samplers.rows.schema import SCHEMA
from verl_mixed.cli import main
from verl_mixed.launch.launcher import make_plan
from verl_mixed.run.compose import load_config, save_config
from verl_mixed.run.sections import LOOPS_FILE
from verl_mixed.run.state import RunFolder, changes_of_resume

FIXTURE = Path(__file__).parent / "run_of_1_0_0"
REPO_ROOT = Path(__file__).resolve().parents[2]

OF_USERS = (
    "agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop",
    "agent_loop.search_agent_loop.SearchAgentLoop",
    "agent_loop.math_agent_loop.MathAgentLoop",
    "agent_loop.react_agent_loop.ReactAgentLoop",
    "agent_loop.turn_agent_loop.TaggedAgentLoop",
    "agent_loop.tool_actions.calculate",
)
"""Names that stand in agent_loops.yaml of 1.0.0, or in loops that users wrote after the guide."""

AUDIT = """\
ratio audit: 2 steps, trained prompts math 16, nq 12, taco 12: every batch as planned, nothing \
skipped, nothing twice
  worst batch off by 0 prompts, the run so far by 0
  source             due   trained  filtered    failed     stale      open
  math              16.0        16         0         0         0         0
  nq                12.0        12         0         0         0         0
  taco              12.0        12         0         0         0         0
mask audit: 3 trajectories, 39 model tokens with mask 1, 48 tool tokens with mask 0, 0 problems
"""
CUT = """\
  of 320 trained trajectories 3 are in trajectories/, of 2 of 2 steps (steps 1 to 2); the others \
are not checked: no setting of the run removes them
"""  # 1.0.0 did not say that this copy of the run has three of its trajectories

REPORTED = ("2 of 16 steps", "0.453", "0.547", "0.583", "4.298", "1.914", "40.00%")
"""Rewards of the sources, seconds of generation, slowest calculation, share of math."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """The run's folder in a checkout whose training files hold the rows that the ledger names."""
    monkeypatch.chdir(tmp_path)
    copy = RunFolder(Path(shutil.copytree(FIXTURE, tmp_path / "runs" / "mixed_demo")))
    text = copy.config.read_text(encoding="utf-8")
    copy.config.write_text(text.replace("/checkout", str(tmp_path)), encoding="utf-8")
    ids = {
        (line.source, line.row): line.row_id
        for line in read_ledger(copy.ledger)
        if isinstance(line, LedgerEntry)
    }
    for source, rows in {"math": 2000, "nq": 800, "taco": 2400}.items():
        path = tmp_path / "data" / "demo" / "seed0" / f"{source}_train.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        records: list[dict[str, Any]] = [
            {
                "data_source": source,
                "agent_name": "math_agent",
                "prompt": [{"role": "user", "content": "1 + 1?"}],
                "ability": source,
                "reward_model": {"style": "rule", "ground_truth": '{"answer": "2"}'},
                "extra_info": {
                    "split": "train",
                    "index": row,
                    "row_id": ids.get((source, row), f"{source}:{row:016x}"),
                    "extras": "{}",
                },
            }
            for row in range(rows)
        ]
        pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), path)
    yield copy


def test_the_names_in_its_config_and_of_users_resolve(folder: RunFolder) -> None:
    values = [str(value) for value in flatten(load_config(folder.config)).values()]
    ours = {value for value in values if value.startswith("agent_loop.")}
    assert ours == {
        "agent_loop.loop_worker.MixedAgentLoopManager",
        "agent_loop.multi_turn_config.MixedMultiTurnConfig",
    }
    assert "pkg://agent_loop.dataset" in values
    for name in (*ours, *OF_USERS, "agent_loop.dataset.MixedRLHFDataset"):
        assert callable(pkgutil.resolve_name(name)), name


def test_it_goes_on_from_its_checkpoint_with_the_config_that_is_composed_today(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    then, now = load_config(folder.config), make_plan([], {"PROFILE": "laptop"}).config
    assert Path(at(now, LOOPS_FILE)) == REPO_ROOT / "config" / "agent_loops.yaml"
    at(then, "actor_rollout_ref.rollout.agent")["agent_loop_config_path"] = at(now, LOOPS_FILE)

    assert changes_of_resume(then, now) == []
    assert folder.has_trained() and folder.saved_step() == 2
    assert not folder.is_done(int(at(now, "trainer.total_training_steps")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("trainer.total_epochs", 3, False),
        ("algorithm.gamma", 0.9, False),
        ("critic.ulysses_sequence_parallel_size", 2, False),
        ("trainer.save_frequency", 5, False),  # a key of nobody's
        ("actor_rollout_ref.actor.optim.lr", 1e-3, True),
        (LOOPS_FILE, "/another/checkout/config/agent_loops.yaml", False),
        (LOOPS_FILE, "/another/checkout/my_loops.yaml", True),
    ],
)
def test_it_goes_on_if_only_keys_without_effect_have_changed(
    folder: RunFolder, key: str, value: float | str, is_refused: bool
) -> None:
    plan = replace(make_plan([], {"PROFILE": "laptop"}), folder=folder)
    then = copy.deepcopy(plan.config)
    section, _, name = key.rpartition(".")
    at(then, section)[name] = value
    save_config(then, folder.config)

    assert [change.split(":")[0] for change in plan.refused_changes()] == [key] * is_refused


def test_its_audit_says_what_1_0_0_said(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder.path)]) == 0
    *said, absent = capsys.readouterr().out.splitlines(keepends=True)
    assert "".join(said) == AUDIT + CUT
    assert absent.startswith("  no record has ") and "older releases did not write" in absent


def test_its_report_shows_what_1_0_0_showed(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder.path)]) == 0
    assert capsys.readouterr().out == f"{folder.report}\n"
    page = folder.report.read_text(encoding="utf-8")
    assert [number for number in REPORTED if number not in page] == []


def test_its_trajectories_are_viewed_as_by_1_0_0(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "view.html"
    assert main(["view", str(folder.path), "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: 3 of 3 trajectories, ")
    text = page.read_text(encoding="utf-8")
    for row_id in ("math:d8b7a84399cb56a9", "nq:7ea131cb54331c27", "taco:ff6b6185673f7453"):
        assert row_id in text
