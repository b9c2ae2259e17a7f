"""The audit of a run's folder."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.records.mask_audit import MaskReport
from agent_loop.records.trajectory_record import TrajectoryRecord, line_of
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
    sound = replace(report, masks=MaskReport(by_step=Counter({1: 1})))

    assert describe(report)[-1] == "metrics.jsonl: 1 line cannot be read and was passed over"
    assert not sound.ok and replace(sound, passed_over=0).ok


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({1: 2, 2: 2, 3: 2}, None),
        ({2: 2, 3: 1, 7: 5}, "3 are in trajectories/, of 2 of 3 steps (steps 2 to 3)"),
        ({}, "0 are in trajectories/, of 0 of 3 steps; the others"),
    ],
)
def test_an_audit_says_which_trajectories_have_no_file(
    folder: RunFolder, files: dict[int, int], said: str | None
) -> None:
    ledger = Ledger(folder.ledger)
    for step in (1, 2, 3):
        entry = LedgerEntry(
            **{"step": step, "source": "math", "draw": step, "row": 0, "row_id": ""},
            **{"outcome": "trained", "trajectories": 2, "reward_mean": 0.5},
        )
        ledger.append_step(step, [entry], {})
    (folder.path / "trajectories").mkdir(exist_ok=True)
    for step, count in files.items():
        lines = [line_of(TrajectoryRecord(step=step, key=f"a_{n}_0")) for n in range(count)]
        (folder.path / "trajectories" / f"{step}.jsonl").write_bytes(b"".join(lines))
    config = load_config(folder.config)
    config["mixed"] |= {"trajectory_keep": 2, "trajectory_sample_step": 16}

    report = audit_run(folder, config)

    assert report.masks.problems == [] and report.masks.ok == bool(files)
    if said is None:
        assert report.coverage == ""
    else:
        words = [line for line in describe(report) if said in line]
        assert words and "trajectory_sample_step=16, mixed.trajectory_keep=2" in words[0]


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


def test_a_run_without_its_ledger_cannot_be_audited(folder: RunFolder) -> None:
    folder.ledger.unlink()
    with pytest.raises(ValueError, match="trained no step, or lost its ledger"):
        audit_run(folder, load_config(folder.config))
