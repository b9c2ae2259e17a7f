"""When a request may pass: the generic cell rate algorithm over integer nanoseconds. Pure arithmetic.

GCRA: ITU-T I.371, in its virtual-scheduling form, which is a token bucket written as one arrival
time. Where we differ: a request is never refused but told how long to wait; n at once pass when
the last of them may; and two more bounds live beside the arrival time, a least interval between
requests and a moment before which nobody passes.

No window of length t sees more than `burst + rate * t` requests.
"""

import math
from dataclasses import dataclass, replace

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """How many requests may pass."""

    per_second: float
    """Sustained; 0 < rate <= 1e9."""

    burst: int
    """Back to back from idle, >= 1."""

    min_interval_s: float = 0.0
    """Least time between two requests, >= 0."""

    def __post_init__(self) -> None:
        if not 0 < self.per_second <= 1e9:
            raise ValueError(f"per_second={self.per_second} must be above 0 and at most 1e9")
        if self.burst < 1:
            raise ValueError(f"burst={self.burst} must be >= 1")
        if not 0 <= self.min_interval_s < math.inf:
            raise ValueError(f"min_interval_s={self.min_interval_s} must be finite and >= 0")

    @property
    def emission_interval_ns(self) -> int:
        """Time that one request takes of the rate; rounded up, so the rate is never exceeded."""
        return math.ceil(NS_PER_S / self.per_second)

    @property
    def burst_tolerance_ns(self) -> int:
        """How far ahead of its time a request may pass."""
        return (self.burst - 1) * self.emission_interval_ns


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The whole state: three moments in nanoseconds of one clock. Zeros are an idle limiter."""

    tat_ns: int = 0
    """Theoretical arrival time of the next request."""

    next_ns: int = 0
    """Earliest moment that the least interval allows."""

    not_before_ns: int = 0
    """Nobody passes before it (a server asked for a pause)."""


def reserve(arrivals: Arrivals, now_ns: int, rate: Rate, n: int = 1) -> tuple[int, Arrivals]:
    """Take the next place for n requests at once.

    Args:
        arrivals: the state.
        now_ns: the clock.
        rate: the limit.
        n: requests, >= 1; more than `rate.burst` pass when the rate has paid for them.

    Returns:
        (nanoseconds to wait, the state after).

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"cannot reserve n={n}: at least one request")
    interval = rate.emission_interval_ns
    earliest = max(now_ns, arrivals.not_before_ns)
    start = max(arrivals.tat_ns, earliest)
    passes = max(earliest, start + (n - 1) * interval - rate.burst_tolerance_ns, arrivals.next_ns)
    after = replace(
        arrivals,
        tat_ns=start + n * interval,
        next_ns=passes + math.ceil(n * rate.min_interval_s * NS_PER_S),
    )
    return passes - now_ns, after


def push_back(arrivals: Arrivals, now_ns: int, pause_ns: int) -> Arrivals:
    """Let nobody pass for a while; a longer pause that is set already stays."""
    return replace(arrivals, not_before_ns=max(arrivals.not_before_ns, now_ns + pause_ns))
