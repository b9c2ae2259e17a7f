"""Two runs with `full_determinism` on the real trainer: the same bits, whatever came when. An
evaluation of a checkpoint has the bits of the validation at its step.

In --long the first goes back to a checkpoint by its path, and trains its last step again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.evaluation_records import read_records
from agent_loop.records.statistics import results_of
from tests.e2e.jobs import Job, finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.launch import processes
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2

SAME = (
    *("step", "source", "row_id", "draw", "prompt_ids", "response_ids", "response_mask"),
    *("log_probs", "reward", "advantage", "stop_reason"),
)


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    done = []
    for name in ("first", "second"):
        work = tmp_path_factory.mktemp(name)
        overrides = (
            "actor_rollout_ref.rollout.full_determinism=true",
            f"trainer.test_freq={STEPS}",
            "ray_kwargs.ray_init.include_dashboard=false",
        )
        job = job_of("twice", demo, work, overrides, STEPS)
        finish(start(job.command, work, work / "out.txt"), work / "out.txt")
        done.append(job)
    return done


@pytest.fixture(scope="module")
def evaluated(runs: list[Job]) -> Job:
    """The first run, and its last checkpoint, evaluated."""
    first = runs[0]
    command = [sys.executable, "-m", "verl_mixed", "evaluate", str(first.folder)]
    command += ["--step", str(STEPS), "--json", str(first.work / "results.json")]
    out = first.work / "evaluate.txt"
    finish(start(command, first.work, out), out)
    return first


@pytest.fixture
def gone_back(runs: list[Job]) -> Job:
    first = runs[0]
    checkpoint = first.folder / "checkpoints" / "global_step_1"
    again = (f"trainer.resume_from_path={checkpoint}", "trainer.resume_mode=resume_path")
    out = first.work / "again.txt"
    finish(start([*first.command, *again], first.work, out), out)
    return first


def trajectories(job: Job, step: int) -> list[dict[str, Any]]:
    lines = read_lines(job.folder / "trajectories" / f"{step}.jsonl")
    return [{key: line[key] for key in SAME} for line in lines]


def test_every_trajectory_is_the_same_to_the_last_bit(runs: list[Job]):
    first, second = runs
    for step in range(1, STEPS + 1):
        assert trajectories(first, step)
        assert trajectories(first, step) == trajectories(second, step)


def test_the_weights_are_the_same_to_the_last_bit(runs: list[Job]):
    import torch

    def weights(job: Job) -> dict[str, Any]:
        actor = job.folder / "checkpoints" / f"global_step_{STEPS}" / "actor"
        saved = torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=False)
        return {name: weight.to_local() for name, weight in saved.items()}

    first, second = (weights(job) for job in runs)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_validations_are_the_same_to_the_last_bit(runs: list[Job]):
    for step in (0, STEPS):
        files = [job.folder / "validation" / f"{step}.jsonl" for job in runs]
        assert files[0].read_bytes() == files[1].read_bytes()
    records = read_records(runs[0].folder / "validation" / f"{STEPS}.jsonl")[0]
    assert len(records) == 6 and any(record.tool_calls for record in records)
    metrics = read_lines(runs[0].folder / "metrics.jsonl")[-1]["metrics"]
    for source, result in results_of(records).items():
        assert result.reward is not None
        assert metrics[f"mixed/{source}/val/reward/mean"] == result.reward.mean


@pytest.mark.nightly
def test_an_evaluation_of_a_step_is_its_validation_to_the_last_bit(evaluated: Job):
    validation = evaluated.folder / "validation" / f"{STEPS}.jsonl"
    folder = evaluated.folder / "evaluations" / f"step_{STEPS}"
    assert (folder / "records.jsonl").read_bytes() == validation.read_bytes()
    results = json.loads((evaluated.work / "results.json").read_text())
    assert [one["label"] for one in results["evaluations"]] == [f"step_{STEPS}"]
    left = processes.of_run(folder)
    assert left == []


@pytest.mark.algorithm
def test_a_run_that_goes_back_to_a_checkpoint_is_whole_and_the_same(
    runs: list[Job], gone_back: Job
):
    audit = audit_run(RunFolder(gone_back.folder), load_config(gone_back.folder / "config.yaml"))
    assert audit.ok, describe(audit)
    assert [line["step"] for line in read_lines(gone_back.folder / "metrics.jsonl")] == [0, 1, 2]
    assert gone_back.saved() == STEPS
    assert trajectories(gone_back, STEPS) == trajectories(runs[1], STEPS)
