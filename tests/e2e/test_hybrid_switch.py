"""verl's switch of training devices to rollout, on the real trainer and two engines on a CPU."""

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.jobs import QUOTAS, finish, job_of, start
from tests.e2e.test_training import SEPARATE
from tests.json_lines import read_lines

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.algorithm,
    pytest.mark.timeout(900),
]

STEPS = 3
SWITCH = "trainer.v1.separate_async.hybrid_rollout"


def test_training_devices_generate_between_steps_and_batches_stay_exact(
    demo: Path, tmp_path: Path
) -> None:
    settings = [
        *SEPARATE,
        # nothing is ahead of the trainer, so the end of the first step lends its device for sure
        "trainer.v1.separate_async.num_warmup_batches=0",
        f"{SWITCH}.enable_switch=true",
        # 8 of 10 groups: one mini-batch and a part of the next
        f"{SWITCH}.switch_threshold_ratio=0.8",
        f"{SWITCH}.adaptive_switch_threshold=false",
    ]
    job = job_of("switch", demo, tmp_path, settings, STEPS)

    printed = finish(start(job.command, job.work, job.work / "out.txt"), job.work / "out.txt")

    assert "every batch as planned, nothing skipped, nothing twice" in printed
    trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
    for step in range(1, STEPS + 1):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS
    lines = read_lines(job.folder / "metrics.jsonl")
    first, *later = (line["metrics"] for line in lines if line["step"])
    assert first["separate_async/decision/should_switch_to_rollout"] == 1
    assert first["separate_async/decision/remaining"] == 8
    assert first["timing_s/switch_to_rollout"] > 0
    for metrics in (first, later[0]):  # both steps began with lent devices, and got them back
        assert metrics["timing_s/switch_wait"] > 0 and metrics["timing_s/switch_to_trainer"] > 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
