"""Whole prompts per source from fractional ratios, in exact `Fraction` arithmetic."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

MAX_DENOMINATOR = 10**6
"""A share that is a float's rounding of a fraction with at most this denominator means the
fraction: 0.3333333333333333 means 1/3."""

_SAME = Fraction(1, 10**14)
"""Largest relative difference between a float and the fraction that it means."""


def exact_shares(ratios: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    """Shares of the stream that `ratios` ask for, in their order, summing to exactly 1.

    A ratio means the decimal number that it prints as: 0.1 means 1/10 and not the binary float. If
    all shares are simple fractions up to the last digits of a float, they mean these fractions.

    Args:
        ratios: source -> relative ratio; finite, >= 0, not all zero. `MixturePlan` checks this.
    """
    whole, total = whole_shares(
        [
            ratio if isinstance(ratio, Fraction) else Fraction(str(ratio))
            for ratio in ratios.values()
        ]
    )
    return {source: Fraction(own, total) for source, own in zip(ratios, whole, strict=True)}


def whole_shares(ratios: Sequence[Fraction]) -> tuple[list[int], int]:
    """The shares of `exact_shares` as whole numbers without a common factor, and their sum."""
    unit = math.lcm(*(ratio.denominator for ratio in ratios))
    whole = [ratio.numerator * (unit // ratio.denominator) for ratio in ratios]
    common = math.gcd(*whole)
    whole = [own // common for own in whole]
    total = sum(whole)
    if total <= MAX_DENOMINATOR:
        return whole, total
    simple: list[Fraction] = []
    for own in whole:
        share = Fraction(own, total)
        simple.append(share.limit_denominator(MAX_DENOMINATOR))
        if abs(simple[-1] - share) > _SAME * share:
            return whole, total
    unit = math.lcm(*(share.denominator for share in simple))
    meant = [share.numerator * (unit // share.denominator) for share in simple]
    return (meant, unit) if sum(meant) == unit else (whole, total)


def apportion(shares: Mapping[str, Fraction], seats: int) -> dict[str, int]:
    """Divide `seats` prompts among sources in proportion to `shares`, which sum to 1.

    Largest-remainder method: each source gets the floor of its quota, then the largest fractional
    parts get one more each. Equal remainders go to the name that sorts first.

    Returns:
        source -> prompts; S entries in the order of `shares`, summing to `seats`.

    Raises:
        ValueError: `seats` is negative, or the shares are negative or do not sum to 1.

    Source: Balinski & Young, Fair Representation (2nd ed. 2001), ch. 3, method of Hamilton.
    """
    if seats < 0 or sum(shares.values()) != 1 or min(shares.values()) < 0:
        raise ValueError(
            f"cannot apportion seats={seats} by shares={dict(shares)}: "
            "seats must be >= 0 and shares >= 0 with sum 1; pass the result of exact_shares"
        )
    return rounded({source: seats * share for source, share in shares.items()})


def rounded(numbers: Mapping[str, Fraction]) -> dict[str, int]:
    """Whole numbers beside the given ones with the same sum, by the method of `apportion`.

    A sum that is no whole number is rounded.
    """
    found = {source: math.floor(number) for source, number in numbers.items()}
    lacking = round(sum(numbers.values())) - sum(found.values())
    by_remainder = sorted(numbers, key=lambda name: (found[name] - numbers[name], name))
    for source in by_remainder[:lacking]:
        found[source] += 1
    return found
