"""Draws that depend on a row's id and a seed alone, and a small set of the ids that were seen.

A row is drawn by 64 bits of a hash of its id: the same on every machine, whatever the order of the
rows and whichever others there are.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EVERY = np.uint64(2**64 - 1)
"""The largest digest: at or below it is every row."""

_LEAST_MERGED = 1 << 16


class SeenIds:
    """A set of 64-bit digests that only grows, of some 20 bytes each.

    Most are in a sorted array; the newest, up to an eighth, in a set that is merged into it.
    """

    def __init__(self, digests: NDArray[np.uint64]) -> None:
        self._sorted = np.sort(digests)
        self._recent: set[int] = set()
        self._new: list[int] = []

    def add(self, digests: NDArray[np.uint64]) -> list[bool]:
        """Which of some digests were not there; (len(digests),)."""
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
        """Those added since this was asked last."""
        new, self._new = np.array(self._new, np.uint64), []
        return new


def digests_of(row_ids: Sequence[str], purpose: str) -> NDArray[np.uint64]:
    """64 bits of each id, other ones for each purpose; the same on every machine."""
    start = hashlib.blake2b(purpose.encode(), digest_size=8)
    parts: list[bytes] = []
    for name in row_ids:
        digest = start.copy()
        digest.update(name.encode())
        parts.append(digest.digest())
    return np.frombuffer(b"".join(parts), "<u8").astype(np.uint64)


def smallest(digests: NDArray[np.uint64], count: int) -> np.uint64:
    """The digest at or below which `count` of some lie; `EVERY` where there are no more of them."""
    return np.partition(digests, count - 1)[count - 1] if count < len(digests) else EVERY
