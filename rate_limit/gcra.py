"""When may the next call pass: the generic cell rate algorithm, in whole nanoseconds. Pure.

The state is a theoretical arrival time (TAT): when the bucket would be full again. A reservation of
n calls moves it by n emission intervals and is granted the first instant at which it stays within
the burst. For any reservations whatever, no window of length t holds more than burst + rate * t.

Two things are added to the textbook. Calls may be kept a least interval apart, which is a second
TAT without burst. And a server may push everybody back (`Retry-After`): the TAT moves past the
pause, and a new epoch tells those who reserved before, and still wait, to reserve again.

Source: ITU-T I.371, Annex A (virtual scheduling); conformance is judged at the granted instant.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

_SECOND_NS = 10**9
_LONGEST_NS = 365 * 86400 * _SECOND_NS  # keeps every time within 64 bits


class LimiterTimeout(TimeoutError):
    """The limiter or a slot would make the caller wait longer than it allows; nothing was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How many calls may pass.

    Raises:
        ValueError: every value out of range at once.
    """

    per_minute: float
    """Sustained calls a minute, at least 0.001."""

    burst: int
    """Calls that may pass back to back after an idle spell; an `acquire` may ask for this many."""

    min_interval_s: float = 0.0
    """Least time between two calls, bursts included; 0 for none."""

    emission_interval_ns: int = field(init=False)
    """Time per call at the sustained rate, rounded up: the rate is never exceeded."""

    min_interval_ns: int = field(init=False)
    """`min_interval_s`, rounded up."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not 0.001 <= self.per_minute < math.inf:
            problems.append(f"per_minute={self.per_minute} must be a number of at least 0.001")
        if type(self.burst) is not int or not 1 <= self.burst <= 10**6:
            problems.append(f"burst={self.burst} must be a whole number from 1 to 1000000")
        if not 0 <= self.min_interval_s <= 86400:
            problems.append(f"min_interval_s={self.min_interval_s} must be from 0 to 86400")
        if not problems:
            interval_ns = math.ceil(60 * _SECOND_NS / self.per_minute)
            min_interval_ns = math.ceil(self.min_interval_s * _SECOND_NS)
            object.__setattr__(self, "emission_interval_ns", interval_ns)
            object.__setattr__(self, "min_interval_ns", min_interval_ns)
            if self.burst * max(interval_ns, min_interval_ns) > _LONGEST_NS:
                problems.append(f"burst={self.burst} calls take more than a year at this rate")
        if problems:
            raise ValueError(f"cannot limit a rate: {'; '.join(problems)}; correct the tool config")

    @property
    def burst_tolerance_ns(self) -> int:
        """How far the TAT may lie ahead of a call that passes (tau)."""
        return (self.burst - 1) * self.emission_interval_ns


class Arrivals(NamedTuple):
    """What all callers share: theoretical arrival times, nanoseconds on one clock."""

    tat_ns: int
    """TAT of the rate."""

    spaced_ns: int
    """When the next call keeps its distance from the last one granted."""

    paused_ns: int
    """End of the last pause that a server asked for."""

    epoch: int
    """Changes when reservations that still wait are void."""


def idle(epoch: int) -> Arrivals:
    """Nobody called for a long time: the whole burst may pass."""
    return Arrivals(0, 0, 0, epoch)


def drained(now_ns: int, rate: Rate, epoch: int) -> Arrivals:
    """Whatever passed until now, nothing passes too early: the burst counts as used up at `now_ns`.

    For when the state was lost. Calls granted so far have moved the TAT at most this far.
    """
    tat_ns = now_ns + rate.burst * rate.emission_interval_ns
    return Arrivals(tat_ns, now_ns + rate.burst * rate.min_interval_ns, 0, epoch)


def reserve(arrivals: Arrivals, now_ns: int, n: int, rate: Rate) -> tuple[int, Arrivals]:
    """Grant the next n calls.

    Args:
        arrivals: the state now.
        now_ns: the time now.
        n: calls that pass together, 1 .. burst.
        rate: the limits.

    Returns:
        when the n calls may pass, at least `now_ns`, and the state after the grant.
    """
    tat_ns, spaced_ns, paused_ns, epoch = arrivals
    interval_ns = rate.emission_interval_ns
    start_ns = max(now_ns, tat_ns + (n - rate.burst) * interval_ns, spaced_ns)
    return start_ns, Arrivals(
        max(tat_ns, start_ns) + n * interval_ns,
        start_ns + n * rate.min_interval_ns,
        paused_ns,
        epoch,
    )


def push_back(arrivals: Arrivals, now_ns: int, pause_ns: int, rate: Rate) -> Arrivals:
    """Let nobody pass before `now_ns + pause_ns`, those who already wait included.

    After the pause calls come at the sustained rate without a burst. A pause that ends no later
    than the one in force changes nothing, so many callers may report the same one.
    """
    paused_ns = now_ns + pause_ns
    if paused_ns <= arrivals.paused_ns:
        return arrivals
    # Waiting reservations are void; those that passed have moved the TAT at most to `drained`.
    passed_ns = min(arrivals.tat_ns, now_ns + rate.burst * rate.emission_interval_ns)
    tat_ns = max(passed_ns, paused_ns + rate.burst_tolerance_ns)
    spaced_ns = min(arrivals.spaced_ns, now_ns + rate.burst * rate.min_interval_ns)
    return Arrivals(tat_ns, spaced_ns, paused_ns, arrivals.epoch + 1)
