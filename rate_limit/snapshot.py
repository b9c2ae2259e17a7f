"""What a limiter has done so far, in the same form for every backend."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram's buckets in seconds; one more bucket holds all longer waits."""

GRANTED, WAITED_NS, REFUSED, WAITING, ABANDONED, WAITS = range(6)
"""What a limiter counts for each source; from `WAITS` on, a counter for each bucket."""

COUNTERS = WAITS + len(WAIT_BOUNDS_S) + 1


def of_passed(n: int, waited_s: float) -> dict[int, int]:
    """The counts of n calls that passed together after a wait."""
    bucket = bisect_left(WAIT_BOUNDS_S, waited_s)
    return {GRANTED: n, WAITED_NS: int(waited_s * 10**9) * n, WAITS + bucket: n}


@dataclass(frozen=True, kw_only=True)
class SourceSnapshot:
    """The numbers of one source; "" stands for calls without a source."""

    granted: int = 0
    """Calls that passed."""

    waiting: int = 0
    """Callers that are waiting now."""

    waited_s: float = 0.0
    """Seconds waited by all calls that passed; n calls that pass together count n times."""

    waits: tuple[int, ...] = (0,) * (len(WAIT_BOUNDS_S) + 1)
    """Calls that waited and passed, by `WAIT_BOUNDS_S`; without calls that passed at once."""

    refused: int = 0
    """Calls that were refused because their slot was beyond their timeout; they used no slot."""

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "SourceSnapshot":
        """The snapshot of a source with these counters."""
        return cls(
            granted=counts[GRANTED],
            waiting=counts[WAITING],
            waited_s=counts[WAITED_NS] / 10**9,
            waits=tuple(counts[i] for i in range(WAITS, COUNTERS)),
            refused=counts[REFUSED],
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The numbers of a limiter, over all processes that share it."""

    per_minute: float
    burst: int
    granted: int
    """Calls granted since the limiter's state was made."""

    utilisation: float
    """Calls granted in the last minute, divided by the calls that the rate allows in a minute."""

    penalties: int
    """Pauses and overloads that servers asked for (429, 503, `Retry-After`)."""

    rate_factor: float
    """The part of the sustained rate that is in force; below 1 after many overloads."""

    paused_s: float
    """Seconds to the end of a pause that a server asked for; 0 without a pause."""

    abandoned: int
    """Slots of cancelled callers that no other caller could use."""

    sources: dict[str, SourceSnapshot] = field(default_factory=dict[str, SourceSnapshot])

    @property
    def waiting(self) -> int:
        """Callers that are waiting now, over all sources."""
        return sum(source.waiting for source in self.sources.values())

    @property
    def waited_s(self) -> float:
        """Seconds waited by all calls that passed."""
        return sum(source.waited_s for source in self.sources.values())
