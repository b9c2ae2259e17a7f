"""The audit of a run's folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.metrics.mask_audit import MaskReport
from samplers.ledger import Ledger, LedgerEntry
from tests.verl_mixed.conftest import RunEnviron
from tests.verl_mixed.run_files import run_of
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.audit import audit_run, describe, plan_of
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder


@pytest.fixture
def folder(run_environ: RunEnviron) -> RunFolder:
    """A run that has trained no step."""
    config = make_plan([], run_environ).config
    folder = run_of(Path("runs/trial"), steps=-1, config=config)
    Ledger(folder.ledger).begin(plan_of(config).description())
    return folder


def test_a_line_of_metrics_that_is_none_is_a_problem(folder: RunFolder) -> None:
    folder.metrics.write_bytes(b"\xff{\n")

    report = audit_run(folder, load_config(folder.config))
    sound = replace(report, masks=MaskReport(trajectories=1))

    assert describe(report)[-1] == "metrics.jsonl: 1 line cannot be read and was passed over"
    assert not sound.ok and replace(sound, passed_over=0).ok


def test_what_an_audit_says_does_nothing_to_the_terminal(folder: RunFolder) -> None:
    entry = LedgerEntry(
        step=1,
        source="\x1b]0;title\x07\u202e",
        draw=0,
        row=0,
        row_id="",
        outcome="trained",
        trajectories=2,
        reward_mean=0.5,
    )
    Ledger(folder.ledger).append_step(1, [entry], {})

    said = describe(audit_run(folder, load_config(folder.config)))

    assert any("]0;title" in line for line in said)
    assert all(line.isprintable() for line in said)
