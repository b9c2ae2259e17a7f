"""Prometheus metrics of a rate limiter's state file, read at each scrape."""

import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from rate_limit.snapshot import WAIT_BOUNDS_S, Snapshot, SourceSnapshot
from rate_limit.stats import snapshot_of

_log = logging.getLogger(__name__)


class LimiterCollector(Collector):
    """`limiter_*` metrics of a state file; no metrics while the file does not exist."""

    def __init__(self, path: Path):
        self.path = path

    def collect(self) -> Iterator[Metric]:
        try:
            metrics = list(metrics_of(snapshot_of(self.path)))
        except FileNotFoundError:
            return  # no call was made yet
        except Exception as error:  # no fault may hide the other metrics of the server
            kind = type(error).__name__
            _log.warning("no metrics of limiter=%s: %s: %s", self.path, kind, error)
            return
        yield from metrics


def metrics_of(snapshot: Snapshot) -> Iterator[Metric]:
    """The snapshot as metric families."""
    yield CounterMetricFamily("limiter_granted", "Calls granted.", snapshot.granted)
    yield CounterMetricFamily("limiter_penalties", "Pauses and overloads.", snapshot.penalties)
    yield CounterMetricFamily("limiter_abandoned", "Slots nobody used.", snapshot.abandoned)
    for name, words, value in (
        ("utilisation", "Calls granted in the last minute, of the rate.", snapshot.utilisation),
        ("rate_factor", "Share of the rate in force.", snapshot.rate_factor),
        ("paused_seconds", "Until the pause ends.", snapshot.paused_s),
        ("rate_per_minute", "Sustained calls a minute.", snapshot.per_minute),
        ("burst", "Calls back to back.", snapshot.burst),
    ):
        yield GaugeMetricFamily(f"limiter_{name}", words, value)
    passed = CounterMetricFamily("limiter_calls", "Calls that passed.", labels=["source"])
    refused = CounterMetricFamily("limiter_refused", "Calls turned away.", labels=["source"])
    waiting = GaugeMetricFamily("limiter_waiting", "Callers that wait now.", labels=["source"])
    waits = HistogramMetricFamily("limiter_wait_seconds", "Waits of callers.", labels=["source"])
    for name, source in snapshot.sources.items():
        passed.add_metric([name], source.granted)
        refused.add_metric([name], source.refused)
        waiting.add_metric([name], source.waiting)
        waits.add_metric([name], _buckets(source), source.waited_s)
    yield from (passed, refused, waiting, waits)


def _buckets(source: SourceSnapshot) -> list[tuple[str, float]]:
    """Cumulative buckets in Prometheus' form; a call that passed at once waited 0 s."""
    below = source.granted - sum(source.waits)
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*WAIT_BOUNDS_S, "+Inf"), source.waits, strict=True):
        below += count
        buckets.append((str(bound), below))
    return buckets
