"""`mixture=reasoning` with the real reasoning-gym, which is installed into its own environment."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.jobs import finish, start
from tests.fakes.pinned_environment import ROOT, cache_of, python_beside
from tests.json_lines import read_lines
from tests.ports import free_ports

pytestmark = [pytest.mark.reasoning, pytest.mark.slow, pytest.mark.timeout(1500)]
PINS = ROOT / "tests/fakes/reasoning/requirements.txt"
STEPS = 2
QUOTAS = {"sums": 3, "products": 2, "arithmetic": 2, "decimals": 1, "divisors": 1, "equations": 1}
"""Of a batch of 10."""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_beside(PINS, cache_of([PINS], "reasoning"))


def test_the_tests_of_the_tasks_pass(python: Path) -> None:
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "reasoning", "tests/reasoning"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@pytest.mark.ray
def test_a_run_is_exact_and_its_answers_are_judged(
    python: Path, demo: Path, tmp_path: Path
) -> None:
    command = [
        *(str(python), "-m", "verl_mixed", "train", "mixture=reasoning"),
        f"actor_rollout_ref.model.path={demo / 'model'}",
        "mixed.experiment=reasoning",
        "data.train_batch_size=10",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.total_training_steps={STEPS}",
        "ray_kwargs.ray_init.include_dashboard=false",
        f"ray_kwargs.ray_init.dashboard_port={free_ports(1)[0]}",
    ]
    finish(start(command, tmp_path, tmp_path / "out.txt", PROFILE="laptop"), tmp_path / "out.txt")
    run = tmp_path / "runs" / "reasoning"

    audited = subprocess.run(
        [python, "-m", "verl_mixed", "audit", run],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert audited.returncode == 0, audited.stdout
    assert ", ".join(f"{s} {STEPS * QUOTAS[s]}" for s in sorted(QUOTAS)) in audited.stdout
    metrics = read_lines(run / "metrics.jsonl")[-1]["metrics"]
    for source in QUOTAS:
        assert metrics[f"mixed/{source}/infra_error_rate"] == 0
        assert f"mixed/{source}/reward_parts/scorer_error" in metrics
