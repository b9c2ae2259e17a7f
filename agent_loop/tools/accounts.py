"""What the tool calls of a source came to, in numbers of constant size. Pure."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_PER_DOUBLING = 8
"""Bins of a histogram per factor of two: a percentile is right to 5 %."""


@dataclass(slots=True)
class Histogram:
    """Durations, counted in bins of equal ratio."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[math.floor(math.log2(max(seconds, 1e-9)) * _PER_DOUBLING)] += 1

    def percentile(self, percent: float) -> float:
        """The middle of the bin that holds it; 0 without a duration."""
        wanted, seen = percent / 100 * self.counts.total(), 0
        for place in sorted(self.counts):
            seen += self.counts[place]
            if seen >= wanted:
                return 2 ** ((place + 0.5) / _PER_DOUBLING)
        return 0.0


@dataclass(slots=True)
class Account:
    """The calls of one source to one tool."""

    calls: int = 0
    cached: int = 0
    """Calls that an answer of another call served."""

    requests: int = 0
    retries: int = 0
    rejected: int = 0
    unavailable: int = 0
    latency_s: Histogram = field(default_factory=Histogram)
    """Of calls that brought a result and were not cached; waiting for limiter and slot apart."""


COUNTS = ("calls", "cached", "requests", "retries", "rejected", "unavailable")

Accounts = Mapping[tuple[str, str], Account]
"""(source, tool) -> its account."""


def totals(accounts: Accounts) -> Counter[str]:
    """The counts of all together."""
    return Counter({name: sum(getattr(a, name) for a in accounts.values()) for name in COUNTS})


def account_metrics(accounts: Accounts) -> dict[str, float]:
    """`mixed/<source>/tools/<tool>/...`; calls without a source are `mixed/tools/<tool>/...`."""
    metrics: dict[str, float] = {}
    for (source, tool), account in sorted(accounts.items()):
        place = f"mixed/{source}/tools/{tool}" if source else f"mixed/tools/{tool}"
        metrics |= {f"{place}/{name}": float(getattr(account, name)) for name in COUNTS}
        metrics[f"{place}/cache_hit_rate"] = account.cached / max(1, account.calls)
        metrics[f"{place}/latency_s/p50"] = account.latency_s.percentile(50)
        metrics[f"{place}/latency_s/p95"] = account.latency_s.percentile(95)
    return metrics


def add_up(of_clients: "list[Accounts]") -> dict[tuple[str, str], Account]:
    """The accounts of several clients as one."""
    summed: dict[tuple[str, str], Account] = {}
    for accounts in of_clients:
        for key, account in accounts.items():
            total = summed.setdefault(key, Account())
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(account, name))
            total.latency_s.counts.update(account.latency_s.counts)
    return summed
