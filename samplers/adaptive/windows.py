"""The order of prompts when the shares are decided for one window of steps at a time.

A decision gives each source a whole number of prompts of the window. So at the end of each window
every source has had exactly what it was due. The order in a window does not depend on later
decisions, and law 1 of the plan holds in all windows together: after any number of prompts, each
source is within one prompt of what it is due.

Example: windows of 2 batches of 4 prompts. The first decision is (5, 3). The source with 5 is due
5/8 of each prompt: after 4 prompts 2.5, after 8 prompts 5. The second decision is (2, 6). After 12
prompts the first source is due 6.

After the last decision, the order goes on with its numbers in each window. Asynchronous modes start
prompts ahead, and look there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samplers.prompt_order import Counts, Dues, Numbers, PromptOrder

_KEPT = 8  # windows whose order stays in memory


class Windows:
    """The order of prompts and what is due, with the methods of `PromptOrder` and `Dues` that a
    plan calls.

    Args:
        first: (S,) prompts of each source in the first window.
        steps: steps of a window.
        prompts_per_step: prompts of a step; `first` sums to `steps * prompts_per_step`.
    """

    def __init__(self, first: Sequence[int], steps: int, prompts_per_step: int) -> None:
        self.steps = steps
        self.length: int = steps * prompts_per_step
        """Prompts of a window."""
        self._per_step = prompts_per_step
        self.decided: list[Counts] = []
        """(S,) prompts of each source, for each window that is decided."""
        self._before: list[NDArray[np.int64]] = [np.zeros(len(first), dtype=np.int64)]
        self._orders: dict[int, PromptOrder] = {}
        self.append(first)

    @property
    def scale(self) -> int:
        """Parts of one whole prompt."""
        return self.length

    def append(self, counts: Sequence[int]) -> None:
        """Decide the next window.

        Raises:
            ValueError: the numbers are negative or do not sum to the prompts of a window.
        """
        if min(counts) < 0 or sum(counts) != self.length:
            raise ValueError(
                f"prompts={list(counts)} of a window: want numbers >= 0 that sum to {self.length}"
            )
        self.decided.append(tuple(counts))
        self._before.append(self._before[-1] + np.array(counts, dtype=np.int64))

    def cut(self, windows: int) -> None:
        """Forget the decisions after the first `windows`, which are at least one."""
        del self.decided[windows:], self._before[windows + 1 :]
        self._orders.clear()

    def had(self, prompts: int) -> Counts:
        """(S,) how many of the first `prompts` prompts each source had."""
        window, rest = divmod(prompts, self.length)
        had = self._until(window)
        if rest:
            had = had + np.array(self._order(window).had(rest))
        return tuple(had.tolist())

    def between(self, first: int, last: int) -> NDArray[np.int16]:
        """(last - first,) source of each of the prompts `first` .. `last` - 1."""
        pieces = [np.empty(0, dtype=np.int16)]
        while first < last:
            window, start = divmod(first, self.length)
            stop = min(self.length, start + last - first)
            pieces.append(self._order(window).between(start, stop))
            first += stop - start
        return np.concatenate(pieces)

    def after(self, prompts: int) -> tuple[NDArray[np.int64], Numbers]:
        """(S,) whole prompts that each source is due, (S,) further parts."""
        window, rest = divmod(prompts, self.length)
        parts = np.array(self._counts(window), dtype=np.int64) * rest
        return self._until(window) + parts // self.length, parts % self.length

    def pin(self, prompts: int) -> dict[str, Any] | None:
        """None: the order of a window is computed from its start."""

    @property
    def _last(self) -> int:
        return len(self.decided) - 1

    def _counts(self, window: int) -> Counts:
        return self.decided[min(window, self._last)]

    def _until(self, window: int) -> NDArray[np.int64]:
        """(S,) prompts of each source before a window."""
        beyond = max(0, window - len(self.decided))
        own = self._before[window - beyond]
        return own + beyond * np.array(self.decided[-1], dtype=np.int64)

    def _order(self, window: int) -> PromptOrder:
        """The order of one window; undecided windows share one."""
        window = min(window, self._last)
        found = self._orders.get(window)
        if found is None:
            if len(self._orders) >= _KEPT:
                del self._orders[next(iter(self._orders))]
            found = PromptOrder(Dues({0: self.decided[window]}, self._per_step))
            self._orders[window] = found
        return found
