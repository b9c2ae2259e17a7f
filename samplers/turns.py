"""Who has the next turn: an order of sources in which no prefix strays by a whole prompt.

What a source is due is exact: integers over one common denominator (`Dues`). Its j-th turn may be
taken no earlier than the first moment at which more than j - 1 is due, and no later than the first
at which j is due in full; then after any i turns every source has had within one of what it is due.
Serving the earliest deadline among the turns whose time has come meets every deadline, for any
number of sources and any ratios, also changing ones (`Turns`). Always serving the source that is
furthest behind looks alike, and strays by more than one from five sources on.

The order is worked out in blocks. A block starts from the state at its first turn, its pin, and
the pins are found without the turns between them (`Turns._pin_after`): among the turns that may be
taken before a pin and need not be, those with the earliest deadlines for which a slot is left.

Source: Tijdeman, The chairman assignment problem, Discrete Math. 32 (1980), states the problem and
the bound; the windows are those of Steiner & Yeomans, Management Science 39 (1993).
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Turns worked out at a time; about 3 ms."""

MAX_PERIOD = 2**20
"""An order that repeats after at most so many turns is kept whole (2 MiB)."""

_KEPT_BLOCKS = MAX_PERIOD // BLOCK

_INT64_LIMIT = 2**62

Counts = tuple[int, ...]
"""(S,) whole numbers, one per source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knot:
    """Weights from one step on; between two knots they change linearly, after the last not."""

    step: int
    """First step with these weights; the first knot is at 0."""

    weights: Counts
    """(S,) weight of each source, >= 0; the same sum at every knot."""


class Dues:
    """What each source is due after any number of turns.

    Args:
        knots: in order of steps, the first at step 0.
        turns_per_step: turns in one step; all of one step have the same weights.
    """

    def __init__(self, knots: Sequence[Knot], turns_per_step: int) -> None:
        self.turns_per_step = turns_per_step
        self._steps = [knot.step for knot in knots]
        lengths = [after - before for before, after in pairwise(self._steps)]
        finest = math.lcm(*lengths) if lengths else 1
        self.scale: int = sum(knots[0].weights) * finest
        """What one turn adds to all sources together; a whole turn in the unit of the dues."""
        self._weights = [[weight * finest for weight in knot.weights] for knot in knots]
        self._slopes = [
            [(b - a) // length for a, b in zip(self._weights[i], self._weights[i + 1], strict=True)]
            for i, length in enumerate(lengths)
        ]
        self._slopes.append([0] * len(knots[0].weights))
        self._at_knots = [[0] * len(knots[0].weights)]
        for i, length in enumerate(lengths):
            self._at_knots.append(self._within(i, length, 0))

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same weights."""
        return len(self._steps) == 1

    def weights(self, step: int) -> list[int]:
        """(S,) what each source is due in one turn of a step, in units of 1 / `scale`."""
        knot = bisect_right(self._steps, step) - 1
        steps = step - self._steps[knot]
        pairs = zip(self._weights[knot], self._slopes[knot], strict=True)
        return [weight + slope * steps for weight, slope in pairs]

    def after(self, turns: int) -> list[int]:
        """(S,) what each source is due after so many turns, in units of 1 / `scale`."""
        step, rest = divmod(turns, self.turns_per_step)
        knot = bisect_right(self._steps, step) - 1
        return self._within(knot, step - self._steps[knot], rest)

    def curve(self, first: int, last: int) -> tuple[list[int], NDArray[Any]]:
        """What is due after each of `first` .. `last` turns.

        Returns:
            whole turns due after `first` (S,), and the dues without them, (S, last - first + 1) in
            units of 1 / `scale`: 64-bit integers where they fit, else Python's.
        """
        start = self.after(first)
        floors = [due // self.scale for due in start]
        steps = np.arange(first, last) // self.turns_per_step
        fits = self.scale * (last - first + 1) < _INT64_LIMIT
        curve = np.empty((len(start), last - first + 1), dtype=np.int64 if fits else object)
        for source, (due, floor) in enumerate(zip(start, floors, strict=True)):
            curve[source, 0] = due - floor * self.scale
        knots = np.searchsorted(self._steps, steps, side="right") - 1
        for knot in range(int(knots[0]), int(knots[-1]) + 1):
            here = np.flatnonzero(knots == knot)
            since = (steps[here] - self._steps[knot]).astype(curve.dtype)
            for source in range(len(start)):
                rate = self._weights[knot][source] + self._slopes[knot][source] * since
                curve[source, here + 1] = rate
        return floors, np.cumsum(curve, axis=1)

    def first_with(self, source: int, whole: int) -> float:
        """Turns after which a source is first due `whole` turns; infinite if never."""
        target = whole * self.scale
        knot = bisect_right([dues[source] for dues in self._at_knots], target - 1) - 1
        low = self._steps[knot]
        if knot < len(self._steps) - 1:  # the last step of this piece that ends below the target
            high = self._steps[knot + 1]
            while high - low > 1:
                middle = (low + high) // 2
                if self.after(middle * self.turns_per_step)[source] < target:
                    low = middle
                else:
                    high = middle
        missing = target - self.after(low * self.turns_per_step)[source]
        rate = self.weights(low)[source]
        return low * self.turns_per_step - (-missing // rate) if rate else math.inf

    def _within(self, knot: int, steps: int, rest: int) -> list[int]:
        """(S,) dues after so many steps and turns past a knot."""
        return [
            due
            + self.turns_per_step * (steps * weight + slope * (steps * (steps - 1) // 2))
            + rest * (weight + slope * steps)
            for due, weight, slope in zip(
                self._at_knots[knot], self._weights[knot], self._slopes[knot], strict=True
            )
        ]


class Turns:
    """The order of turns; functions of their arguments, with what was worked out kept.

    Where the order repeats after at most `MAX_PERIOD` turns, one period is kept and any turn costs
    the same. Otherwise the pins up to a turn are found on first use, about ten million turns a
    second, and kept: one byte per source and block.
    """

    def __init__(self, dues: Dues) -> None:
        self._dues = dues
        self._sources = len(dues.after(0))
        self._period: int | None = None
        self._laid = 1
        """Short periods laid end to end to make one."""
        if dues.is_constant:
            period = dues.scale // math.gcd(*dues.weights(0))
            if period <= MAX_PERIOD:
                self._laid = -(-BLOCK // period)
                self._period = period * self._laid
        self._block = BLOCK if self._period is None or self._laid == 1 else self._period
        self._ups = bytearray(self._sources)
        """For each pin and source: whether it had one turn more than it was due in whole turns."""
        self._blocks: dict[int, NDArray[np.int16]] = {}

    def had(self, turns: int) -> Counts:
        """(S,) how many of the first `turns` turns each source has."""
        cycles, rest = (0, turns) if self._period is None else divmod(turns, self._period)
        block, rest = divmod(rest, self._block)
        had = self._pin(block)
        if rest:
            inside = np.bincount(self._turns_of(block)[:rest], minlength=len(had))
            had = tuple(a + b for a, b in zip(had, inside.tolist(), strict=True))
        if cycles:
            whole = self._whole(turns - turns % (self._period or 1))
            had = tuple(a + b for a, b in zip(had, whole, strict=True))
        return had

    def between(self, first: int, last: int) -> NDArray[np.int16]:
        """(last - first,) source of each of the turns first .. last - 1."""
        pieces: list[NDArray[np.int16]] = []
        while first < last:
            place = first if self._period is None else first % self._period
            block, start = divmod(place, self._block)
            piece = self._turns_of(block)[start : start + last - first]
            pieces.append(piece)
            first += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int16)

    def _end_of(self, block: int) -> int:
        end = (block + 1) * self._block
        return end if self._period is None else min(end, self._period)

    def _pin(self, block: int) -> Counts:
        """(S,) turns had before a block."""
        sources = self._sources
        while len(self._ups) <= block * sources:
            done = len(self._ups) // sources - 1
            first, last = done * self._block, self._end_of(done)
            after = self._pin_after(first, last, self._pin(done))
            self._ups.extend(a - b for a, b in zip(after, self._whole(last), strict=True))
        ups = self._ups[block * sources : (block + 1) * sources]
        return tuple(a + b for a, b in zip(self._whole(block * self._block), ups, strict=True))

    def _pin_after(self, first: int, last: int, had: Counts) -> list[int]:
        """(S,) turns had after `last`, from those had after `first`.

        Every turn whose deadline has come was taken. Of those that may be taken and are not due
        yet, at most one per source, the earliest deadlines go first, as far as slots are left: of
        the turns released from some slot on, no more can be taken than there are slots from there.
        """
        scale = self._dues.scale
        floors, curve = self._dues.curve(first, last)
        whole = [floor + int(due) // scale for floor, due in zip(floors, curve[:, -1], strict=True)]
        ceiling = [
            floor - int(-due // scale) for floor, due in zip(floors, curve[:, -1], strict=True)
        ]
        taken = [max(a, b) for a, b in zip(whole, had, strict=True)]
        spare = last - sum(taken)
        slack = np.arange(last - first, 0, -1)
        for source, count in enumerate(taken):
            earlier = floors[source] - (-curve[source, :-1] // scale)
            slack -= np.maximum(count - np.maximum(earlier, had[source]), 0).astype(np.int64)
        waiting = [source for source, count in enumerate(taken) if count < ceiling[source]]
        waiting.sort(key=lambda source: (self._dues.first_with(source, ceiling[source]), source))
        for source in waiting:
            due = (ceiling[source] - 1 - floors[source]) * scale
            released = int(np.searchsorted(curve[source, 1:], due, side="right"))
            if spare and slack[: released + 1].min() > 0:
                slack[: released + 1] -= 1
                taken[source] += 1
                spare -= 1
        assert spare == 0, "every slot has a turn"
        return taken

    def _turns_of(self, block: int) -> NDArray[np.int16]:
        """(turns of the block,) the source of each."""
        found = self._blocks.get(block)
        if found is None:
            if self._laid > 1 and self._period is not None:
                once = self._period // self._laid
                found = np.tile(self._serve(0, once, self._pin(0), self._whole(once)), self._laid)
            else:
                first, last = block * self._block, self._end_of(block)
                after = self._whole(last) if last == self._period else self._pin(block + 1)
                found = self._serve(first, last, self._pin(block), after)
            if len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = found
        return found

    def _whole(self, turns: int) -> Counts:
        """(S,) whole turns due; all that is due where a period ends."""
        return tuple(due // self._dues.scale for due in self._dues.after(turns))

    def _serve(self, first: int, last: int, had: Counts, after: Sequence[int]) -> NDArray[np.int16]:
        """Earliest deadline first over one block, from one pin to the next."""
        scale, sources = self._dues.scale, self._sources
        floors, curve = self._dues.curve(first, last)
        releases: list[NDArray[np.int64]] = []
        ranks: list[NDArray[np.int64]] = []  # deadline, then source, as one number
        for source in range(sources):
            wholes = np.arange(had[source], after[source]) - floors[source]
            dues = wholes.astype(curve.dtype) * scale
            releases.append(np.searchsorted(curve[source, 1:], dues, side="right"))
            deadlines = np.searchsorted(curve[source, 1:], dues + scale, side="left")
            ranks.append(deadlines * sources + source)
        released, ranked = np.concatenate(releases), np.concatenate(ranks)
        order = np.argsort(released, kind="stable")
        upcoming = list(zip(released[order].tolist(), ranked[order].tolist(), strict=True))
        turns = np.empty(last - first, dtype=np.int16)
        ready: list[int] = []
        at = 0
        for turn in range(last - first):
            while at < len(upcoming) and upcoming[at][0] <= turn:
                heapq.heappush(ready, upcoming[at][1])
                at += 1
            turns[turn] = heapq.heappop(ready) % sources
        return turns
