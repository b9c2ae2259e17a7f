"""Sampling of tokens from logits, with random numbers that depend on the request only.

The random number of a token is a function of its request's seed and of its place in the sequence.
So it does not depend on other requests, nor on interruptions. Such a generator is called
counter-based; this one is splitmix64 (Steele et al., Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cpu_engine.stop_strings import BROKEN

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request, with vLLM's names and meanings."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its log-prob is the unscaled model's."""

    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""

    stop_token_ids: frozenset[int] = frozenset()
    """Sampling ends after one of these or an end-of-sequence id. The id stays in the output."""

    stop: tuple[str, ...] = ()
    """Sampling ends after the token that completes one of these in the generated text. The token
    stays in the output whole, as with vLLM's `include_stop_str_in_output=True`."""

    seed: int | None = None
    """With the same seed the same tokens are sampled; None: the decoder makes a seed."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be >= 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        for text in self.stop:
            if not isinstance(text, str) or not text or BROKEN in text:
                raise ValueError(f"stop={self.stop!r} must hold texts: not empty, without U+FFFD")


def uniforms(
    seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """(B,): the random number of each seed at a place of its sequence, in [0, 1). The seeds are of
    `seed_from`, so that no two are a few steps apart."""
    mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def process_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Logits of the distribution that is sampled from.

    Args:
        logits: (B, V).
        temperature: (B,); rows with 0 are left unscaled.
        top_k: (B,), values < 1 keep all tokens.
        top_p: (B,) in (0, 1]; the smallest set of tokens whose mass reaches it is kept.

    Returns:
        (B, V) in float32, -inf where a token is filtered out.
    """
    scaled = logits.float()
    if bool(((temperature != 1) & (temperature > 0)).any()):
        scaled = scaled / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    vocabulary = scaled.shape[1]
    if bool((top_k > 0).any()):
        kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
        ordered = scaled.topk(int(kept[top_k > 0].max()), dim=1).values
        least = ordered.gather(1, (kept - 1).clamp(max=ordered.shape[1] - 1).unsqueeze(1))
        least = torch.where((top_k > 0).unsqueeze(1), least, -torch.inf)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=1, descending=True, stable=True)
        mass = ordered.softmax(dim=1)
        drop = (mass.cumsum(dim=1) - mass) >= top_p.unsqueeze(1)
        # With top_p=1 nothing may be dropped, but the sum may round to 1 before its last terms.
        drop &= (top_p < 1).unsqueeze(1)
        scaled = scaled.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return scaled


def draw(
    logits: torch.Tensor, greedy: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) token ids and (B,) their log-probs, from the logits (B, V) of `process_logits`.

    Args:
        greedy: (B,) whether the most likely token is taken.
        uniform: (B,) in [0, 1).
    """
    most, likeliest = logits.max(dim=1, keepdim=True)
    cumulative = (logits - most).exp().cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    sampled = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True)
    # If the product rounds to the total, the last token with any mass is taken.
    last = torch.searchsorted(cumulative, total)
    chosen = torch.where(greedy.unsqueeze(1), likeliest, torch.minimum(sampled, last))
    log_probs = logits.gather(1, chosen) - most - total.log()
    return chosen.squeeze(1), log_probs.squeeze(1)
