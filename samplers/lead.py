"""How many groups of each source asynchronous training keeps open.

A group is open from its start until it is trained or dropped. Its time in flight ends when its last
trajectory ends; then it waits for its turn in a batch. If each step starts exactly its quota of
every source, the slowest source sets the pace of all. So the open groups are shared out by Little's
law instead (Little, "A Proof for the Queuing Formula L = lambda W", 1961): the number in flight is
the number that ends per second times the seconds in flight.

    source   quota of a batch   seconds in flight   groups that are open, if a step takes 1.9 s
    fast     36                 1                   36, because all end within the step
    slow     4                  20                  4 * (20 / 1.9 + 1/2) = 44

The half is for groups that have ended: they come one by one, and wait until their quota is full.
The sum over the sources is what verl's trainer has too: (1 + num_warmup_batches) * batch. Pure
arithmetic. Which groups are trained is not decided here; every batch holds the plan's quotas.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

WINDOW = 64
"""Groups over which the seconds of a source are averaged, or four times its open groups if that is
more: a shorter window would follow the rhythm in which its groups were started."""

PRIOR = 2
"""Groups that the mean of all sources counts, beside the measured groups of a source. It decides
only until a source has ended a few groups."""

Limit = Literal["training", "in_flight", "fixed", "staleness"]
"""What sets the pace: the training of a batch; the number of groups that may be open (`fixed`: that
each source may have); or the bound on the staleness of one source."""


class FlightTimes:
    """Seconds that a source's groups are in flight for each group that can be trained.

    It is measured as group-seconds in flight over groups ended, which also counts the groups that
    have not ended yet. Groups that are filtered or fail cost time and give nothing: at a yield of
    one half, a source needs twice its latency.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._groups: dict[str, float] = {}

    def elapse(self, seconds: float, in_flight: Mapping[str, int]) -> None:
        """Time passed while each source had this number of groups in flight."""
        for source, groups in in_flight.items():
            self._seconds[source] = self._seconds.get(source, 0.0) + seconds * groups

    def end(self, source: str, groups: int, is_open: int) -> None:
        """Groups ended that can be trained; negative if they cannot be trained after all."""
        count = self._groups.get(source, 0.0) + groups
        self._groups[source] = max(0.0, count)
        if (excess := self._groups[source] / max(WINDOW, 4 * is_open)) > 1:
            self._groups[source] /= excess
            self._seconds[source] = self._seconds.get(source, 0.0) / excess

    def means(self, sources: Iterable[str]) -> dict[str, float]:
        """source -> seconds in flight per group; for all of them 1 before anything was measured."""
        groups = math.fsum(self._groups.values())
        common = math.fsum(self._seconds.values()) / groups if groups else 1.0
        return {
            source: (self._seconds.get(source, 0.0) + PRIOR * common)
            / (self._groups.get(source, 0.0) + PRIOR)
            for source in sources
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The open groups that are wanted, after a step has started its prompts."""

    groups: dict[str, int]
    step_s: float
    """Seconds that a step takes with them, as far as this can be foreseen."""

    limit: Limit
    source: str | None
    """The source that sets the pace if `limit` is `staleness`."""

    flight_s: dict[str, float]
    """source -> seconds in flight for each group that can be trained."""


def lead_of(
    quotas: Mapping[str, float],
    least: Mapping[str, int],
    most: Mapping[str, int],
    seconds: Mapping[str, float],
    total: int,
    training_s: float,
) -> Lead:
    """Share out the open groups.

    Args:
        quotas: source -> groups a step, on average over the next steps.
        least: source -> its quota in this step.
        most: source -> groups that can be trained before they are too stale, at least `least`.
        seconds: source -> seconds in flight per group.
        total: groups that may be open; above it only so that each source has `least`.
        training_s: seconds of a step in which the trainer does not wait for groups.
    """
    active = [source for source, quota in quotas.items() if quota > 0]

    def wanted(step_s: float) -> dict[str, float]:
        shares: dict[str, float] = {}
        for source in active:
            steps = seconds[source] / step_s  # that a group is in flight
            waiting = min(0.5, max(0.0, steps - 0.5))  # none if all end within the step
            share = max(float(least[source]), quotas[source] * (steps + waiting))
            shares[source] = min(float(most[source]), share)
        return shares

    bounds = {
        source: quotas[source] * seconds[source] / most[source]
        for source in active
        if most[source] > 0
    }
    slowest = max(bounds, key=lambda source: (bounds[source], source), default=None)
    bound_s = bounds[slowest] if slowest is not None else 0.0
    low = max(training_s, bound_s, 1e-9)
    limit: Limit = "training" if training_s >= bound_s else "staleness"
    shares = wanted(low)
    if math.fsum(shares.values()) > total:
        limit = "in_flight"
        high = low
        while math.fsum(wanted(high).values()) > total and high < 1e12:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            over = math.fsum(wanted(middle).values()) > total
            low, high = (middle, high) if over else (low, middle)
        low = high
        shares = wanted(high)
    else:
        shares = _with_spare(shares, quotas, most, total)
    return Lead(
        groups=_whole(shares, most, total),
        step_s=low,
        limit=limit,
        source=slowest if limit == "staleness" else None,
        flight_s=dict(seconds),
    )


def _with_spare(
    shares: dict[str, float], quotas: Mapping[str, float], most: Mapping[str, int], total: int
) -> dict[str, float]:
    """Share out what is left of the total by quota: each source is ahead by as many batches."""
    shares, free = dict(shares), list(shares)
    while free and (spare := total - math.fsum(shares.values())) > 1e-6:
        weight = math.fsum(quotas[source] for source in free)
        for source in free:
            more = spare * quotas[source] / weight
            shares[source] = min(float(most[source]), shares[source] + more)
        free = [source for source in free if shares[source] < most[source] - 1e-9]
    return shares


def _whole(shares: Mapping[str, float], most: Mapping[str, int], total: int) -> dict[str, int]:
    """Round to whole groups with the same sum, by largest remainders."""
    whole = {source: math.floor(share + 1e-9) for source, share in shares.items()}
    left = min(total, round(math.fsum(shares.values()))) - sum(whole.values())
    order = sorted(shares, key=lambda source: (whole[source] - shares[source], source))
    for source in order:
        if left > 0 and whole[source] < most[source]:
            whole[source] += 1
            left -= 1
    return whole


def to_start(
    lead: Mapping[str, int], least: Mapping[str, int], is_open: Mapping[str, int], total: int
) -> dict[str, int]:
    """source -> groups to start now: first what its quota lacks, then by what it lacks of the lead.

    The sum of the open groups stays at most `total`, if the quotas allow it.
    """
    start = Counter(
        {source: max(0, need - is_open.get(source, 0)) for source, need in least.items()}
    )
    budget = total - sum(is_open.values()) - start.total()
    lacks = {
        source: own - is_open.get(source, 0) - start[source]
        for source, own in lead.items()
        if own > is_open.get(source, 0) + start[source]
    }
    if (lacking := sum(lacks.values())) > budget > 0:
        exact = {source: lack * budget / lacking for source, lack in lacks.items()}
        lacks = _whole(exact, lacks, budget)
    if budget > 0:
        start.update(lacks)
    return dict(+start)
