"""LoRA on the real trainer: rollouts get merged weights, a run resumes, exports are its model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.commands.export import export
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.algorithm,
    pytest.mark.timeout(900),
]

COMMON = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.actor.optim.lr=5.0e-3",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.val_before_train=false",
    "ray_kwargs.ray_init.include_dashboard=false",
]
SEPARATE = [
    "trainer.v1.trainer_mode=mixed_separate_async",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp_store",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "ray_kwargs.ray_init.num_gpus=2",
]


def train(job: Job, name: str) -> list[dict[str, Any]]:
    """Run a job to its end; the metrics of its steps."""
    finish(start(job.command, job.work, job.work / name), job.work / name)
    return [line["metrics"] for line in read_lines(job.folder / "metrics.jsonl")]


def test_lora_trains_resumes_is_exported_and_goes_on_from_its_adapter(demo: Path, tmp_path: Path):
    ranks = [*COMMON, "trainer.n_gpus_per_node=2"]
    job = job_of("lora", demo, tmp_path, ranks, 2)
    assert len(train(job, "first.txt")) == 2
    longer = job_of("lora", demo, tmp_path, ranks, 4)
    steps = train(longer, "resumed.txt")

    assert len(steps) == 4
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in steps)
    # The reference policy is the base model: an adapter that is new says the same.
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert all(step["actor/kl_loss"] > 1e-3 for step in steps[1:])

    merged, adapter = (export(RunFolder(job.folder), adapter=alone) for alone in (False, True))
    base = load_file(demo / "model" / "model.safetensors")
    trained = load_file(merged / "model.safetensors")
    assert base.keys() == trained.keys()
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    assert changed == {name for name in base if "_proj." in name}  # all linear layers
    whole = AutoModelForCausalLM.from_pretrained(merged)
    on_base = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32), str(adapter)
    )
    ids = torch.arange(60).reshape(2, 30)
    torch.testing.assert_close(whole(ids).logits, on_base(ids).logits, rtol=0, atol=1e-4)

    shutil.copytree(adapter, tmp_path / "adapter")
    start_from = f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'adapter'}"
    apart = job_of("lora_apart", demo, tmp_path, [*COMMON, *SEPARATE, start_from], 2)
    first = train(apart, "apart.txt")[0]
    assert first["training/rollout_probs_diff_max"] < 1e-5
    assert first["actor/kl_loss"] > 1e-3  # the adapter is not new
