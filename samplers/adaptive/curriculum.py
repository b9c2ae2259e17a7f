"""Rows by difficulty: which rows of a source are drawn, and a window over pass rates that moves.

A profile (`samplers.adaptive.profiles`) has the pass rate of each row. `ChosenRows` leaves out rows
outside a range. `CurriculumOrder` draws from the rows whose pass rates are near a centre, which
moves from `start` to `end`. Both are functions of seed and profile, so a resume is a number.

Example: rows with pass rates 0, .1, ..., 1, a centre that moves from .8 to .3, and a width of .2.
The first draws are among the rows with .7, .8 and .9, the last among those with .2, .3 and .4. Each
of the three is drawn once before one of them is drawn again.
"""

import hashlib
import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samplers.permutation import RowOrder

_CHUNK = 4096  # draws that are computed at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """A window over pass rates that moves."""

    start: float
    """Centre at the first draw."""

    end: float
    """Centre from `steps` on."""

    width: float
    """Rows within half of it on both sides of the centre are drawn."""

    steps: int
    """Steps until the centre is at `end`, counted by the draws that the source is due in them at
    the ratios of the start. Prompts that replace others move the centre too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenRows:
    """The rows of a source that may be drawn."""

    rows: NDArray[np.int64]
    """(N,) rows, in order."""

    rates: NDArray[np.float64]
    """(N,) their pass rates."""

    curriculum: Curriculum | None
    digest: str
    """Of rows, rates and settings."""

    def order(self, share: int, usual: int, key: int, draws: int) -> "RowOrder | MappedOrder":
        """The order of the source's draws.

        Args:
            share: most draws in one batch.
            usual: most draws in one batch at the ratios.
            key: `order_key` of the source.
            draws: draws until the centre of the curriculum is at its end.
        """
        if self.curriculum is None:
            return MappedOrder(self.rows, RowOrder(len(self.rows), share, key))
        own = CurriculumOrder(self.rates, self.curriculum, draws, share, usual, key)
        return MappedOrder(self.rows, own)


class MappedOrder:
    """The order of some rows of a source, as rows of the source."""

    def __init__(self, rows: NDArray[np.int64], order: "RowOrder | CurriculumOrder") -> None:
        self._rows, self._order = rows, order

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """See `RowOrder.rows`."""
        return self._rows[self._order.rows(first, count)]

    def rows_at(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `RowOrder.rows_at`."""
        return self._rows[self._order.rows_at(draws)]


class CurriculumOrder:
    """The row of each draw, among rows whose pass rates are near a centre that moves.

    The window is used up in passes: no row is drawn twice in a pass, and a pass ends when all rows
    of the window have been drawn in it. A row that comes into the window takes part from the
    current pass on. Each pass has another order. A window with fewer rows than two batches take at
    the ratios is widened to the nearest rows. A row that was drawn rests for as many draws as one
    batch takes, so no batch has it twice, unless the batch takes more draws than the window has
    rows.

    Draws are computed one after the other, 2 us each, and stay in memory, 8 bytes each.

    Args:
        rates: (N,) pass rates, N >= 1.
        draws: draws until the centre is at its end.
        share: most draws in one batch.
        usual: most draws in one batch at the ratios.
    """

    def __init__(
        self,
        rates: NDArray[np.float64],
        curriculum: Curriculum,
        draws: int,
        share: int,
        usual: int,
        key: int,
    ) -> None:
        self._by_rate = np.argsort(rates, kind="stable")
        self._sorted = rates[self._by_rate]
        self._curriculum, self._draws = curriculum, max(1, draws)
        self._least = min(len(rates), 2 * usual)
        self._rest = min(share, self._least - 1)
        self._key = key
        self._made = np.empty(0, dtype=np.int64)
        self._passes = np.zeros(len(rates), dtype=np.int64)
        """(N,) the pass in which each row may be drawn next."""
        self._pass = 0
        self._waits = np.zeros(len(rates), dtype=bool)  # in the heap, or resting
        self._heap: list[tuple[int, int, int]] = []
        self._resting: deque[tuple[int, int]] = deque()  # (draw of its end, place)
        self._window = 0, 0

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """(count,) rows of the draws first .. first + count - 1."""
        self._make(first + count)
        return self._made[first : first + count]

    def rows_at(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) rows of any draws (N,), each >= 0."""
        if draws.size:
            self._make(int(draws.max()) + 1)
        return self._made[draws]

    def windows(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) first place and (N,) last place + 1 of the window of each draw, by pass rate."""
        own = self._curriculum
        centre = own.start + (own.end - own.start) * np.minimum(1.0, draws / self._draws)
        low = np.searchsorted(self._sorted, centre - own.width / 2 - 1e-9, side="left")
        high = np.searchsorted(self._sorted, centre + own.width / 2 + 1e-9, side="right")
        least = self._least
        middles = (self._sorted[: len(self._sorted) - least] + self._sorted[least:]) / 2
        nearest = np.searchsorted(middles, centre)
        few = high - low < least
        return np.where(few, nearest, low), np.where(few, nearest + least, high)

    def _make(self, draws: int) -> None:
        while (made := len(self._made)) < draws:
            lows, highs = self.windows(np.arange(made, made + _CHUNK))
            places = [
                self._next(made + number, low, high)
                for number, (low, high) in enumerate(
                    zip(lows.tolist(), highs.tolist(), strict=True)
                )
            ]
            self._made = np.concatenate([self._made, self._by_rate[places]])

    def _next(self, draw: int, low: int, high: int) -> int:
        """The place, by pass rate, of the row that a draw takes."""
        if (low, high) != self._window:
            self._window = low, high
            for place in (low + np.flatnonzero(~self._waits[low:high])).tolist():
                self._passes[place] = max(self._passes[place], self._pass)
                self._wait(place)
        while self._resting and self._resting[0][0] <= draw:
            _, place = self._resting.popleft()
            self._wait(place)
        while True:
            self._pass, _, place = heapq.heappop(self._heap)
            if low <= place < high:
                break
            self._waits[place] = False
        self._passes[place] += 1
        self._resting.append((draw + 1 + self._rest, place))
        return place

    def _wait(self, place: int) -> None:
        number = int(self._passes[place])
        digest = hashlib.blake2b(b"%d/%d/%d" % (self._key, number, place), digest_size=8).digest()
        self._waits[place] = True
        heapq.heappush(self._heap, (number, int.from_bytes(digest, "little"), place))
