"""The order of a source's rows: a keyed permutation for each pass, computed and not stored.

Rows 0 .. size-1 are permuted by a Feistel network, whose halves are a column and a place in the
column. A result outside the range goes through the network again until it is inside (cycle
walking). Small sources are shuffled completely instead, because a network with few bits prefers
some orders.

A row at the end of one pass and at the start of the next could be twice in one batch. So the rows
at the end of a pass are moved away from the start of the next pass. If a batch takes more than a
quarter of the source, the rows are shuffled within blocks that hold the same rows in every pass.

Source: Luby & Rackoff 1988 (Feistel); Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains,
sec. 3 and 4 (cycle walking, halves of any size).
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_STORED = 2**13  # sources with at most this many rows are shuffled completely
_GUARDED = 2**10
"""Rows at the end of a pass that are kept away from the start of the next pass; more for larger
batches, and at most a quarter of the source."""

_KEPT = 4  # passes whose rows stay in memory


def order_key(seed: int, source: str) -> int:
    """64-bit key of the source's orders; it does not depend on the other sources."""
    digest = hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class RowOrder:
    """The row of each draw from one source, as a function of the draw.

    Draws k*size .. (k+1)*size - 1 are pass k. A pass holds every row once, in its own order. (With
    two or three rows there are few orders, so two passes may have the same.) Any `share`
    consecutive draws have different rows, unless the source has fewer rows.

    Args:
        size: rows of the source, >= 1.
        share: most draws from the source in one batch.
        key: `order_key` of the source.
    """

    def __init__(self, size: int, share: int, key: int) -> None:
        self.size = size
        self._key = key
        self._guarded = min(size // 4, max(share, _GUARDED))
        self._in_blocks = share > max(1, self._guarded)
        # Within a block of this many rows, a row comes back at most block - 1 places early.
        self._block = size if share > size else min(size - share + 1, -(-size // 2))
        self._low_bits = (size - 1).bit_length() // 2
        self._columns = -(-size >> self._low_bits)
        self._kept: dict[tuple[str, int], NDArray[np.int64]] = {}

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """(count,) rows of the draws first .. first + count - 1."""
        pieces: list[NDArray[np.int64]] = []
        while count > 0:
            which, start = divmod(first, self.size)
            taken = min(count, self.size - start)
            pieces.append(self._of_pass(which, np.arange(start, start + taken)))
            first, count = first + taken, count - taken
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def rows_at(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) rows of any draws (N,), each >= 0."""
        passes, places = np.divmod(draws, self.size)
        rows = np.empty(len(draws), dtype=np.int64)
        for which in np.unique(passes).tolist():
            here = np.flatnonzero(passes == which)
            rows[here] = self._of_pass(which, places[here])
        return rows

    def _of_pass(self, which: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at the given places of one pass."""
        if self._in_blocks:
            return self._keep("blocks", which, self._shuffle_blocks)[places]
        rows = self._permute(which, places)
        if which and self._guarded and int(places.min()) < 3 * self._guarded:
            start = self._keep("start", which, self._guarded_start)
            early = np.flatnonzero(places < len(start))
            rows[early] = start[places[early]]
        return rows

    def _keep(
        self, what: str, which: int, make: Callable[[int], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Store a part of a pass; only the last few parts are kept."""
        if (what, which) not in self._kept:
            if len(self._kept) >= 2 * _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[what, which] = make(which)
        return self._kept[what, which]

    def _guarded_start(self, which: int) -> NDArray[np.int64]:
        """The first places of a pass, without the rows at the end of the previous pass.

        The swaps do not reach the end of the pass, so that end is as `_permute` has it.
        """
        guarded = self._guarded
        start = self._permute(which, np.arange(3 * guarded))
        ended = self._permute(which - 1, np.arange(self.size - guarded, self.size))
        just_had = np.isin(start, ended)
        away = np.flatnonzero(just_had[:guarded])
        stand_ins = guarded + np.flatnonzero(~just_had[guarded:])[: len(away)]
        start[away], start[stand_ins] = start[stand_ins], start[away]
        return start

    def _shuffle_blocks(self, which: int) -> NDArray[np.int64]:
        """A complete pass in blocks, which hold the same rows in every pass, in a new order."""
        rows = np.argsort(random_words(f"{self._key}", self.size), kind="stable")
        blocks = np.arange(self.size) // self._block
        return rows[np.lexsort((random_words(f"{self._key}/{which}", self.size), blocks))]

    def _shuffle(self, which: int) -> NDArray[np.int64]:
        """A complete pass of a small source."""
        return np.argsort(random_words(f"{self._key}/{which}", self.size), kind="stable")

    def _permute(self, which: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """One pass's permutation of 0 .. size-1."""
        if self.size <= _STORED:
            return self._keep("whole", which, self._shuffle)[places]
        word = np.uint32 if self.size <= 2**31 else np.uint64
        keys = random_words(f"{self._key}/{which}", _ROUNDS).astype(word)
        rows = self._encipher(places.astype(word), keys)
        outside = np.flatnonzero(rows >= self.size)
        while outside.size:
            again = self._encipher(rows[outside], keys)
            rows[outside] = again
            outside = outside[again >= self.size]
        return rows.astype(np.int64)

    def _encipher(self, values: NDArray[Any], keys: NDArray[Any]) -> NDArray[Any]:
        """The network once: a bijection on columns * 2**low_bits values."""
        word = values.dtype.type
        half, low_bits = word(values.itemsize * 4), word(self._low_bits)
        columns = word(self._columns)
        high, low = values >> low_bits, values & word((1 << self._low_bits) - 1)
        for turn in range(0, _ROUNDS, 2):
            move = _mix(low, keys[turn], half)
            move *= columns
            move >>= half  # 0 .. columns - 1
            high += move
            high = np.minimum(high, high - columns)  # the difference wraps where it is negative
            low ^= _mix(high, keys[turn + 1], half + half - low_bits)
        high <<= low_bits
        high |= low
        return high


def _mix(values: NDArray[Any], key: Any, shift: Any) -> NDArray[Any]:
    """(N,) a hash of each value, without its lowest `shift` bits.

    Source: multipliers and shifts of lowbias32 (Wellons, 2018), SplitMix64 (Steele et al. 2014).
    """
    word = values.dtype.type
    wide = word is np.uint64
    mixed = values + key
    mixed *= word(0xBF58476D1CE4E5B9 if wide else 0x7FEB352D)
    mixed ^= mixed >> word(27 if wide else 15)
    mixed *= word(0x94D049BB133111EB if wide else 0x846CA68B)
    mixed >>= shift
    return mixed


def random_words(text: str, count: int) -> NDArray[np.uint64]:
    """(count,) 64-bit words that depend only on the text."""
    digest = hashlib.shake_128(text.encode()).digest(8 * count)
    return np.frombuffer(digest, dtype=np.uint64)
