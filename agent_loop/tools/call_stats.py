"""Counters and latency histograms of tool calls, by source and tool, and their metrics.

Pure. The size of the numbers does not grow with the number of calls.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_PER_DOUBLING = 8
"""Bins of a histogram per factor of two. A bin is 9 % wide, so a percentile is off by 5 % at
most."""


@dataclass(slots=True)
class Histogram:
    """Durations in seconds, counted in bins whose bounds have equal ratios."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[math.floor(math.log2(max(seconds, 1e-9)) * _PER_DOUBLING)] += 1

    def percentile(self, percent: float) -> float:
        """The middle of the bin with this percentile, in seconds; 0 without durations."""
        rank, below = percent / 100 * self.counts.total(), 0
        for index in sorted(self.counts):
            below += self.counts[index]
            if below >= rank:
                return 2 ** ((index + 0.5) / _PER_DOUBLING)
        return 0.0


@dataclass(slots=True)
class CallStats:
    """The calls of one source to one tool."""

    calls: int = 0
    cached: int = 0
    """Calls that were answered from a cache or by an equal call under way."""

    requests: int = 0
    retries: int = 0
    rejected: int = 0
    unavailable: int = 0
    latency_s: Histogram = field(default_factory=Histogram)
    """Of calls with a result that was not cached; without the wait for limiter and slot."""


COUNTS = ("calls", "cached", "requests", "retries", "rejected", "unavailable")

StatsByTool = Mapping[tuple[str, str], CallStats]
"""(source, tool) -> stats of its calls."""


def totals(by_tool: StatsByTool) -> Counter[str]:
    """The counts summed over all sources and tools."""
    return Counter({name: sum(getattr(s, name) for s in by_tool.values()) for name in COUNTS})


def call_metrics(by_tool: StatsByTool) -> dict[str, float]:
    """`mixed/<source>/tools/<tool>/...`; calls without a source are `mixed/tools/<tool>/...`."""
    metrics: dict[str, float] = {}
    for (source, tool), stats in sorted(by_tool.items()):
        prefix = f"mixed/{source}/tools/{tool}" if source else f"mixed/tools/{tool}"
        metrics |= {f"{prefix}/{name}": float(getattr(stats, name)) for name in COUNTS}
        metrics[f"{prefix}/cache_hit_rate"] = stats.cached / max(1, stats.calls)
        metrics[f"{prefix}/latency_s/p50"] = stats.latency_s.percentile(50)
        metrics[f"{prefix}/latency_s/p95"] = stats.latency_s.percentile(95)
    return metrics


def sum_stats(of_clients: "list[StatsByTool]") -> dict[tuple[str, str], CallStats]:
    """The stats of several clients, summed by source and tool."""
    summed: dict[tuple[str, str], CallStats] = {}
    for by_tool in of_clients:
        for key, stats in by_tool.items():
            total = summed.setdefault(key, CallStats())
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            total.latency_s.counts.update(stats.latency_s.counts)
    return summed
