"""The step's metrics for Prometheus, exported by each Ray node.

Ray adapter: `ray.util.metrics.Gauge`; Ray puts `ray_` before each name. The variable part of a name
in `metrics.jsonl` becomes a label, so that one query shows all sources:

| metrics.jsonl                             | Prometheus                                      |
|-------------------------------------------|-------------------------------------------------|
| `mixed/<source>/reward/mean`              | `ray_mixed_source_reward_mean{run,source}`      |
| `mixed/<source>/tools/<tool>/calls`       | `ray_mixed_source_tools_calls{run,source,tool}` |
| `timing_s/gen`                            | `ray_mixed_timing_s{run,phase}`                 |
| `actor/grad_norm`, `perf/...`, ...        | `ray_verl_actor_grad_norm{run}`                 |
"""

import math
import re
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_LABELS = {"reward_parts": "part", "evicted": "outcome", "infra_errors": "tool", "tools": "tool"}
"""Part of a name -> the label of the part after it."""

_VERLS = ("actor", "critic", "perf", "prompt_length", "response_length", "rollout_corr", "training")
"""verl's metrics that have one value for the whole step."""

_AGAIN_S = 5.0
"""Seconds after which a gauge is set again, because Ray forgets a gauge after 20 s."""


class Series(NamedTuple):
    """Name, without Ray's `ray_`, and labels of a metric in Prometheus."""

    name: str
    labels: Mapping[str, str]


def series_of(metric: str, sources: Collection[str]) -> Series | None:
    """The series of a name in `metrics.jsonl`; None if the metric is not exported."""
    first, *rest = metric.split("/")
    if first == "timing_s" and len(rest) == 1:
        return Series("mixed_timing_s", {"phase": rest[0]})
    if first in _VERLS:
        return Series(_plain("verl", first, *rest), {})
    if first != "mixed" or not rest:
        return None
    parts, labels = ["mixed"], {}
    own = [name for name in sources if metric.startswith(f"mixed/{name}/")]
    if own:
        labels["source"] = source = max(own, key=len)
        parts.append("source")
        rest = metric.removeprefix(f"mixed/{source}/").split("/")
    while rest:
        part = rest.pop(0)
        parts.append(part)
        if part in _LABELS and rest:
            labels[_LABELS[part]] = rest.pop(0)
    return Series(_plain(*parts), labels)


def _plain(*parts: str) -> str:
    return re.sub(r"\W", "_", "_".join(parts), flags=re.ASCII)


class Exposition:
    """Sets a gauge for each metric of the step. A metric that a later step lacks becomes NaN.

    A thread sets all gauges again every few seconds until the next step or `close`.
    """

    def __init__(self, run: str, sources: Collection[str]) -> None:
        self._run = run
        self._sources = frozenset(sources)
        self._gauges: dict[str, Any] = {}
        self._shown: dict[str, tuple[Series, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, metrics: Mapping[str, float]) -> None:
        named = {name: series_of(name, self._sources) for name in metrics}
        with self._lock:
            for name in self._shown.keys() - metrics.keys():
                self._set(self._shown[name][0], math.nan)
            self._shown = {name: (of, metrics[name]) for name, of in named.items() if of}
            self._set_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="exposition", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop setting the gauges, so that Ray forgets them."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        while not self._closed.wait(_AGAIN_S):
            with self._lock:
                self._set_all()

    def _set_all(self) -> None:
        for series, value in self._shown.values():
            self._set(series, value)

    def _set(self, series: Series, value: float) -> None:
        from ray.util.metrics import Gauge

        tags = {"run": self._run, **series.labels}
        if series.name not in self._gauges:
            description = "of the last step, see agent_loop/records/exposition.py"
            self._gauges[series.name] = Gauge(series.name, description, tuple(tags))
        self._gauges[series.name].set(value, tags=tags)
