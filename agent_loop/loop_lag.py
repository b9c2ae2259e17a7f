"""How late the event loop of a process runs its callbacks.

A timer looks every `EVERY_S` how much later than due it was run. While a callback occupies the
loop for a second, the timer runs once instead of twenty times. So the looks that were missed are
counted too, each with the lag that it would have seen; otherwise a percentile would hide the
second. The lags are counted in a histogram, whose size does not grow. No verl.

Source for the missed looks: Tene, "How NOT to Measure Latency" (2013), coordinated omission.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable
from typing import TypeAlias

EVERY_S = 0.05

_SMALLEST_S = 0.001
_GROWTH = 1.2
_LAGS_S = [_SMALLEST_S * _GROWTH**i for i in range(64)]
"""Upper ends of the histogram's classes: 1 ms to 97 s. A percentile is an upper end, so it is up to
20 % too high."""

Counts: TypeAlias = tuple[int, ...]
"""Class of the histogram -> looks, since the process began."""


class LoopLag:
    """The lag of one event loop since `start`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = [0] * len(_LAGS_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on, in the running loop. A second call changes nothing."""
        if self._timer is None:
            self._sleep()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now(self) -> Counts:
        """What was counted so far, for `since`."""
        return tuple(self._counts)

    def since(self, before: Counts, share: float = 0.99) -> float:
        """Seconds that this share of the looks since then did not exceed; 0 without a look."""
        seen = [count - old for count, old in zip(self._counts, before, strict=True)]
        above = (1 - share) * sum(seen)  # looks that may exceed the result
        for lag_s, count in zip(reversed(_LAGS_S), reversed(seen), strict=True):
            above -= count
            if above < 0:
                return lag_s
        return 0.0

    def _sleep(self) -> None:
        due = self._clock() + EVERY_S
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look, due)

    def _look(self, due: float) -> None:
        late_s = self._clock() - due
        self._count(late_s)
        while (late_s := late_s - EVERY_S) > 0:
            self._count(late_s)
        self._sleep()

    def _count(self, late_s: float) -> None:
        place = math.ceil(math.log(max(late_s, _SMALLEST_S) / _SMALLEST_S, _GROWTH))
        self._counts[min(place, len(_LAGS_S) - 1)] += 1


FULL_COLLECTION_EVERY = 100
"""Collections of the middle generation for each full one; Python's default is 10. A full collection
looks at all objects of 2,048 trajectories, and trajectories leave hardly any garbage in cycles."""


def spare_full_collections() -> None:
    """Keep garbage collection from stopping this process's event loop for long.

    A process that has imported torch and verl has more than half a million objects, which each full
    collection looks at for a second. Those that are there now are never looked at again.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_EVERY)
