"""Attention over the slots of `key_values`, for models of transformers that let it be replaced.

All new tokens of all sequences go through the model as one sequence, (1, T, ...), so nothing is
computed for padding. Only attention needs to know which token belongs to which sequence. The model
calls `attend` in each layer (transformers' AttentionInterface), with the keyword arguments of its
`forward`, of which `decoding` is the `Pass`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_over_slots"

CHUNK = 64
"""Keys that `_attend_invariant` reads at a time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Two or more new tokens of one sequence, at places [start, start + count)."""

    slot: int
    start: int
    count: int


@dataclass(slots=True, kw_only=True)
class Pass:
    """The new tokens of one pass through the model.

    First one token each of the sequences in slots 0, 1, ..., `singles` - 1, then the `chunks`. An
    `invariant` pass may have its tokens in any order, if those of one sequence are in their order.

    Example: slot 0 and 1 get one token, slot 2 a prompt of three. Then slots=[0, 1, 2, 2, 2],
    places=[17, 9, 0, 1, 2], singles=2, chunks=[Chunk(slot=2, start=0, count=3)].
    """

    buffer: torch.Tensor
    """Of `Slots`."""

    slots: torch.Tensor  # (T,)
    places: torch.Tensor  # (T,)
    copies: list[tuple[int, int, int]]
    """(source slot, target slot, tokens) of shared prefixes. A source comes before its targets."""

    singles: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    invariant: bool = False
    """Whether the bits of a token must not depend on the other tokens of the pass."""

    kept: int | None = None
    """Number of real tokens; the tokens after them are padding. None: all."""

    masks: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Masks of this pass, computed in the first layer and used in all."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    decoding: Pass | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(1, T, H, D): attention of one layer. Without `decoding` it is transformers' own.

    Args:
        query: (1, H, T, D).
        key: (1, H_kv, T, D) of the new tokens; key and value are written to their slots.

    Raises:
        ValueError: the model's attention has a softcap or sinks, which this function lacks.
    """
    if decoding is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    for name in ("softcap", "s_aux"):  # transformers' names for a cap of the scores, and for sinks
        if others.get(name) is not None:
            raise ValueError(f"cannot compute attention over slots with {name}: not supported")
    keys, values = decoding.buffer[module.layer_idx]  # pyright: ignore[reportArgumentType, reportCallIssue]
    real = decoding.kept
    slots, places = decoding.slots[:real], decoding.places[:real]
    keys[slots, :, places] = key[0].transpose(0, 1)[:real]
    values[slots, :, places] = value[0].transpose(0, 1)[:real]
    for source, target, count in decoding.copies:
        keys[target, :, :count] = keys[source, :, :count]
        values[target, :, :count] = values[source, :, :count]
    rows = query[0].transpose(0, 1)  # (T, H, D)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend_slots = _attend_invariant if decoding.invariant else _attend_batched
    return attend_slots(rows, keys, values, decoding, scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend_batched(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """(T, H, D): all sequences with one new token together, and each other sequence separately.

    The query heads that share a key-value head are laid out as queries of that head, so that keys
    and values are not repeated.
    """
    heads, width = keys.shape[1], keys.shape[3]
    grouped = (heads, rows.shape[1] // heads, width)
    outs: list[torch.Tensor] = []
    if batch.singles:
        mask = batch.masks.get(window)
        if mask is None:
            mask = batch.masks[window] = _mask(batch.places[: batch.singles] + 1, window, rows)
        outs.append(_attend_single(rows[: batch.singles], keys, values, mask, scaling))
    begin = batch.singles
    for chunk in batch.chunks:
        end = chunk.start + chunk.count
        mask = None
        if chunk.start or (window is not None and end > window):
            mask = batch.masks.get((chunk, window))
            if mask is None:
                lengths = torch.arange(chunk.start, end) + 1
                mask = batch.masks[chunk, window] = _mask(lengths, window, rows)
        queries = rows[begin : begin + chunk.count].reshape(chunk.count, *grouped)
        shared = (*grouped[:2], end, width)
        out = scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),  # (H_kv, H / H_kv, T, D)
            keys[chunk.slot, :, None, :end].expand(shared),
            values[chunk.slot, :, None, :end].expand(shared),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        outs.append(out.permute(2, 0, 1, 3).reshape(chunk.count, -1, width))
        begin += chunk.count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_single(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """(B, H, D): one token each of the sequences in slots 0 to B - 1, with a mask of (B, L)."""
    batch, heads, width = rows.shape[0], keys.shape[1], rows.shape[2]
    longest = mask.shape[1]
    if rows.dtype in (torch.bfloat16, torch.float16):  # this kernel sums in float32, bmm does not
        out = scaled_dot_product_attention(
            rows.reshape(batch, heads, -1, width),
            keys[:batch, :, :longest],
            values[:batch, :, :longest],
            attn_mask=mask[:, None, None],
            scale=scaling,
        )
        return out.reshape(batch, -1, width)
    # In float32 with a single query, the kernel above is slower than two products.
    pairs = rows.reshape(batch * heads, -1, width)
    keys = keys[:batch].flatten(0, 1)[:, :longest]
    values = values[:batch].flatten(0, 1)[:, :longest]
    masks = mask.repeat_interleave(heads, dim=0).unsqueeze(1)
    scores = torch.baddbmm(masks, pairs, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(dim=-1), values).view(batch, -1, width)


def _mask(lengths: torch.Tensor, window: int | None, rows: torch.Tensor) -> torch.Tensor:
    """(T, longest) in the dtype of `rows`: 0 where a token attends to a key, else -inf."""
    place = torch.arange(int(lengths.max()))
    seen = place < lengths.unsqueeze(1)
    if window is not None:
        seen &= place >= (lengths - window).unsqueeze(1)
    return rows.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def _attend_invariant(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """(T, H, D): the bits of a token depend on its sequence only, not on the rest of the pass.

    Keys are read in chunks of one size, and chunks are summed in the order of the sequence. A chunk
    that only a longer sequence of the pass needs adds exact zeros to the others.
    """
    heads, width = keys.shape[1], keys.shape[3]
    tokens = rows.shape[0]
    queries = rows.reshape(tokens, heads, -1, width)
    lengths = batch.places + 1
    place = torch.arange(CHUNK)
    scores: list[torch.Tensor] = []
    for begin in range(0, int(lengths.max()), CHUNK):
        part = keys[batch.slots, :, begin : begin + CHUNK]
        seen = place + begin < lengths.unsqueeze(1)
        if window is not None:
            seen &= place + begin >= (lengths - window).unsqueeze(1)
        score = torch.matmul(queries, part.transpose(2, 3)).float() * scaling
        scores.append(score.masked_fill_(~seen[:, None, None], -torch.inf))
    most = torch.stack([score.amax(dim=-1, keepdim=True) for score in scores]).amax(dim=0)
    total = torch.zeros_like(most)
    out = torch.zeros(queries.shape, dtype=torch.float32)
    for number, score in enumerate(scores):
        weights = (score - most).exp()
        total += weights.sum(dim=-1, keepdim=True)
        part = values[batch.slots, :, number * CHUNK : (number + 1) * CHUNK]
        out += torch.matmul(weights, part.float())
    return (out / total).to(rows.dtype).reshape(tokens, -1, width)
