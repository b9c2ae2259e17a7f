"""Two runs at once on one Ray: neither reads the other's rows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import QUOTAS, finish, job_of, start
from tests.fakes.ray_head import ray_head

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.algorithm, pytest.mark.timeout(1200)]


def test_two_runs_on_one_ray_train_their_own_rows_to_the_end(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"RAY_AUTH_MODE": "disabled"}
    with ray_head(
        "--num-cpus=16", "--num-gpus=2", environ=environ, until="block forever"
    ) as address:
        jobs, ended = [], []
        for number in (1, 2):
            overrides = ["trainer.nnodes=1", f"mixed.seed={number}"]
            jobs.append(job_of("mixed_sync", demo, tmp_path / str(number), overrides, steps=3))
            jobs[-1].work.mkdir()
        outs = [job.work / "out" for job in jobs]
        runs = [
            start(job.command, job.work, out, RAY_ADDRESS=address, **environ)
            for job, out in zip(jobs, outs, strict=True)
        ]
        for run, out in zip(runs, outs, strict=True):
            ended.append(finish(run, out))

    for job in jobs:
        audit = [sys.executable, "-m", "verl_mixed", "audit", str(job.folder)]
        subprocess.run(audit, check=True)
        trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
        assert len(trained) == 3 * sum(QUOTAS.values())
