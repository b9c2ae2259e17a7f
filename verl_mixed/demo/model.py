"""The demo model: half a million parameters that use their tools, but not reliably.

A short supervised run imitates the teacher of `demo_teacher`. What reinforcement learning can
improve is then reliability. All rewards and curves of the demo come from training.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agent_loop.toolbox.own import SPECS
from agent_loop.turns.tags import all_tags
from config.schema import ToolConfig
from samplers.rows.sources import KINDS
from samplers.rows.sources.demo import make_demo, write_demo
from tool_server.sandbox import choose_sandbox
from tool_server.search import PassageIndex
from verl_mixed.demo.forms import CALL_TOKENS, CHAT_TEMPLATE
from verl_mixed.demo.made_folder import made_whole, read_note
from verl_mixed.demo.probe import LocalTools, sampled_rewards
from verl_mixed.demo.recipe import Recipe
from verl_mixed.demo.teacher import Teacher
from verl_mixed.demo.warm_start import Codec, encode_trace, train_tokenizer, warm_start

NOTE = "demo.json"
"""In a demo's folder: what it was made from. A folder without this file is no demo."""


class WarmStartError(RuntimeError):
    """After the supervised run a source's reward is too low for reinforcement learning."""


def prepare_demo(
    out_dir: Path | str,
    seed: int = 0,
    *,
    recipe: Recipe | None = None,
    threads: int = 1,
    progress: Callable[[str], None] = print,
) -> None:
    """Make data, corpus, tokenizer and warm-started model, unless they are made already.

    Args:
        out_dir: folder of the demo. Another demo there is replaced, all at once.
        seed: of the data, the weights and the supervised run.
        recipe: shape and length of the run.
        threads: for torch; on a shared core two are slower than one.
        progress: is called with lines that say what is being done.

    Raises:
        WarmStartError: a source stayed below `recipe.floor`.
        OSError: a file cannot be written, or the folder holds something that is no demo.
    """
    out_dir, recipe = Path(out_dir), recipe or Recipe()
    fingerprint = _fingerprint(recipe, seed)
    if read_note(out_dir / NOTE).get("fingerprint") == fingerprint:
        progress(f"demo seed={seed} found in {out_dir}")
        return
    with made_whole(out_dir, NOTE) as draft:
        probe = _make(draft, seed, recipe, threads, progress)
        made = {"fingerprint": fingerprint, "seed": seed, "probe": probe}
        (draft / NOTE).write_text(json.dumps(made, indent=2) + "\n")


def _make(
    folder: Path, seed: int, recipe: Recipe, threads: int, progress: Callable[[str], None]
) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(f"teacher:{seed}")
    data = make_demo(seed)
    write_demo(data, folder)
    index = PassageIndex.build(folder / "corpus.jsonl")
    config = ToolConfig(server_url="http://127.0.0.1")
    teacher = Teacher(data, config, index, recipe)
    traces = []
    for source, share in recipe.shares.items():
        tasks = data.train[source]
        for number in range(round(recipe.traces * share)):
            traces.append(teacher.trace(source, tasks[number % len(tasks)], rng))
    texts = [
        trace.messages[-1]["content"] + "".join(text for _, text in trace.parts) for trace in traces
    ]
    texts += [passage["contents"] for passage in data.corpus]
    texts += ["user assistant"]
    if set(recipe.forms.values()) != {"tags"}:
        texts += ["system", *(spec.line for spec in SPECS.values())]
        tokens, template = [*all_tags(config), *CALL_TOKENS], CHAT_TEMPLATE
        tokenizer = train_tokenizer(texts, tokens, recipe.vocabulary, template)
    else:
        tokenizer = train_tokenizer(texts, all_tags(config), recipe.vocabulary)
    codec = Codec(tokenizer)
    encoded = [encode_trace(trace, codec, recipe.context_weight) for trace in traces]
    model = _new_model(tokenizer, recipe)
    progress(
        f"demo seed={seed}: {len(traces)} traces, {len(tokenizer)} tokens, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    prompts = {
        source: [
            KINDS[source].to_row(task.record, split="train", index=i)
            for i, task in enumerate(data.train[source][-recipe.probe_prompts :])
        ]
        for source in recipe.shares
    }
    sandbox = choose_sandbox()

    def probe() -> dict[str, float]:
        model.eval()
        tools = LocalTools(index, sandbox)
        try:
            return asyncio.run(
                sampled_rewards(model, codec, tokenizer, prompts, tools, teacher.forms, seed)
            )
        finally:
            model.train()

    digits = [codec.encode(digit)[0] for digit in "0123456789"]
    reached = warm_start(model, encoded, digits, recipe, seed, probe, progress)
    weak = {name: value for name, value in reached.items() if value < recipe.floor}
    if weak:
        raise WarmStartError(
            f"warm start failed after {recipe.max_steps} steps: sampled reward {weak} is below "
            f"floor={recipe.floor}; run again with another seed (mixed.seed)"
        )
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    return reached


def _new_model(tokenizer: Any, recipe: Recipe) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


_MAKERS = ("forms", "model", "probe", "recipe", "teacher", "warm_start")
"""Modules beside this one that make the demo."""


def _fingerprint(recipe: Recipe, seed: int) -> str:
    """Changes with the recipe, the seed, and the source files that make the demo."""
    sources = [
        *(Path(__file__).with_name(f"{name}.py") for name in _MAKERS),
        Path(__file__).parents[2] / "samplers" / "rows" / "sources" / "demo.py",
    ]
    text = json.dumps([asdict(recipe), seed]) + "".join(path.read_text() for path in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
