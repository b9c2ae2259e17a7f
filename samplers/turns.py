"""The order in which sources give prompts.

After any number of prompts, each source is within one prompt of its share. A prompt's place in the
order is called a turn.

Each turn of a source has a release and a deadline. The j-th turn of a source is released when the
source is first due more than j - 1 turns, and its deadline is when the source is first due j turns.
If every turn lies between its release and its deadline, each source is always within one turn of
what it is due. `Turns` gives each turn to the released turn with the earliest deadline. This meets
every deadline for any number of sources and any ratios, also if the ratios change. The simpler rule
"always serve the source that is furthest behind" is off by more than one turn from five sources on.

The order is computed in blocks. The state at the first turn of a block is its pin. A pin holds how
many turns each source has had. It is computed without the turns before it (`Turns._pin_after`), so
any part of the order can be computed without the rest. Two kinds of turns come before a pin: those
whose deadline has passed, which are all taken; and those that are released but not yet due. Of the
second kind, the free slots go to the turns with the earliest deadlines.

Example: sources a, b, c with shares 1/2, 1/3, 1/6 have the order a b a b a c. At a pin after 3
turns, a is due 1.5 turns, b 1 and c 0.5. The first turn of a and the first turn of b are due, so
both are taken, and one of the 3 slots is free. The second turn of a is released and has its
deadline after 4 turns; the first turn of c is released and has its deadline after 6. So a gets the
free slot, and the pin is (2, 1, 0).

Source: Tijdeman, The chairman assignment problem, Discrete Math. 32 (1980), states the problem and
the bound; the windows are those of Steiner & Yeomans, Management Science 39 (1993).
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Turns that are computed at a time, in about 3 ms."""

MAX_PERIOD = 2**20
"""An order that repeats after at most this many turns is stored completely (2 MiB)."""

_KEPT_BLOCKS = MAX_PERIOD // BLOCK

_INT64_LIMIT = 2**62

Counts = tuple[int, ...]
"""(S,) whole numbers, one per source."""


class Dues:
    """What each source is due after any number of turns.

    Args:
        knots: step -> (S,) weight of each source from there on, >= 0, with the same sum at every
            knot; in order of steps, the first at 0. Weights change linearly between two knots.
        turns_per_step: turns in one step; all of one step have the same weights.
    """

    def __init__(self, knots: Mapping[int, Counts], turns_per_step: int) -> None:
        self.turns_per_step = turns_per_step
        self._steps = list(knots)
        lengths = [after - before for before, after in pairwise(self._steps)]
        finest = math.lcm(*lengths) if lengths else 1
        self.scale: int = sum(knots[0]) * finest
        """The unit of the dues: one whole turn is this number."""
        self._weights = [[weight * finest for weight in weights] for weights in knots.values()]
        self._slopes = [
            [(b - a) // length for a, b in zip(self._weights[i], self._weights[i + 1], strict=True)]
            for i, length in enumerate(lengths)
        ]
        self._slopes.append([0] * len(knots[0]))
        self._at_knots = [[0] * len(knots[0])]
        for i, length in enumerate(lengths):
            self._at_knots.append(self._within(i, length, 0))

    @property
    def is_constant(self) -> bool:
        return len(self._steps) == 1

    def weights(self, step: int) -> list[int]:
        """(S,) what each source is due in one turn of a step, in units of 1 / `scale`."""
        knot = bisect_right(self._steps, step) - 1
        steps = step - self._steps[knot]
        pairs = zip(self._weights[knot], self._slopes[knot], strict=True)
        return [weight + slope * steps for weight, slope in pairs]

    def after(self, turns: int) -> list[int]:
        """(S,) what each source is due after a number of turns, in units of 1 / `scale`."""
        step, rest = divmod(turns, self.turns_per_step)
        knot = bisect_right(self._steps, step) - 1
        return self._within(knot, step - self._steps[knot], rest)

    def curve(self, first: int, last: int) -> tuple[list[int], NDArray[Any]]:
        """What is due after each of `first` .. `last` turns.

        Returns:
            (S,) whole turns due after `first`; (S, last - first + 1) the dues less these whole
            turns, in units of 1 / `scale`, as 64-bit integers if they fit, else Python's integers.
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
        """The turns after which a source is first due `whole` turns; infinite if never."""
        target = whole * self.scale
        knot = bisect_right([dues[source] for dues in self._at_knots], target - 1) - 1
        low = self._steps[knot]
        if knot < len(self._steps) - 1:
            later = range(low + 1, self._steps[knot + 1])
            low += bisect_left(  # the last step of this piece that begins below the target
                later, target, key=lambda step: self.after(step * self.turns_per_step)[source]
            )
        missing = target - self.after(low * self.turns_per_step)[source]
        rate = self.weights(low)[source]
        return low * self.turns_per_step - (-missing // rate) if rate else math.inf

    def _within(self, knot: int, steps: int, rest: int) -> list[int]:
        """(S,) dues after `steps` steps and `rest` turns past a knot."""
        return [
            due
            + self.turns_per_step * (steps * weight + slope * (steps * (steps - 1) // 2))
            + rest * (weight + slope * steps)
            for due, weight, slope in zip(
                self._at_knots[knot], self._weights[knot], self._slopes[knot], strict=True
            )
        ]


class Turns:
    """The order of turns. Its methods are functions of their arguments; results are cached.

    Unless one period of the order is stored, the pins up to a turn are computed on first use, about
    ten million turns a second, and stored with one byte per source and block.
    """

    def __init__(self, dues: Dues) -> None:
        self._dues = dues
        self._sources = len(dues.after(0))
        self._period: int | None = None
        self._repeats = 1
        """A short order is repeated this many times to fill one block."""
        if dues.is_constant:
            period = dues.scale // math.gcd(*dues.weights(0))
            if period <= MAX_PERIOD:
                self._repeats = -(-BLOCK // period)
                self._period = period * self._repeats
        self._block = BLOCK if self._period is None or self._repeats == 1 else self._period
        self._ahead = bytearray(self._sources)
        """For each pin and source: 1 if the source had one turn more than its whole dues."""
        self._blocks: dict[int, NDArray[np.int16]] = {}

    def had(self, turns: int) -> Counts:
        """(S,) how many of the first `turns` turns each source had."""
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
        """(last - first,) source of each of the turns `first` .. `last` - 1."""
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
        """(S,) the pin of a block: how many turns each source had before it."""
        sources = self._sources
        while len(self._ahead) <= block * sources:
            done = len(self._ahead) // sources - 1
            first, last = done * self._block, self._end_of(done)
            after = self._pin_after(first, last, self._pin(done))
            self._ahead.extend(a - b for a, b in zip(after, self._whole(last), strict=True))
        ahead = self._ahead[block * sources : (block + 1) * sources]
        return tuple(a + b for a, b in zip(self._whole(block * self._block), ahead, strict=True))

    def _pin_after(self, first: int, last: int, had: Counts) -> list[int]:
        """(S,) turns each source had after `last`, given those it had after `first`.

        At most one turn of each source is released and not yet due. A turn can only have a slot
        after its release, so at each slot `slack` counts the slots from there to `last` less the
        taken turns that are released there or later; a turn is taken if all these counts stay >= 0.
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
        assert spare == 0, "every slot is taken"
        return taken

    def _turns_of(self, block: int) -> NDArray[np.int16]:
        """(turns of the block,) the source of each."""
        found = self._blocks.get(block)
        if found is None:
            if self._repeats > 1 and self._period is not None:
                once = self._period // self._repeats
                found = np.tile(
                    self._serve(0, once, self._pin(0), self._whole(once)), self._repeats
                )
            else:
                first, last = block * self._block, self._end_of(block)
                after = self._whole(last) if last == self._period else self._pin(block + 1)
                found = self._serve(first, last, self._pin(block), after)
            if len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = found
        return found

    def _whole(self, turns: int) -> Counts:
        """(S,) whole turns due."""
        return tuple(due // self._dues.scale for due in self._dues.after(turns))

    def _serve(self, first: int, last: int, had: Counts, after: Sequence[int]) -> NDArray[np.int16]:
        """(last - first,) sources of one block, by earliest deadline among the released turns."""
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
