"""The shares of the sources at the entries of their schedules, as whole numbers of parts.

A prompt is divided into equal parts. The share of a source is the number of parts that it is due of
each prompt. All sums of shares are then whole numbers, however many prompts a run has.

If a multiple of the batch size up to `MAX_PARTS` makes all shares and all their changes per step
whole numbers, it is the number of parts and nothing is rounded. Otherwise, the number of parts is
the largest multiple of the batch size up to `MAX_PARTS`, and each share is rounded to one of the
two whole numbers beside it. A share that is a whole number of parts stays as it is. So a source
whose quota is a whole number of prompts in all batches keeps this quota, whatever the other ratios
are. docs/mixture.md has the proof.

Example: ratios 0.1, 0.3, 0.6 and batches of 10 give 10 parts, and shares of 1, 3 and 6 parts.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from samplers.apportionment import exact_shares

MAX_PARTS = 2**40
"""A rounded share is less than one part, 2 / `MAX_PARTS` at most, from the exact share."""

_EXACT_BITS = 256
"""Ratios whose common denominator is longer than this have no exact shares: adding fractions of
many bits takes seconds, and their shares would not fit `MAX_PARTS`."""

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
        self.exact: dict[int, dict[str, Fraction]] | None = None
        """Step -> source -> share; None if shares are rounded."""
        self.parts: int = parts or 0
        """Parts of a prompt."""
        if not parts:
            self.parts, self.exact = self._divide(batch_size, math.inf if parts == 0 else MAX_PARTS)
        self._entries = [(list(own), list(own.values())) for own in self.ratios.values()]

    def __getitem__(self, step: int) -> tuple[int, ...]:
        if self.exact is not None:
            return tuple(int(share * self.parts) for share in self.exact[step].values())
        return self._rounded(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def most(self, prompts: int) -> dict[str, Fraction | float]:
        """Source -> most of `prompts` prompts that it is due at any step.

        The numbers are exact, or differ from the exact ones so little that the next whole number
        above both is the same. At 1,000 entries, floats are 1,000 times as fast as fractions.
        """
        top = max(max(own.values()) for own in self.ratios.values())
        if self.exact is not None or len(self.steps) == 1 or top.bit_length() > _FLOAT_BITS:
            of_sources = zip(*(self[step] for step in self.steps), strict=True)
            most = [Fraction(max(own) * prompts, self.parts) for own in of_sources]
            return dict(zip(self.ratios, most, strict=True))
        steps = np.array(self.steps)
        ratios = np.empty((len(self.ratios), len(steps)))
        for own, (knots, values) in zip(ratios, self._entries, strict=True):
            places = [*np.searchsorted(steps, knots).tolist(), len(steps)]
            own[places[-2] :] = values[-1] / top
            own[: places[0]] = values[0] / top
            for k, length in enumerate(np.diff(knots).tolist()):
                here = slice(places[k], places[k + 1])
                slope = (values[k + 1] - values[k]) / (length * top)
                own[here] = values[k] / top + slope * (steps[here] - knots[k])
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
            own = {name: {step: exact[step][name] for step in exact} for name in self.ratios}
        return {
            name: {str(step): str(ratio) for step, ratio in ratios.items()}
            for name, ratios in own.items()
        }

    def _divide(
        self, batch_size: int, limit: float
    ) -> tuple[int, dict[int, dict[str, Fraction]] | None]:
        """(parts of a prompt, exact shares or None if they do not fit)"""
        unit, before = batch_size if batch_size <= limit else 1, 0
        exact: dict[int, dict[str, Fraction]] = {}
        for step in self.steps:
            ratios = {
                name: Fraction(*_ratio_at(list(own), list(own.values()), step))
                for name, own in self.ratios.items()
            }
            common = math.lcm(*(ratio.denominator for ratio in ratios.values()))
            if limit < math.inf and common.bit_length() > _EXACT_BITS:
                return _multiple(unit, limit), None
            exact[step] = exact_shares(ratios)
            slopes = [
                (share - exact[before][name]) / max(1, step - before)
                for name, share in exact[step].items()
            ]
            for wanted in _denominators([*exact[step].values(), *slopes]):
                if math.lcm(unit, wanted) > limit:
                    return _multiple(unit, limit), None
                unit = math.lcm(unit, wanted)
            before = step
        return unit, exact

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
    entries = [(list(own), list(own.values())) for own in _whole(schedules).values()]
    steps = sorted({0}.union(*schedules.values()))
    return [step for step in steps if not any(_ratio_at(*own, step)[0] for own in entries)]


def _whole(schedules: Mapping[str, Mapping[int, float | Fraction]]) -> dict[str, dict[int, int]]:
    """The ratios as whole numbers without a common factor, in order of names and steps."""
    exact = {
        name: {step: Fraction(str(schedules[name][step])) for step in sorted(schedules[name])}
        for name in sorted(schedules)
    }
    unit = math.lcm(*(ratio.denominator for own in exact.values() for ratio in own.values()))
    whole = {
        name: {step: ratio.numerator * (unit // ratio.denominator) for step, ratio in own.items()}
        for name, own in exact.items()
    }
    common = math.gcd(*(ratio for own in whole.values() for ratio in own.values())) or 1
    return {
        name: {step: ratio // common for step, ratio in own.items()} for name, own in whole.items()
    }


def _ratio_at(steps: Sequence[int], ratios: Sequence[int], step: int) -> tuple[int, int]:
    """(numerator, denominator) of a schedule's ratio at a step."""
    after = bisect_right(steps, step)
    low = ratios[max(0, after - 1)]
    if not 0 < after < len(steps):
        return low, 1
    length = steps[after] - steps[after - 1]
    return low * length + (ratios[after] - low) * (step - steps[after - 1]), length


def _multiple(unit: int, limit: float) -> int:
    """The largest multiple of `unit` up to `limit`."""
    return int(limit) // unit * unit


def _denominators(shares: Iterable[Fraction]) -> list[int]:
    return sorted({share.denominator for share in shares})
