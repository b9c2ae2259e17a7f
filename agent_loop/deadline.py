"""The deadline of a trajectory: one object, made when the trajectory begins and handed down.

Beginning, turns, engine, limiter, slots, retries, judge and end each ask it how much time is left.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CLOSE_S = 10.0
"""Longest time to free what a trajectory used. It begins when the trajectory has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When something must have ended."""

    at: float
    """On `clock`."""

    limit_s: float
    """The seconds that were given."""

    name: str
    """The setting that gave them, for messages: `trajectory_s`."""

    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    """Monotonic seconds."""

    @classmethod
    def after(
        cls, limit_s: float, name: str, clock: Callable[[], float] = time.monotonic
    ) -> "Deadline":
        """The deadline that many seconds from now; `math.inf` for none."""
        return cls(at=clock() + limit_s, limit_s=limit_s, name=name, clock=clock)

    def left_s(self) -> float:
        """The seconds that are left; 0 when it has passed."""
        return max(0.0, self.at - self.clock())

    def within(self, limit_s: float | None, name: str) -> "Deadline":
        """This deadline, or one of `limit_s` from now if that is sooner."""
        if limit_s is None or self.left_s() <= limit_s:
            return self
        return Deadline.after(limit_s, name, self.clock)
