"""Keys and values of running sequences (`Slots`) and of finished ones (`PrefixCache`).

A running sequence has a slot, filled from the left, in one buffer of all layers. When it finishes,
its keys and values are copied into the cache. A new sequence finds them by its tokens: the other
trajectories of a group begin with the same prompt, and the next turn of a trajectory begins with
its prompt and answer.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

_BLOCK = 16
"""Prefixes are looked up in blocks of this many tokens; shorter prefixes are not shared."""


class Slots:
    """Keys and values of running sequences, in one buffer that grows. `heads` are the key-value
    heads of a layer."""

    def __init__(self, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = layers, heads, head_dim
        self._dtype = dtype
        self.clear()

    def clear(self) -> None:
        layers, heads, head_dim = self._shape
        # (layers, keys and values, slots, heads, tokens, head_dim)
        self.buffer = torch.zeros((layers, 2, 0, heads, 0, head_dim), dtype=self._dtype)

    def make_room(self, slots: int, tokens: int) -> None:
        """Grow to at least this many slots and tokens. The content stays."""
        had_slots, had_tokens = self.buffer.shape[2], self.buffer.shape[4]
        if slots <= had_slots and tokens <= had_tokens:
            return
        if slots > had_slots:
            slots = max(slots, had_slots * 3 // 2)
        if tokens > had_tokens:
            tokens = max(tokens + 63, had_tokens * 3 // 2) // 64 * 64
        layers, heads, head_dim = self._shape
        # Uninitialised memory may hold NaN. Unused room has attention weight 0, but 0 * NaN is NaN.
        wider = torch.zeros(
            (layers, 2, max(slots, had_slots), heads, max(tokens, had_tokens), head_dim),
            dtype=self._dtype,
        )
        wider[:, :, :had_slots, :, :had_tokens] = self.buffer
        self.buffer = wider

    def copied(self, slot: int, length: int) -> torch.Tensor:
        """(layers, 2, heads, length, head_dim): a copy of the first tokens of a slot."""
        return self.buffer[:, :, slot, :, :length].clone()

    def fill(self, slot: int, stored: torch.Tensor) -> None:
        """Write a result of `copied` into the first tokens of a slot."""
        self.buffer[:, :, slot, :, : stored.shape[3]] = stored

    def move(self, source: int, target: int, length: int) -> None:
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]


@dataclass(eq=False, slots=True)
class CachedSequence:
    """A sequence whose keys and values are in a slot or in the cache."""

    token_ids: Sequence[int]
    slot: int | None = None
    """None if it is in the cache, or has no slot yet."""

    stored: torch.Tensor | None = None
    blocks: list[int] = field(default_factory=list)
    """Hashes of its blocks, by which it is found."""


class PrefixCache:
    """Finds the sequence that shares the longest prefix with a new one.

    Args:
        size_bytes: memory of all stored sequences; the least recently used are removed first. With
            0 nothing is shared, not even between running sequences.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._stored: OrderedDict[CachedSequence, None] = OrderedDict()  # least recently used first
        self._by_block: dict[int, dict[CachedSequence, None]] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def longest_prefix(
        self, token_ids: Sequence[int], limit: int
    ) -> tuple[CachedSequence | None, int]:
        """The sequence that shares the most tokens with the beginning of `token_ids`, or None if no
        block is shared; and the number of shared tokens, at most `limit`."""
        if not self._by_block:
            return None, 0
        for block in reversed(list(_blocks(token_ids[:limit]))):
            if found := self._by_block.get(block):
                sequence, shared = max(
                    ((each, _shared(each.token_ids, token_ids, limit)) for each in found),
                    key=lambda candidate: candidate[1],
                )
                if shared:
                    if sequence in self._stored:
                        self._stored.move_to_end(sequence)
                    return sequence, shared
        return None, 0

    def add(self, sequence: CachedSequence) -> None:
        """Let a sequence be found by its current tokens."""
        if not self.size_bytes:
            return
        self._forget(sequence)
        sequence.blocks = list(_blocks(sequence.token_ids))
        for block in sequence.blocks:
            self._by_block.setdefault(block, {})[sequence] = None

    def store(self, sequence: CachedSequence, stored: torch.Tensor) -> None:
        """Store a sequence that loses its slot, and remove stored prefixes of the sequence."""
        sequence.slot, sequence.stored = None, stored
        self.add(sequence)
        for older in list(self._by_block.get(sequence.blocks[0], ()) if sequence.blocks else ()):
            length = len(older.token_ids)
            if older in self._stored and older.token_ids == sequence.token_ids[:length]:
                self.remove(older)
        if not sequence.blocks or stored.nbytes > self.size_bytes:
            self._forget(sequence)
            return
        self._stored[sequence] = None
        self.used_bytes += stored.nbytes
        while self.used_bytes > self.size_bytes:
            self.remove(next(iter(self._stored)))

    def remove(self, sequence: CachedSequence) -> None:
        """Let a sequence no longer be found."""
        self._forget(sequence)
        if sequence in self._stored:
            del self._stored[sequence]
            assert sequence.stored is not None
            self.used_bytes -= sequence.stored.nbytes

    def clear(self) -> None:
        """Forget everything, because the weights changed."""
        self._stored.clear()
        self._by_block.clear()
        self.used_bytes = 0

    def _forget(self, sequence: CachedSequence) -> None:
        for block in sequence.blocks:
            if found := self._by_block.get(block):
                found.pop(sequence, None)
                if not found:
                    del self._by_block[block]
        sequence.blocks = []


def _blocks(token_ids: Sequence[int]) -> Iterator[int]:
    """For each whole block a hash of all tokens up to its end; hashes may be equal by chance."""
    number = 0
    for end in range(_BLOCK, len(token_ids) + 1, _BLOCK):
        number = hash((number, *token_ids[end - _BLOCK : end]))
        yield number


def _shared(ours: Sequence[int], theirs: Sequence[int], limit: int) -> int:
    """Length of the common prefix of two sequences, at most `limit`."""
    limit = min(limit, len(ours), len(theirs))
    if ours[:limit] == theirs[:limit]:
        return limit
    return next(place for place in range(limit) if ours[place] != theirs[place])
