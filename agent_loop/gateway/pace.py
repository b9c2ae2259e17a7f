"""How many requests and connections of one sender the gateway takes in a second."""

import math

PER_SECOND, BURST = 50.0, 100
"""Of one session: a small request costs about a millisecond of the event loop, so a flood takes at
most a twentieth of it."""


class Pace:
    """After a burst, so many in a second."""

    def __init__(self, per_second: float = PER_SECOND, burst: float = BURST) -> None:
        self._interval_s, self._burst_s = 1 / per_second, burst / per_second
        self._next_at = -math.inf

    def wait_s(self, now: float, cost: float = 1.0) -> float:
        """Count what came, and return the seconds until its turn. `now` is on the loop's clock."""
        self._next_at = max(self._next_at, now - self._burst_s) + cost * self._interval_s
        return max(0.0, self._next_at - now)
