"""The order in which a source gives its rows: a keyed permutation, computed, never stored.

Rows 0 .. size-1 are permuted by a Feistel network on just enough bits; results outside the range go
through again until they fall inside (cycle walking), which keeps it a bijection and takes less than
two rounds on average. Another key for each pass over the source gives another order. Statistical
quality is what training needs; it is no cipher.

Source: Luby & Rackoff 1988 (Feistel); Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains,
sec. 3 (cycle walking). The halves differ by one bit where the number of bits is odd, and the rounds
alternate between them.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def order_key(seed: int, source: str) -> int:
    """64-bit key of the source's orders: independent of which other sources there are."""
    digest = hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rows_of_draws(draws: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Row that each draw from a source gets.

    Draws k*size .. (k+1)*size - 1 are pass k: together they hold every row once, in an order of
    their own. (Sources of two or three rows have few orders; passes may then coincide.)

    Args:
        draws: (N,) how many draws from this source came before, >= 0.
        size: rows of the source, >= 1.
        key: `order_key` of the source.

    Returns:
        (N,) rows in 0 .. size-1.
    """
    passes, index = np.divmod(draws, size)
    if size == 1:
        return index
    pass_keys = _mix(passes.astype(np.uint64) * _GOLDEN + np.uint64(key))
    rows = _encipher(index.astype(np.uint64), size, pass_keys)
    outside = np.flatnonzero(rows >= size)
    while outside.size:
        rows[outside] = _encipher(rows[outside], size, pass_keys[outside])
        outside = outside[rows[outside] >= size]
    return rows.astype(np.int64)


def _encipher(
    values: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One trip through the network: a bijection on the least power of two >= `size` (and >= 16:
    on fewer bits the network favours some orders)."""
    bits = max(4, (size - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for _ in range(_ROUNDS // 2):
        keys = keys + _GOLDEN
        high = high ^ (_mix(low + keys) & high_mask)
        keys = keys + _GOLDEN
        low = low ^ (_mix(high + keys) & low_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over the output (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
