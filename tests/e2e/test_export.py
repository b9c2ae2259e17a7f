"""An export of a real run, against the weights that verl gathers itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.jobs import finish, job_of, start
from verl_mixed.commands.export import export
from verl_mixed.run.state import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.algorithm]


def test_what_two_ranks_trained_is_exported_bit_for_bit(demo: Path, tmp_path: Path) -> None:
    overrides = [
        "trainer.n_gpus_per_node=2",
        # verl then gathers the whole model from its ranks and saves it beside their shards
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.val_before_train=false",
    ]
    job = job_of("mixed_sync", demo, tmp_path, overrides, steps=2)
    out = tmp_path / "out"
    finish(start(job.command, tmp_path, out), out)

    made = export(RunFolder(job.folder))
    rounded = export(RunFolder(job.folder), dtype="bf16")

    assert made.name == "step_2-fp32"
    gathered = job.folder / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    theirs = load_file(gathered / "model.safetensors")
    ours = load_file(made / "model.safetensors")
    halves = load_file(rounded / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(halves[name], theirs[name].bfloat16()) for name in ours)
    before = load_file(demo / "model" / "model.safetensors")
    assert any(not torch.equal(ours[name], before[name]) for name in ours)

    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(demo / "model").get_vocab()
    assert tokenizer.chat_template
    ids = torch.tensor([tokenizer.encode("What is 2 + 3? <answer>")])
    of_export, of_trainer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (made, gathered)
    )
    assert torch.equal(of_export(ids).logits, of_trainer(ids).logits)
