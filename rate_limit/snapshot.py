"""What a limiter has done so far, as every backend tells it."""

from bisect import bisect_left
from dataclasses import dataclass, field

WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper ends of the histogram's buckets; one more holds all longer waits."""


def wait_bucket(waited_s: float) -> int:
    """Index into `SourceSnapshot.waits` of a wait."""
    return bisect_left(WAIT_BOUNDS_S, waited_s)


@dataclass(frozen=True, kw_only=True)
class SourceSnapshot:
    """One source's part; "" is the name of calls without a source."""

    granted: int = 0
    """Calls that passed."""

    waiting: int = 0
    """Callers that wait now."""

    waited_s: float = 0.0
    """Seconds waited, over all calls that passed; n calls together wait n times."""

    waits: tuple[int, ...] = (0,) * (len(WAIT_BOUNDS_S) + 1)
    """Calls that waited and passed, by `WAIT_BOUNDS_S`; what passed at once is in none."""

    refused: int = 0
    """Calls turned away, because their slot lay beyond their timeout; they consumed nothing."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A limiter, over all that share it."""

    per_minute: float
    burst: int
    granted: int
    """Calls granted since the limiter's state was made."""

    utilisation: float
    """Calls granted in the last minute / what the sustained rate allows in a minute."""

    penalties: int
    """Pauses and overloads that servers asked for (429, 503, `Retry-After`)."""

    rate_factor: float
    """Share of the sustained rate that is in force; below 1 after a storm of overloads."""

    paused_s: float
    """Seconds until the pause ends that a server asked for; 0 for none."""

    abandoned: int
    """Slots of cancelled callers that nobody could use."""

    sources: dict[str, SourceSnapshot] = field(default_factory=dict[str, SourceSnapshot])

    @property
    def waiting(self) -> int:
        """Callers that wait now, over all sources."""
        return sum(source.waiting for source in self.sources.values())

    @property
    def waited_s(self) -> float:
        """Seconds waited, over all calls that passed."""
        return sum(source.waited_s for source in self.sources.values())
