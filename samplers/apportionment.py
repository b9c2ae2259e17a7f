"""Whole prompts per source from fractional ratios, exactly. Integer and `Fraction` arithmetic.

Three questions: which exact shares do these ratios mean (`exact_shares`), how many seats of one
batch does each source get (`apportion`), and in which order do sources take their turns so that no
prefix strays by a whole prompt (`assign_turns`).
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MAX_DENOMINATOR = 10**6
"""A share is the nearest fraction with at most this denominator: 0.3333333333333333 means 1/3."""


def exact_shares(ratios: Mapping[str, float]) -> dict[str, Fraction]:
    """Shares of the stream that `ratios` ask for, as fractions that sum to exactly 1.

    A ratio is read as the decimal that it prints as, so 0.1 means 1/10 and not the binary float.

    Args:
        ratios: source -> relative ratio; finite, >= 0, not all zero.

    Returns:
        source -> share; S entries in the order of `ratios`.

    Raises:
        ValueError: every broken rule at once.
    """
    problems = [
        f"ratio={ratio} of source={source!r} is not a finite number >= 0"
        for source, ratio in ratios.items()
        if not (math.isfinite(ratio) and ratio >= 0)
    ]
    if not problems and not any(ratios.values()):
        problems = ["no source has a ratio above 0"]
    if problems:
        raise ValueError(
            f"cannot share a batch by ratios={dict(ratios)}: {'; '.join(problems)}; "
            "give every source a finite ratio >= 0 and at least one above 0"
        )
    exact = {source: Fraction(str(ratio)) for source, ratio in ratios.items()}
    total = sum(exact.values())
    shares = {
        source: (ratio / total).limit_denominator(MAX_DENOMINATOR)
        for source, ratio in exact.items()
    }
    vanished = [source for source, ratio in exact.items() if ratio and not shares[source]]
    if vanished:
        raise ValueError(
            f"cannot share a batch by ratios={dict(ratios)}: the share of {vanished} is below "
            f"one in {MAX_DENOMINATOR}; raise it, or set it to 0 to leave the source out"
        )
    total = sum(shares.values())  # rounding each share may have moved the sum off 1
    return {source: share / total for source, share in shares.items()}


def apportion(shares: Mapping[str, Fraction], seats: int) -> dict[str, int]:
    """Divide `seats` prompts among sources in proportion to `shares`.

    Largest-remainder method: each source gets the floor of its quota, then the largest fractional
    parts get one more each. Equal remainders go to the name that sorts first.

    Args:
        shares: source -> share; S entries summing to 1.
        seats: prompts to divide, >= 0.

    Returns:
        source -> prompts; S entries in the order of `shares`, summing to `seats`.

    Raises:
        ValueError: `seats` is negative, or the shares are not shares of a whole.

    Source: Balinski & Young, Fair Representation (2nd ed. 2001), ch. 3, method of Hamilton.
    """
    if seats < 0 or sum(shares.values()) != 1 or min(shares.values()) < 0:
        raise ValueError(
            f"cannot apportion seats={seats} by shares={dict(shares)}: "
            "seats must be >= 0 and shares >= 0 with sum 1; pass the result of exact_shares"
        )
    counts = {source: math.floor(seats * share) for source, share in shares.items()}
    left = seats - sum(counts.values())
    by_remainder = sorted(shares, key=lambda name: (counts[name] - seats * shares[name], name))
    for source in by_remainder[:left]:
        counts[source] += 1
    return counts


def assign_turns(seats: Sequence[int]) -> NDArray[np.int16]:
    """Order of sources over one period of `sum(seats)` turns, as even as can be.

    After any number of turns i, also over repeated periods, source s has had within
    1 - 1 / (2S - 2) of its due i * seats[s] / sum(seats) turns (S sources with seats; 0 for one).
    Each turn goes to the source with the earliest deadline among those whose due has come. Always
    taking the source furthest behind looks alike but strays by more than 1 from five sources on.

    Args:
        seats: turns of each source in one period, >= 0, not all zero.

    Returns:
        (sum(seats),) index of the source that has each turn.

    Source: Tijdeman, The chairman assignment problem, Discrete Math. 32 (1980), theorem 1.
    """
    period = sum(seats)
    active = [source for source, own in enumerate(seats) if own]
    if len(active) == 1:
        return np.full(period, active[0], dtype=np.int16)
    # Time is counted so that every release and deadline is a whole number: one turn of source s
    # takes `step[s]` units, one turn of the stream `unit`. A turn is released when 1 / parts of it
    # is due and has its deadline 1 / parts before it is due in full.
    parts = 2 * len(active) - 2
    unit = math.lcm(*(seats[source] for source in active)) * parts
    step = {source: unit * period // seats[source] for source in active}
    waiting = [(step[source] // parts, source) for source in active]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    turns = np.empty(period, dtype=np.int16)
    now = 0
    for turn in range(period):
        now += unit
        while waiting and waiting[0][0] <= now:
            released, source = heapq.heappop(waiting)
            heapq.heappush(ready, (released + step[source] // parts * (parts - 2), source))
        deadline, source = heapq.heappop(ready)
        turns[turn] = source
        heapq.heappush(waiting, (deadline + 2 * (step[source] // parts), source))
    return turns
