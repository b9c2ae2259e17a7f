"""Keys and values of sequences: those being decoded, and finished ones whose prefix comes again.

A sequence that is decoded has a slot, filled from the left, in one buffer of all layers. A finished
one leaves a copy of its own, found again by its tokens: the other trajectories of a group begin
with its prompt, and the next turn of a trajectory with its prompt and answer.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

_BLOCK = 16
"""Tokens of a prefix are looked up this many at a time; shorter prefixes are not shared."""


class Slots:
    """Keys and values of sequences being decoded, with room that grows as it is needed.

    Args:
        layers: of the model.
        heads: key-value heads of each.
        head_dim: width of a head.
        dtype: the model's.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = layers, heads, head_dim
        self._dtype = dtype
        self.clear()

    def clear(self) -> None:
        """Give the memory back."""
        layers, heads, head_dim = self._shape
        # (layers, keys and values, slots, heads, tokens, head_dim)
        self.buffer = torch.zeros((layers, 2, 0, heads, 0, head_dim), dtype=self._dtype)

    @property
    def room(self) -> tuple[int, int]:
        """Slots, and tokens in each."""
        return self.buffer.shape[2], self.buffer.shape[4]

    def make_room(self, slots: int, tokens: int) -> None:
        """Have at least so many; what is there stays."""
        had_slots, had_tokens = self.room
        if slots <= had_slots and tokens <= had_tokens:
            return
        if slots > had_slots:
            slots = max(slots, had_slots * 3 // 2)
        if tokens > had_tokens:
            tokens = max(tokens + 63, had_tokens * 3 // 2) // 64 * 64
        layers, heads, head_dim = self._shape
        # Zeros, not what lay there: the attention weight of unused room is 0, and 0 * NaN is NaN.
        wider = torch.zeros(
            (layers, 2, max(slots, had_slots), heads, max(tokens, had_tokens), head_dim),
            dtype=self._dtype,
        )
        wider[:, :, :had_slots, :, :had_tokens] = self.buffer
        self.buffer = wider

    def copied(self, slot: int, length: int) -> torch.Tensor:
        """(layers, 2, heads, length, head_dim): the first tokens of a slot, as a copy."""
        return self.buffer[:, :, slot, :, :length].clone()

    def fill(self, slot: int, stored: torch.Tensor) -> None:
        """Begin a slot with what `copied` gave."""
        self.buffer[:, :, slot, :, : stored.shape[3]] = stored

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot to another."""
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]


@dataclass(eq=False, slots=True)
class Known:
    """A sequence whose keys and values are at hand: in a slot, or stored."""

    token_ids: Sequence[int]
    slot: int | None = None
    """None where it is stored, or before its slot is decided."""

    stored: torch.Tensor | None = None
    blocks: list[int] = field(default_factory=list)
    """What it is found by."""


class PrefixCache:
    """Finds the sequence that shares the longest prefix with a new one.

    Args:
        size_bytes: what all stored sequences may take; those not used for longest go first.
            0 shares nothing, not even between sequences being decoded.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._stored: OrderedDict[Known, None] = OrderedDict()  # least recently used first
        self._by_block: dict[int, dict[Known, None]] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def longest(self, token_ids: Sequence[int], limit: int) -> tuple[Known | None, int]:
        """The sequence that shares most tokens with the beginning of `token_ids`.

        Args:
            token_ids: of the new sequence.
            limit: share at most so many.

        Returns:
            The sequence, or None where no block is shared; and how many tokens it shares.
        """
        if not self._by_block:
            return None, 0
        for block in reversed(list(_blocks(token_ids[:limit]))):
            if found := self._by_block.get(block):
                known, shared = max(
                    ((each, _shared(each.token_ids, token_ids, limit)) for each in found),
                    key=lambda candidate: candidate[1],
                )
                if shared:
                    if known in self._stored:
                        self._stored.move_to_end(known)
                    return known, shared
        return None, 0

    def add(self, known: Known) -> None:
        """Let a sequence be found by the tokens it has now."""
        if not self.size_bytes:
            return
        self._forget(known)
        known.blocks = list(_blocks(known.token_ids))
        for block in known.blocks:
            self._by_block.setdefault(block, {})[known] = None

    def store(self, known: Known, stored: torch.Tensor) -> None:
        """Keep a sequence that gives up its slot; what is a prefix of it is kept no longer."""
        known.slot, known.stored = None, stored
        self.add(known)
        for older in list(self._by_block.get(known.blocks[0], ()) if known.blocks else ()):
            length = len(older.token_ids)
            if older in self._stored and older.token_ids == known.token_ids[:length]:
                self.remove(older)
        if not known.blocks or stored.nbytes > self.size_bytes:
            self._forget(known)
            return
        self._stored[known] = None
        self.used_bytes += stored.nbytes
        while self.used_bytes > self.size_bytes:
            self.remove(next(iter(self._stored)))

    def remove(self, known: Known) -> None:
        """Let a sequence no longer be found."""
        self._forget(known)
        if known in self._stored:
            del self._stored[known]
            assert known.stored is not None
            self.used_bytes -= known.stored.nbytes

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._stored.clear()
        self._by_block.clear()
        self.used_bytes = 0

    def _forget(self, known: Known) -> None:
        for block in known.blocks:
            if found := self._by_block.get(block):
                found.pop(known, None)
                if not found:
                    del self._by_block[block]
        known.blocks = []


def _blocks(token_ids: Sequence[int]) -> Iterator[int]:
    """A number for each whole block and all before it; who finds by it compares the tokens too."""
    number = 0
    for end in range(_BLOCK, len(token_ids) + 1, _BLOCK):
        number = hash((number, *token_ids[end - _BLOCK : end]))
        yield number


def _shared(ours: Sequence[int], theirs: Sequence[int], limit: int) -> int:
    """How many tokens two sequences have in common at their beginning, at most `limit`."""
    limit = min(limit, len(ours), len(theirs))
    if ours[:limit] == theirs[:limit]:
        return limit
    return next(place for place in range(limit) if ours[place] != theirs[place])
