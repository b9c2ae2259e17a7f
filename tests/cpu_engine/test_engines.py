"""One scripted episode through real engines: same tokens, same masks, whoever stops at the tag.

The model is a transformer of a few thousand weights that has learnt one conversation by heart.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_loop.records.mask_audit import mask_problems
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.observation_style import inline_glue
from agent_loop.turns.tags import Action, ActionKind, Tags
from agent_loop.turns.turn_loop import (
    Budget,
    Generate,
    Generated,
    Observation,
    Rollout,
    Stop,
    run_turns,
)
from config.schema import ToolConfig
from cpu_engine.async_decoder import AsyncDecoder
from cpu_engine.decoder import BatchDecoder, Request
from cpu_engine.sampling import Sampling
from tests.fakes.engine import whole_of

CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
TAGS = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER))
PROMPT, FIRST, RESULT, LAST = "Q: 1+1\n", "<code>1+1</code>", "2 é", "<answer>2</answer>"
SCRIPT = f"{PROMPT}{FIRST}{CONFIG.start_state_marker}{RESULT}{CONFIG.end_state_marker}{LAST}"
WAYS = ("strings", "token_ids", "after")


def tokenizer_of(*, single: bool) -> Any:
    """Bytes as tokens; where `single`, each tag is one token besides."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<|end|>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tags = [tag for pair in TAGS.pairs.values() for tag in pair]
    if single:
        inner.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


@pytest.fixture(scope="module", params=[False, True], ids=["tags_in_bytes", "tags_as_tokens"])
def learnt(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Any, Any, Path]:
    """(model, tokenizer, folder of both): greedy decoding says the script."""
    tokenizer = tokenizer_of(single=request.param)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    script = [*tokenizer.encode(SCRIPT, add_special_tokens=False), tokenizer.eos_token_id]
    ids = torch.tensor([script])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    left = 1.0
    while left > 0.005:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left = loss.item()
    folder = tmp_path_factory.mktemp("learnt")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


def of_transformers(model: Any, tokenizer: Any, folder: Path, way: str) -> Generate:
    codec = HFCodec(tokenizer)
    decoder = BatchDecoder(
        model,
        eos_token_ids=[tokenizer.eos_token_id],
        seed=0,
        decode=codec.decode,
    )
    engine = AsyncDecoder(decoder)

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=frozenset(stop.token_ids if way == "token_ids" else ()),
            stop=stop.texts if way == "strings" else (),
        )
        done = await engine.generate(Request(prompt_ids=prompt_ids, sampling=sampling))
        return Generated(token_ids=done.token_ids, log_probs=done.log_probs)

    return generate


def of_vllm(model: Any, tokenizer: Any, folder: Path, way: str) -> Generate:
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    engine = _vllm_engine(vllm, str(folder))

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        params = vllm.SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=0,
            stop_token_ids=list(stop.token_ids) if way == "token_ids" else None,
            stop=list(stop.texts) if way == "strings" else None,
            include_stop_str_in_output=True,
        )
        prompt = {"prompt_token_ids": prompt_ids}
        done = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        ids = list(done.token_ids)
        log_probs = [at[i].logprob for at, i in zip(done.logprobs, ids, strict=True)]
        return Generated(token_ids=ids, log_probs=log_probs)

    return generate


_engines: dict[str, Any] = {}


def _vllm_engine(vllm: Any, folder: str) -> Any:
    if folder not in _engines:
        _engines[folder] = vllm.LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4
        )
    return _engines[folder]


async def episode(generate: Generate, tokenizer: Any) -> Rollout:
    codec = HFCodec(tokenizer)

    async def environment(action: Action) -> Observation:
        assert action.content == "1+1"
        return Observation(text=RESULT)

    return await run_turns(
        prompt_ids=codec.encode(PROMPT),
        generate=generate,
        environment=environment,
        language=TAGS,
        glue=inline_glue(codec, CONFIG.start_state_marker, CONFIG.end_state_marker),
        codec=codec,
        budget=Budget(max_turns=2, response_length=160),
        filler_id=tokenizer.eos_token_id,
    )


@pytest.mark.parametrize("engine", [of_transformers, of_vllm])
@pytest.mark.slow
async def test_a_scripted_episode_has_the_same_masks_whichever_engine_stops_it_however(
    engine: Callable[..., Generate], learnt: tuple[Any, Any, Path]
):
    model, tokenizer, folder = learnt
    codec = HFCodec(tokenizer)
    expected = codec.encode(SCRIPT)[len(codec.encode(PROMPT)) :]
    for way in WAYS:
        rollout = await episode(engine(model, tokenizer, folder, way), tokenizer)
        trajectory = rollout.trajectory
        assert rollout.answer == "2", (way, rollout.stop_reason, rollout.fault)
        assert trajectory.response_ids == expected
        record = whole_of(rollout)
        assert [s.text for s in record.segments if s.author == "model"] == [FIRST, LAST]
        assert mask_problems(record) == []
        assert sum(trajectory.response_mask) == len(codec.encode(FIRST)) + len(codec.encode(LAST))
