"""What sampling waited for, and what sets the pace of asynchronous training. Pure.

The metrics are those of `agent_loop.records.pace_metrics`.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from samplers.lead import Limit
from verl_mixed.views.progress import Line, series, sources_of
from verl_mixed.views.summary import AVERAGE_OVER, mean_of_last, trained

LEAST_WAIT_S = 0.05
"""A shorter wait is one look of the replay buffer, and is not shown."""


def pace_words(lines: Sequence[Line]) -> str | None:
    """One sentence about the last steps; None if no step has these metrics, or none waited."""
    last = trained(lines)[-AVERAGE_OVER:]
    waits = {
        source: fmean(line["metrics"].get(f"mixed/{source}/wait_s", 0.0) for line in last)
        for source in sources_of(last)
    }
    waits = {source: seconds for source, seconds in waits.items() if seconds >= LEAST_WAIT_S}
    if not waits:
        return None
    longest = sorted(waits, key=lambda source: (-waits[source], source))[:3]
    waited = ", ".join(f"{waits[source]:.1f} s for {source}" for source in longest)
    words = f"a step waited {waited}"
    if limit := _limit(last):
        words += f"; {_why(last, limit)}"
    return words


def _limit(last: Sequence[Line]) -> str | None:
    """What set the pace in most of the steps; None in synchronous training."""
    shares = {
        name: fmean(value for _, value in points)
        for name in get_args(Limit)
        if (points := series(last, f"mixed/lead/limit/{name}"))
    }
    return max(shares, key=lambda name: shares[name], default=None)


def _why(last: Sequence[Line], limit: str) -> str:
    if limit == "training":
        return "training sets the pace, not the groups"

    def mean(source: str, name: str) -> float:
        return mean_of_last(series(last, f"mixed/{source}/lead/{name}")) or 0.0

    sources = [name for name in sources_of(last) if mean(name, "groups")]
    if limit == "staleness":
        slowest = max(sources, key=lambda source: mean(source, "sets_pace"))
        return (
            f"{slowest} sets the pace: a group of it is in flight for "
            f"{mean(slowest, 'flight_s'):.1f} s, and its staleness bound "
            f"(max_off_policy_threshold or max_staleness) lets {mean(slowest, 'groups'):.0f} "
            "groups be open"
        )
    flights = ", ".join(f"{name} {mean(name, 'flight_s'):.1f} s" for name in sources)
    key = "num_warmup_batches" if limit == "in_flight" else "mixed.lead"
    return f"the number of open groups sets the pace ({key}); seconds in flight a group: {flights}"
