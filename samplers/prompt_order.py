"""The order in which sources give prompts.

After any number of prompts, each source is within one prompt of its share. A place in the order is
called a slot.

Each prompt of a source has a release and a deadline. The j-th prompt of a source is released when
the source is first due more than j - 1 prompts, and its deadline is when the source is first due j
prompts. If every prompt lies between its release and its deadline, each source is always within one
prompt of what it is due. `PromptOrder` gives each slot to the released prompt with the earliest
deadline. This meets every deadline for any number of sources and any ratios, also if the ratios
change. The simpler rule "always serve the source that is furthest behind" is off by more than one
prompt from five sources on.

The order is computed in blocks. The state at the first slot of a block is its pin. A pin holds how
many prompts each source has had. It is computed from the pin before it (`PromptOrder._pin_after`),
and a checkpoint holds one, so a resumed run computes no earlier part of the order. Two kinds of
prompts come before a pin: those whose deadline has passed, which are all taken; and those that are
released but not yet due. Of the second kind, the free slots go to the prompts with the earliest
deadlines.

Example: sources a, b, c with shares 1/2, 1/3, 1/6 have the order a b a b a c. At a pin after 3
slots, a is due 1.5 prompts, b 1 and c 0.5. The first prompt of a and the first prompt of b are due,
so both are taken, and one of the 3 slots is free. The second prompt of a is released and has its
deadline after 4 slots; the first prompt of c is released and has its deadline after 6. So a gets
the free slot, and the pin is (2, 1, 0).

Source: Tijdeman, The chairman assignment problem, Discrete Math. 32 (1980), states the problem and
the bound; the windows are those of Steiner & Yeomans, Management Science 39 (1993).
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Slots that are computed at a time, in about 4 ms."""

MAX_PERIOD = 2**20
"""An order that repeats after at most this many prompts is stored completely (2 MiB)."""

_KEPT_BLOCKS = MAX_PERIOD // BLOCK

_INT64_LIMIT = 2**62

_KEPT_PIECES = 64  # stretches between two knots that stay in memory

Counts = tuple[int, ...]
"""(S,) whole numbers, one per source."""

Numbers = NDArray[Any]
"""64-bit integers if they fit, else Python's integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The parts of a slot from one knot to the next, summed over the sources before each source."""

    length: int
    """Steps; 0 after the last knot."""

    starts: Numbers
    """(S + 1,) at the knot."""

    slopes: Numbers
    """(S + 1,) change in one step, rounded down."""

    rests: Numbers
    """(S + 1,) what the rounding leaves out in all steps together, 0 <= rest < length."""

    @property
    def is_flat(self) -> bool:
        return not (self.slopes.any() or self.rests.any())

    def at(self, step: Any, sums: Any = slice(None)) -> Numbers:
        """The sums `sums` at a step after the knot."""
        rests = self.rests[sums] * step // max(1, self.length)
        return self.starts[sums] + self.slopes[sums] * step + rests

    def until(self, steps: Any, sums: Any = slice(None)) -> Numbers:
        """The sums `sums` of `at` over the first steps after the knot."""
        if self.is_flat:
            return self.starts[sums] * steps
        rests = _floor_sum(steps, max(1, self.length), self.rests[sums])
        return self.starts[sums] * steps + self.slopes[sums] * (steps * (steps - 1) // 2) + rests


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is due during some slots, in stretches of slots with equal weights."""

    floors: NDArray[np.int64]
    """(S,) whole prompts due before the first slot; the other fields leave them out."""

    places: NDArray[np.int64]
    """(stretches + 1,) slots before each stretch, and all slots."""

    dues: Numbers
    """(stretches + 1, S) parts due before each stretch, and after the last."""

    scale: int
    """Parts of one whole prompt."""

    def first_with(
        self, sources: NDArray[np.int64], wholes: NDArray[np.int64], parts: int = 0
    ) -> NDArray[np.int64]:
        """(N,) the slot, from 0, after which each of some sources is first due a number of prompts.

        Args:
            sources: (N,) sources.
            wholes: (N,) whole prompts that each is to be due.
            parts: parts that each is to be due besides.

        Returns:
            The number of all slots for a source that is not due as much.
        """
        wanted = (wholes - self.floors[sources]).astype(self.dues.dtype) * self.scale + parts
        stretch = np.zeros(len(sources), dtype=np.int64)
        for dues in self.dues[1:]:
            stretch += dues[sources] < wanted
        inside = np.minimum(stretch, len(self.places) - 2)
        before, after = self.dues[inside, sources], self.dues[inside + 1, sources]
        length = self.places[inside + 1] - self.places[inside]
        rates = np.maximum((after - before) // length, 1)
        slots = -((before - wanted) // rates) - 1
        slots = np.minimum(np.maximum(slots, 0), self.places[-1]).astype(np.int64)
        return np.where(stretch > inside, self.places[-1], self.places[inside] + slots)


class Dues:
    """What each source is due after any number of prompts, as whole numbers of parts.

    Weights change linearly between two knots. The weights of one step are the differences of their
    sums over the sources up to each source, and each sum is rounded down. So the weights of a step
    are whole numbers >= 0 with the same sum at every step, each is less than one part from the
    line, and a weight that is a whole number on the line is this number.

    Args:
        knots: step -> (S,) parts of each source in each slot from there on, >= 0, with the same sum
            at every knot; in order of steps, the first at 0. It is asked for a knot when needed.
        prompts_per_step: prompts in one step; all of one step have the same weights.
    """

    def __init__(self, knots: Mapping[int, Sequence[int]], prompts_per_step: int) -> None:
        self.prompts_per_step = prompts_per_step
        self._knots, self._steps = knots, list(knots)
        first = knots[0]
        self.sources: int = len(first)
        self.scale: int = sum(first)
        """Parts of one whole prompt."""
        lengths = [after - before for before, after in pairwise(self._steps)]
        most = max([BLOCK + 1, prompts_per_step, *lengths])
        fits = max(self.scale, most) * most < _INT64_LIMIT
        self._type: Any = np.int64 if fits else object
        nothing = np.zeros(self.sources, dtype=np.int64)
        self._at_knots = {0: (nothing, nothing.astype(self._type))}
        """Number of a knot -> what was due there; the knots that were needed so far."""
        self._pieces: dict[int, _Piece] = {}
        self._last_sums: tuple[int, Numbers] = -1, nothing

    @property
    def is_constant(self) -> bool:
        return len(self._steps) == 1

    def weights(self, step: int) -> Numbers:
        """(S,) parts that each source is due in each slot of a step."""
        knot = self.knot_of(step)
        return np.diff(self._piece(knot).at(step - self._steps[knot]))

    def after(self, prompts: int) -> tuple[NDArray[np.int64], Numbers]:
        """(S,) whole prompts that each source is due after some slots, (S,) further parts."""
        step, rest = divmod(prompts, self.prompts_per_step)
        knot = self.knot_of(step)
        piece, steps = self._piece(knot), step - self._steps[knot]
        if piece.is_flat:
            whole, parts = self._times(
                np.diff(piece.starts), prompts - self._steps[knot] * self.prompts_per_step
            )
        else:
            whole, parts = self._times(np.diff(piece.until(steps)), self.prompts_per_step)
            parts = parts + rest * np.diff(piece.at(steps))
        return self._sum(self.at_knot(knot), (whole, parts))

    def window(self, first: int, last: int) -> Window:
        """What is due during the slots `first` .. `last` - 1."""
        floors, parts = self.after(first)
        places, dues = [0], [parts]
        while first < last:
            step = first // self.prompts_per_step
            knot = self.knot_of(step)
            piece, end = self._piece(knot), (step + 1) * self.prompts_per_step
            if piece.is_flat:
                end = (self._steps[knot] + piece.length) * self.prompts_per_step
                end = end if piece.length else last
            prompts = min(end, last) - first
            weights = np.diff(piece.at(step - self._steps[knot]))
            dues.append(dues[-1] + prompts * weights)
            places.append(places[-1] + prompts)
            first += prompts
        return Window(floors=floors, places=np.array(places), dues=np.array(dues), scale=self.scale)

    def in_order(
        self, prompts: int, sources: NDArray[np.int64], wholes: NDArray[np.int64]
    ) -> Iterator[tuple[float, int]]:
        """(prompts after which a source is first due a whole number of prompts, source), in order.

        Equal numbers are in the order of sources. The number of prompts is infinite if a source is
        never due that many. Only knots up to the last item that is taken are computed.

        Args:
            prompts: prompts after which no source is due its number yet.
            sources: (N,) sources.
            wholes: (N,) whole prompts that each is to be due.
        """
        for knot in range(self.knot_of(prompts // self.prompts_per_step), len(self._steps) - 1):
            if not sources.size:
                return
            reached = self.at_knot(knot + 1)[0][sources] >= wholes
            if reached.any():
                yield from self._within(knot, sources[reached], wholes[reached])
                sources, wholes = sources[~reached], wholes[~reached]
        yield from self._within(len(self._steps) - 1, sources, wholes)

    def knot_of(self, step: int) -> int:
        """The number of the last knot at or before a step."""
        return bisect_right(self._steps, step) - 1

    def at_knot(self, knot: int) -> tuple[NDArray[np.int64], Numbers]:
        """As `after`, at a knot; computed from the last knot before it that is known."""
        known = knot
        while known not in self._at_knots:
            known -= 1
        for number in range(known, knot):
            piece = self._piece(number)
            grown = self._times(np.diff(piece.until(piece.length)), self.prompts_per_step)
            self._at_knots[number + 1] = self._sum(self._at_knots[number], grown)
        return self._at_knots[knot]

    def set_at_knot(self, knot: int, dues: Sequence[int]) -> None:
        """Take over what was due at a knot, in parts, so that no earlier knot is needed."""
        whole = np.array([due // self.scale for due in dues], dtype=np.int64)
        parts = np.array([due % self.scale for due in dues], dtype=self._type)
        self._at_knots[knot] = whole, parts

    def _within(
        self, knot: int, sources: NDArray[np.int64], wholes: NDArray[np.int64]
    ) -> list[tuple[float, int]]:
        """The items of `in_order` that lie between a knot and the next one."""
        piece, (due, parts) = self._piece(knot), self.at_knot(knot)
        missing = (wholes - due[sources]).astype(object) * self.scale - parts[sources]
        per_step = self.prompts_per_step
        sums = np.concatenate([sources, sources + 1])

        def of_sources(of_sums: Callable[[Numbers, Numbers], Numbers], steps: Numbers) -> Numbers:
            found = of_sums(np.tile(steps, 2), sums)
            return found[len(sources) :] - found[: len(sources)]

        low = np.zeros(len(sources), dtype=self._type)
        if not piece.is_flat:  # the last step that begins with fewer parts than are missing
            high = np.full(len(sources), piece.length, dtype=self._type)
            wanted = (-(-missing // per_step)).astype(self._type)
            while (high - low > 1).any():
                middle = (low + high) // 2
                less = of_sources(piece.until, middle) < wanted
                low, high = np.where(less, middle, low), np.where(less, high, middle)
            missing = missing - of_sources(piece.until, low).astype(object) * per_step
        rates = of_sources(piece.at, low)
        prompts = [
            start * per_step - (-lacking // rate) if rate else math.inf
            for start, lacking, rate in zip(
                (low + self._steps[knot]).tolist(), missing.tolist(), rates.tolist(), strict=True
            )
        ]
        return sorted(zip(prompts, sources.tolist(), strict=True))

    def _piece(self, knot: int) -> _Piece:
        found = self._pieces.get(knot)
        if found is None:
            starts = self._sums(knot)
            slopes = rests = np.zeros_like(starts)
            length = 0
            if knot + 1 < len(self._steps):
                length = self._steps[knot + 1] - self._steps[knot]
                change = self._sums(knot + 1) - starts
                slopes, rests = change // length, change % length
            if len(self._pieces) >= _KEPT_PIECES:
                del self._pieces[next(iter(self._pieces))]
            found = _Piece(length=length, starts=starts, slopes=slopes, rests=rests)
            self._pieces[knot] = found
        return found

    def _sums(self, knot: int) -> Numbers:
        """(S + 1,) parts of a slot at a knot, of the sources before each source."""
        if self._last_sums[0] != knot:
            parts = np.array([0, *self._knots[self._steps[knot]]], dtype=self._type)
            self._last_sums = knot, np.cumsum(parts)
        return self._last_sums[1]

    def _times(self, parts: Numbers, times: int) -> tuple[NDArray[np.int64], Numbers]:
        """`times` times a number of parts: (S,) whole prompts, (S,) further parts."""
        whole, rest = parts // self.scale, parts % self.scale
        if times * self.scale >= _INT64_LIMIT:
            rest = rest.astype(object)
        rest = rest * times
        whole = whole * times + rest // self.scale
        return whole.astype(np.int64), (rest % self.scale).astype(self._type)

    def _sum(
        self, one: tuple[NDArray[np.int64], Numbers], other: tuple[NDArray[np.int64], Numbers]
    ) -> tuple[NDArray[np.int64], Numbers]:
        parts = one[1] + other[1]
        whole = one[0] + other[0] + (parts // self.scale).astype(np.int64)
        return whole, parts % self.scale


def _floor_sum(count: Any, length: int, slopes: Numbers) -> Numbers:
    """(N,) sum of slope * k // length over k = 0 .. count - 1, for 0 <= slope < length.

    Counts points below a line; each round swaps the axes, as in Euclid's algorithm. Source: Graham,
    Knuth & Patashnik, Concrete Mathematics (2nd ed. 1994), sec. 3.5.
    """
    count = np.broadcast_to(np.asarray(count, dtype=slopes.dtype), slopes.shape)
    lengths = np.full(slopes.shape, length, dtype=slopes.dtype)
    total, top = np.zeros_like(slopes), slopes * count
    while True:
        count, offsets = top // lengths, top % lengths
        if not np.any(count > 0):
            return total
        slopes, lengths = lengths, np.maximum(slopes, 1)  # a slope of 0 leaves a count of 0
        steep = slopes // lengths
        total = total + count * (count - 1) // 2 * steep + count * (offsets // lengths)
        slopes, offsets = slopes - steep * lengths, offsets % lengths
        top = slopes * count + offsets


class PromptOrder:
    """The order of prompts. Its methods are functions of their arguments; results are cached.

    A part of the order is computed from the last pin before it that is known. Pins are stored with
    one byte per source and block. `pin` and `load_pin` carry one from a process to the next.
    """

    def __init__(self, dues: Dues) -> None:
        self._dues = dues
        self._period: int | None = None
        self._repeats = 1
        """A short order is repeated this many times to fill one block."""
        if dues.is_constant:
            once = dues.scale // math.gcd(*dues.weights(0).tolist())
            if once <= MAX_PERIOD:
                self._repeats = -(-BLOCK // once)
                self._period = once * self._repeats
        self._block = BLOCK if self._period is None or self._repeats == 1 else self._period
        self._ahead = {0: np.zeros(dues.sources, dtype=np.uint8)}
        """Block -> (S,) 1 if the source had a prompt more than its whole dues before the block."""
        self._window: tuple[int, Window] | None = None
        self._blocks: dict[int, NDArray[np.int16]] = {}

    def had(self, prompts: int) -> Counts:
        """(S,) how many of the first `prompts` prompts each source had."""
        block, rest = divmod(prompts % self._period if self._period else prompts, self._block)
        had = self._pin(block)
        if rest:
            had = had + np.bincount(self._sources_of(block)[:rest], minlength=len(had))
        if self._period and prompts >= self._period:
            had = had + self._dues.after(prompts - prompts % self._period)[0]
        return tuple(had.tolist())

    def between(self, first: int, last: int) -> NDArray[np.int16]:
        """(last - first,) source of each of the slots `first` .. `last` - 1."""
        pieces: list[NDArray[np.int16]] = []
        while first < last:
            place = first if self._period is None else first % self._period
            block, start = divmod(place, self._block)
            piece = self._sources_of(block)[start : start + last - first]
            pieces.append(piece)
            first += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int16)

    def pin(self, prompts: int) -> dict[str, Any] | None:
        """The pin of the block that holds a slot, as plain JSON values; None for the first block.

        `turn` is the first slot of the block. `ahead` has one bit per source: whether it had one
        prompt more than its whole dues. `dues` are the parts due at the last entry of the schedules
        that is before the block; a pin after the first entry has them.
        """
        block = self._block_of(prompts)
        if not block:
            return None
        self._pin(block)
        place = prompts % self._period if self._period else prompts
        pin: dict[str, Any] = {
            "turn": prompts - place % self._block,
            "ahead": np.packbits(self._ahead[block]).tobytes().hex(),
        }
        if knot := self._knot_of(block):
            whole, parts = (numbers.tolist() for numbers in self._dues.at_knot(knot))
            pin["dues"] = [a * self._dues.scale + b for a, b in zip(whole, parts, strict=True)]
        return pin

    def load_pin(self, pin: Mapping[str, Any]) -> None:
        """Take over a `pin` of this order, so that nothing before its block is computed."""
        block = self._block_of(pin["turn"])
        packed = np.frombuffer(bytes.fromhex(pin["ahead"]), dtype=np.uint8)
        self._ahead[block] = np.unpackbits(packed)[: self._dues.sources]
        if knot := self._knot_of(block):
            self._dues.set_at_knot(knot, pin["dues"])

    def _block_of(self, prompts: int) -> int:
        return (prompts % self._period if self._period else prompts) // self._block

    def _knot_of(self, block: int) -> int:
        return self._dues.knot_of(block * self._block // self._dues.prompts_per_step)

    def _pin(self, block: int) -> NDArray[np.int64]:
        """(S,) the pin of a block: how many prompts each source had before it."""
        known = block
        while known not in self._ahead:
            known -= 1
        for number in range(known, block):
            last = (number + 1) * self._block
            after = self._pin_after(number, self._pin(number))
            self._ahead[number + 1] = (after - self._dues.after(last)[0]).astype(np.uint8)
        return self._dues.after(block * self._block)[0] + self._ahead[block]

    def _pin_after(self, block: int, had: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) prompts each source had after a block, given those it had before it.

        At most one prompt of each source is released and not yet due. A prompt can only have a slot
        after its release, so at each slot `slack` counts the slots from there to the end less the
        taken prompts that are released there or later; a prompt is taken if all these counts stay
        >= 0.
        """
        scale, window = self._dues.scale, self._window_of(block)
        prompts = int(window.places[-1])
        whole = window.floors + (window.dues[-1] // scale).astype(np.int64)
        taken = np.maximum(whole, had)
        spare = block * self._block + prompts - int(taken.sum())
        sources, places = _prompts_from(had, taken)
        released = window.first_with(sources, places, 1)
        later = np.bincount(released, minlength=prompts)[::-1].cumsum()[::-1]
        slack = (np.arange(prompts, 0, -1) - later).astype(np.int32)
        waiting = np.flatnonzero((taken == whole) & (window.dues[-1] % scale > 0))
        releases = window.first_with(waiting, whole[waiting], 1)
        release = dict(zip(waiting.tolist(), releases.tolist(), strict=True))
        last = block * self._block + prompts
        coming = self._dues.in_order(last, waiting, whole[waiting] + 1) if spare else ()
        for _, source in coming:
            before = slack[: release[source] + 1]
            if before.min() > 0:
                before -= 1
                taken[source] += 1
                spare -= 1
                if not spare:
                    break
        assert spare == 0, "every slot is taken"
        return taken

    def _window_of(self, block: int) -> Window:
        if self._window is None or self._window[0] != block:
            first = block * self._block
            last = first + self._block
            if self._period:
                last = min(last, self._period // self._repeats)
            self._window = block, self._dues.window(first, last)
        return self._window[1]

    def _sources_of(self, block: int) -> NDArray[np.int16]:
        """(slots of the block,) the source of each."""
        found = self._blocks.get(block)
        if found is None:
            found = self._serve(block)
            if len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = found
        return found

    def _serve(self, block: int) -> NDArray[np.int16]:
        """(slots of the block,) sources, by earliest deadline among the released prompts."""
        window, sources = self._window_of(block), self._dues.sources
        length = int(window.places[-1])
        last = block * self._block + length
        is_end = self._period is not None and last == self._period // self._repeats
        after = self._dues.after(last)[0] if is_end else self._pin(block + 1)
        owners, places = _prompts_from(self._pin(block), after)
        released = window.first_with(owners, places, 1)
        ranked = window.first_with(owners, places + 1) * sources + owners
        order = np.argsort(released, kind="stable")
        upcoming = ranked[order].tolist()  # deadline, then source, as one number
        until = np.searchsorted(released[order], np.arange(length), side="right").tolist()
        served: list[int] = []
        ready: list[int] = []
        at = 0
        for end in until:
            for rank in upcoming[at:end]:
                heapq.heappush(ready, rank)
            at = end
            served.append(heapq.heappop(ready))
        owners_in_order = (np.array(served) % sources).astype(np.int16)
        return np.tile(owners_in_order, self._repeats)


def _prompts_from(
    had: NDArray[np.int64], after: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N,) source, (N,) number from 0 of each prompt that follows `had` prompts, up to `after`."""
    counts = after - had
    sources = np.repeat(np.arange(len(counts)), counts)
    skipped = np.cumsum(counts) - counts
    return sources, had[sources] + np.arange(len(sources)) - skipped[sources]
