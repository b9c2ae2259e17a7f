"""Decided shares on the real trainer: over kills, in an asynchronous mode, and in tokens."""

from pathlib import Path
from typing import Any

import pytest

from samplers.adaptive.profiles import RowProfile, row_ids_of, write_profile
from samplers.ledger import LedgerEntry, read_ledger
from tests.e2e.jobs import CONTROL, Job, decisions, finish, job_of, start
from tests.e2e.test_training import finish_over_kills
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.algorithm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

STEPS = 5
ASYNC_STEPS = 3


def run(
    name: str, demo: Path, work: Path, *overrides: str, steps: int = STEPS, killed: bool = False
) -> Job:
    job = job_of(name, demo, work, [*overrides, *CONTROL], steps)
    if killed:
        finish_over_kills(job)
    else:
        finish(start(job.command, work, work / "out.txt"), work / "out.txt")
    return job


def audited(job: Job) -> list[LedgerEntry]:
    """The trained prompts of a run whose audit finds nothing."""
    report = audit_run(RunFolder(job.folder), load_config(job.folder / "config.yaml"))
    assert report.ok, describe(report)
    lines = read_ledger(job.folder / "ledger.jsonl")
    return [line for line in lines if isinstance(line, LedgerEntry) and line.outcome == "trained"]


def test_kills_at_any_step_give_the_same_decisions(
    demo: Path, tmp_path_factory: pytest.TempPathFactory
):
    overrides = (
        "mixed.controller=worst",
        "actor_rollout_ref.rollout.full_determinism=true",
        "+mixed.sources.math.curriculum={start: 0.6, end: 0.4, width: 0.3, steps: 3}",
    )
    profile(demo)
    jobs = [
        run("decided", demo, tmp_path_factory.mktemp(name), *overrides, killed=name == "killed")
        for name in ("whole", "killed")
    ]
    whole, killed = jobs
    assert len(decisions(whole)) == STEPS
    assert decisions(killed) == decisions(whole)
    assert audited(killed) == audited(whole)
    assert (whole.folder / "profile.jsonl").exists()


def test_shares_in_tokens_are_decided_in_an_asynchronous_mode(
    demo: Path, tmp_path_factory: pytest.TempPathFactory
):
    job = run(
        "tokens",
        demo,
        tmp_path_factory.mktemp("tokens"),
        *("trainer.v1.trainer_mode=mixed_colocate_async", "mixed.unit=trained_tokens"),
        "mixed.controller=progress",
        steps=ASYNC_STEPS,
    )
    audited(job)
    made = decisions(job)
    assert len(made) == ASYNC_STEPS
    assert all(set(each.foreseen.values()) != {"1"} for each in made)


def profile(demo: Path) -> None:
    """Profiles of the demo's rows of math, all solved once of two times."""
    path = demo / "math_train.parquet"
    own: dict[str, Any] = {"trials": 2, "passed": 1, "low": 0.1, "high": 0.9, "by": "a test"}
    write_profile(path, [RowProfile(row_id=i, **own) for i in row_ids_of([str(path)])["math"]])
