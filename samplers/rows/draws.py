"""Sampling of rows by a hash of their ids, and a compact set of seen ids.

Whether a row is drawn depends on 64 bits of a hash of its id and a seed. The result is the same on
every machine, for any order of the rows and any other rows.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EVERY = np.uint64(2**64 - 1)
"""The largest digest; every row's digest is at or below it."""

_LEAST_MERGED = 1 << 16


class SeenIds:
    """A growing set of 64-bit digests, about 20 bytes each: a sorted array, and a set of the newest
    that is merged into the array."""

    def __init__(self, digests: NDArray[np.uint64]) -> None:
        self._sorted = np.sort(digests)
        self._recent: set[int] = set()
        self._new: list[int] = []

    def add(self, digests: NDArray[np.uint64]) -> list[bool]:
        """(len(digests),) whether each digest is new; adds them."""
        at = np.searchsorted(self._sorted, digests)
        is_old = np.zeros(len(digests), np.bool_)
        inside = at < len(self._sorted)
        is_old[inside] = self._sorted[at[inside]] == digests[inside]
        is_new: list[bool] = []
        for digest, old in zip(digests.tolist(), is_old.tolist(), strict=True):
            new = not old and digest not in self._recent
            is_new.append(new)
            if new:
                self._recent.add(digest)
                self._new.append(digest)
        if len(self._recent) > max(_LEAST_MERGED, len(self._sorted) // 8):
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]), kind="stable")
            self._recent.clear()
        return is_new

    def take_new(self) -> NDArray[np.uint64]:
        """The digests added since the last call."""
        new, self._new = np.array(self._new, np.uint64), []
        return new


def digests_of(row_ids: Sequence[str], purpose: str) -> NDArray[np.uint64]:
    """A 64-bit digest of each id, different for each purpose, and the same on every machine."""
    start = hashlib.blake2b(purpose.encode(), digest_size=8)
    parts: list[bytes] = []
    for name in row_ids:
        digest = start.copy()
        digest.update(name.encode())
        parts.append(digest.digest())
    return np.frombuffer(b"".join(parts), "<u8").astype(np.uint64)


def smallest(digests: NDArray[np.uint64], count: int) -> np.uint64:
    """The digest at or below which `count` digests lie; `EVERY` if there are at most `count`."""
    return np.partition(digests, count - 1)[count - 1] if count < len(digests) else EVERY
