"""The shares of the sources at the entries of their schedules, as whole numbers of parts.

A prompt is divided into equal parts. The share of a source is the number of parts that it is due of
each prompt. All sums of shares are then whole numbers, however many prompts a run has.

If a multiple of the batch size up to `MAX_PARTS` makes all shares and all their changes per step
whole numbers, it is the number of parts and nothing is rounded. Otherwise, and if there are more
than `MAX_EXACT` shares, the number of parts is the largest multiple of the batch size up to
`MAX_PARTS`, and each share is rounded to one of the two whole numbers beside it. A share that is a
whole number of parts stays as it is. So a source whose quota is a whole number of prompts in all
batches keeps this quota, whatever the other ratios are. docs/mixture.md has the proof.

Example: ratios 0.1, 0.3, 0.6 and batches of 10 give 10 parts, and shares of 1, 3 and 6 parts.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from samplers.apportionment import whole_shares

MAX_PARTS = 2**40
"""A rounded share is less than one part, 2 / `MAX_PARTS` at most, from the exact share."""

MAX_EXACT = 2**14
"""Sources times steps with an entry, up to which shares may be exact. Exact shares and their digest
take 5 us each, so 1,000 sources with 1,000 entries would take seconds at every start."""

_ROUNDED_BITS = 160
"""Binary places of a ratio where shares are rounded. The error of all places together is far below
1 / S of a part, for S sources; see `Shares._rounded`."""

_FLOAT_BITS = 900
"""Ratios that are longer whole numbers than this may be 0 or infinite as floats."""

_NEAR_WHOLE = 1e-5
"""Prompts by which the float of a quota differs from the quota at most, for less than a million
prompts; most of the difference is the rounding of shares."""


class Shares(Mapping[int, tuple[int, ...]]):
    """Step -> (S,) parts of each source, at each step where any schedule has an entry, and at 0.

    Sources are in the order of their names. The parts of all sources sum to `parts`.

    Args:
        schedules: source -> step -> ratio; as `MixturePlan` checks them.
        batch_size: prompts per batch.
        parts: parts of a prompt; None chooses; 0 takes as many as make all shares whole numbers,
            without a limit, as release 1.0.0 did.
    """

    def __init__(
        self,
        schedules: Mapping[str, Mapping[int, float | Fraction]],
        batch_size: int,
        parts: int | None = None,
    ) -> None:
        self.steps: list[int] = sorted({0}.union(*schedules.values()))
        self.ratios: dict[str, dict[int, int]] = _whole(schedules)
        """Source -> step -> ratio, as whole numbers without a common factor; both in order."""
        self.exact: dict[int, tuple[list[int], int]] | None = None
        """Step -> (S,) whole numbers in proportion to the shares, and their sum; None if shares
        are rounded."""
        self.parts: int = parts or 0
        """Parts of a prompt."""
        self._entries = [(list(own), list(own.values())) for own in self.ratios.values()]
        self._limit = MAX_PARTS if len(self.ratios) * len(self.steps) <= MAX_EXACT else 0
        if not parts:
            self.parts, self.exact = self._divide(
                batch_size, math.inf if parts == 0 else self._limit
            )

    @property
    def is_chosen(self) -> bool:
        """Whether None for `parts` gives these shares."""
        return self.exact is None or self.parts <= self._limit

    def __getitem__(self, step: int) -> tuple[int, ...]:
        if self.exact is None:
            return self._rounded(step)
        own, total = self.exact[step]
        return tuple(share * (self.parts // total) for share in own)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def most(self, prompts: int) -> dict[str, Fraction | float]:
        """Source -> most of `prompts` prompts that it is due at any step.

        If shares are rounded and change, the numbers are floats, because fractions take 1,000 times
        as long at 1,000 entries. A float that is near a whole number is replaced by the exact
        number at one step, that of the largest float. At another step, rounding may make a source
        due one part of a prompt more. So the number may lack up to `prompts` parts, and the next
        whole number above may be too low by one.
        """
        top = max(max(own.values()) for own in self.ratios.values())
        if self.exact is not None or len(self.steps) == 1 or top.bit_length() > _FLOAT_BITS:
            of_sources = zip(*(self[step] for step in self.steps), strict=True)
            most = [Fraction(max(own) * prompts, self.parts) for own in of_sources]
            return dict(zip(self.ratios, most, strict=True))
        ratios = np.array(
            [
                np.interp(self.steps, knots, [ratio / top for ratio in own])
                for knots, own in self._entries
            ]
        )
        quotas = ratios / ratios.sum(axis=0) * prompts
        most: list[Fraction | float] = quotas.max(axis=1).tolist()
        for source, place in enumerate(quotas.argmax(axis=1).tolist()):
            if round(most[source]) and abs(most[source] - round(most[source])) < _NEAR_WHOLE:
                parts = self[self.steps[place]][source]
                most[source] = Fraction(parts * prompts, self.parts)
        return dict(zip(self.ratios, most, strict=True))

    def description(self) -> dict[str, dict[str, str]]:
        """Source -> step -> exact share at every step of all schedules, or ratio if rounded."""
        own: Mapping[str, Mapping[int, int | Fraction]] = self.ratios
        if exact := self.exact:
            own = {
                name: {
                    step: Fraction(shares[source], sum_) for step, (shares, sum_) in exact.items()
                }
                for source, name in enumerate(self.ratios)
            }
        return {
            name: {str(step): str(ratio) for step, ratio in ratios.items()}
            for name, ratios in own.items()
        }

    def _divide(
        self, batch_size: int, limit: float
    ) -> tuple[int, dict[int, tuple[list[int], int]] | None]:
        """(parts of a prompt, exact shares or None if they do not fit)"""
        unit, before = batch_size, 0
        exact: dict[int, tuple[list[int], int]] = {}
        for step in self.steps if limit else ():
            ratios = [Fraction(*_ratio_at(*own, step)) for own in self._entries]
            own, total = exact[step] = whole_shares(ratios)
            last, last_total = exact[before]
            common = math.lcm(total, last_total)
            changes = [
                a * (common // total) - b * (common // last_total)
                for a, b in zip(own, last, strict=True)
            ]
            common *= max(1, step - before)
            unit = math.lcm(unit, total, common // math.gcd(common, *changes))
            if unit > limit:
                break
            before = step
        if unit <= limit:
            return unit, exact
        return MAX_PARTS // batch_size * batch_size, None

    def _rounded(self, step: int) -> tuple[int, ...]:
        """(S,) parts at a step: the whole number below, or for some sources the one above.

        The remainders of all sources sum to a whole number of parts. Each of these parts goes to
        one source, the largest remainders first. No share that is a whole number is changed,
        although the shares here have an error below 1 / S of a part. If the error is negative, the
        remainder of such a share is above 1 - 1 / S. If n sources have such remainders, these sum
        to more than n - 1, so there are n parts for them. If the error is positive, the remainder
        is below 1 / S. If m sources have a remainder of 1 / S or more, all remainders sum to less
        than m + 1, so no part is left for the others.
        """
        ratios = [
            (over << _ROUNDED_BITS) // under
            for over, under in (_ratio_at(*own, step) for own in self._entries)
        ]
        total = sum(ratios)
        split = [divmod(self.parts * own, total) for own in ratios]
        parts = [whole for whole, _ in split]
        by_remainder = sorted(range(len(split)), key=lambda source: -split[source][1])
        for source in by_remainder[: self.parts - sum(parts)]:
            parts[source] += 1
        return tuple(parts)


def steps_without_ratio(schedules: Mapping[str, Mapping[int, float | Fraction]]) -> list[int]:
    """The steps at which no source has a ratio above 0; schedules have entries >= 0."""
    if any(all(own.values()) for own in schedules.values()):
        return []
    steps = sorted({0}.union(*schedules.values()))
    places = {step: place for place, step in enumerate(steps)}
    has_ratio = np.zeros(len(steps), dtype=bool)
    for own in schedules.values():
        entries = [(places[step], own[step]) for step in sorted(own)]
        entries = [(0, entries[0][1]), *entries, (len(steps), entries[-1][1])]
        for (start, low), (end, high) in pairwise(entries):
            if low or high:  # then the ratio is above 0 at all steps between the two
                has_ratio[start + (not low) : end + bool(high)] = True
    return [step for step, has in zip(steps, has_ratio.tolist(), strict=True) if not has]


def _whole(schedules: Mapping[str, Mapping[int, float | Fraction]]) -> dict[str, dict[int, int]]:
    """The ratios as whole numbers without a common factor, in order of names and steps."""
    values = {ratio for own in schedules.values() for ratio in own.values()}
    exact = {ratio: Fraction(str(ratio)) for ratio in values}
    unit = math.lcm(*(ratio.denominator for ratio in exact.values()))
    whole = {given: ratio.numerator * (unit // ratio.denominator) for given, ratio in exact.items()}
    common = math.gcd(*whole.values()) or 1
    whole = {given: ratio // common for given, ratio in whole.items()}
    return {
        name: {step: whole[schedules[name][step]] for step in sorted(schedules[name])}
        for name in sorted(schedules)
    }


def _ratio_at(steps: Sequence[int], ratios: Sequence[int], step: int) -> tuple[int, int]:
    """(numerator, denominator) of a schedule's ratio at a step."""
    after = bisect_right(steps, step)
    low = ratios[max(0, after - 1)]
    if not 0 < after < len(steps):
        return low, 1
    length = steps[after] - steps[after - 1]
    return low * length + (ratios[after] - low) * (step - steps[after - 1]), length
