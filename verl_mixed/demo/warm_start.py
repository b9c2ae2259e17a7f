"""Tokenizer and supervised run of the demo model.

Two parts of the loss decide whether a model of half a million parameters learns to read a tool's
answer at all: a small weight on prompt and tool tokens, and a copy drill (random tokens that
repeat). `Recipe` has both weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agent_loop.turns.codec import HFCodec
from verl_mixed.demo.recipe import Recipe
from verl_mixed.demo.teacher import Trace

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(
    texts: Sequence[str], tags: Sequence[str], size: int, chat_template: str = CHAT_TEMPLATE
) -> Any:
    """Byte-level BPE over words, in which every digit, space and tag is one token.

    Tags are added tokens that are not special, so that `decode(skip_special_tokens=True)` keeps
    them.

    Args:
        texts: what the merges are trained on.
        tags: tokens of their own.
        size: tokens in the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[A-Za-z]+|\s|[^\sA-Za-z\d]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size - len(tags),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = chat_template
    return fast


class Codec(HFCodec):
    """The tokenizer as `turn_loop` needs it, with the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._tokenizer = tokenizer

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        return self.encode(rendered)


def encode_trace(
    trace: Trace, codec: Codec, context_weight: float
) -> tuple[list[int], list[float]]:
    """(T,) token ids as a rollout would have them, and (T,) their loss weights."""
    ids = codec.prompt(trace.messages, trace.tools)
    weights = [context_weight] * len(ids)
    for from_model, text in trace.parts:
        tokens = codec.encode(text)
        ids += tokens
        weights += [1.0 if from_model else context_weight] * len(tokens)
    return ids, weights


def drill(rng: np.random.Generator, recipe: Recipe, digits: Sequence[int], size: int) -> np.ndarray:
    """Practice in copying: rows of 3 to 12 random tokens that repeat; int64 (drill_rows, 48)."""
    rows = []
    for row in range(recipe.drill_rows):
        period = int(rng.integers(3, 13))
        pool = np.asarray(digits) if row % 2 else np.arange(3, size)
        rows.append(np.resize(rng.choice(pool, period), 48))
    return np.stack(rows)


def warm_start(
    model: Qwen3ForCausalLM,
    encoded: Sequence[tuple[list[int], list[float]]],
    digits: Sequence[int],
    recipe: Recipe,
    seed: int,
    probe: Callable[[], dict[str, float]],
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Train on the traces until the probe of every source reaches `recipe.floor`.

    Args:
        model: is trained in place.
        encoded: traces, of `encode_trace`.
        digits: token ids of the ten digits, for every second row of the copy drill.
        recipe: steps and weights.
        seed: of the order of the traces, and of the drill.
        probe: gives source -> mean sampled reward; called every `probe_every` steps after
            `min_steps`.
        progress: is called with lines that say what is being done.

    Returns:
        The last probe, reached or not after `max_steps`.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(encoded)) for _ in range(recipe.passes)])
    reached: dict[str, float] = {}
    for step in range(recipe.max_steps):
        done = step / recipe.min_steps
        # A model that is below the floor at the end of the schedule gets a larger rate again.
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * done)) if done < 1 else 0.3
        warm = min(1.0, (step + 1) / recipe.warm_up_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * cosine
        rows = order[step * recipe.batch : (step + 1) * recipe.batch]
        loss = _imitation_loss(model, [encoded[i] for i in rows])
        copied = torch.from_numpy(drill(rng, recipe, digits, model.config.vocab_size))
        loss = loss + recipe.drill_weight * _drill_loss(model, copied)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        number = step + 1
        if number % recipe.probe_every == 0:
            progress(f"warm start step {number}/{recipe.min_steps} loss {loss.item():.3f}")
        if number >= recipe.min_steps and (number - recipe.min_steps) % recipe.probe_every == 0:
            reached = probe()
            shown = " ".join(f"{name} {value:.2f}" for name, value in reached.items())
            progress(f"warm start step {number}: sampled reward {shown}")
            if min(reached.values()) >= recipe.floor:
                break
    return reached


def _imitation_loss(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[float]]]
) -> torch.Tensor:
    """Weighted mean over the tokens of a batch.

    Rows go through the model in four parts, ordered by length, so that little is padding.
    """
    by_length = sorted(rows, key=lambda row: len(row[0]))
    quarter = math.ceil(len(rows) / 4)
    parts = [by_length[at : at + quarter] for at in range(0, len(rows), quarter)]
    total = sum(sum(weights[1:]) for _, weights in rows)
    return torch.stack([_summed_loss(model, part) for part in parts]).sum() / total


def _summed_loss(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[float]]]
) -> torch.Tensor:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    weights = torch.zeros((len(rows), width))
    for row, (tokens, token_weights) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = torch.tensor(token_weights)
    # Padding is on the right, so that a causal model needs no mask.
    logits = model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights[:, 1:].flatten()).sum()


def _drill_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, 12:-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 13:].flatten())
