"""Metrics per source from a step's trajectories. Pure; the names are those of the design.

A mixed mean hides which source got better: every number here is of one source.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_loop.trajectory import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """One trajectory of a trained batch, as read back from where the trainer took it."""

    key: str
    """verl's key, `<uid>_<session>_<index>`."""

    uid: str
    """Its group."""

    draw: int
    """How many prompts of its source were drawn before its own."""

    source: str
    row_id: str
    reward: float
    acc: float
    prompt_ids: list[int]  # (P,)
    response_ids: list[int]  # (T,)
    response_mask: list[int]  # (T,)
    log_probs: list[float]  # (T,)
    record: dict[str, Any]
    """`turn_loop.record_of`."""


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return float(np.mean(collected)) if collected else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def _groups(trajectories: Iterable[TrainedTrajectory]) -> dict[str, list[TrainedTrajectory]]:
    groups: dict[str, list[TrainedTrajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.uid].append(trajectory)
    return groups


def source_metrics(trajectories: Sequence[TrainedTrajectory]) -> dict[str, float]:
    """`mixed/<source>/...` for every source of one step.

    `count` is prompts; `solved_all` and `solved_none` are shares of groups; `pass_rate`,
    `infra_error_rate` and `truncated_rate` are shares of trajectories; `tool_error_rate` is the
    share of tool calls that the server refused; lengths are tokens, times seconds.
    """
    by_source: dict[str, list[TrainedTrajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_source[trajectory.source].append(trajectory)
    metrics: dict[str, float] = {}
    for source, own in sorted(by_source.items()):
        groups = list(_groups(own).values())
        records = [trajectory.record for trajectory in own]
        rewards = [trajectory.reward for trajectory in own]
        calls = sum(record["tool_calls"] for record in records)
        latencies = [s for record in records for s in record["tool_latency_s"]]
        tokens = sum(len(trajectory.response_mask) for trajectory in own)
        values = {
            "count": float(len(groups)),
            "reward/mean": _mean(rewards),
            "reward/std": float(np.std(rewards)),
            "pass_rate": _mean(trajectory.acc >= 1 for trajectory in own),
            "solved_all": _mean(all(t.acc >= 1 for t in group) for group in groups),
            "solved_none": _mean(not any(t.acc >= 1 for t in group) for group in groups),
            "turns/mean": _mean(record["turns"] for record in records),
            "response_length/mean": tokens / len(own),
            "masked_fraction": 1 - sum(sum(t.response_mask) for t in own) / max(1, tokens),
            "tool_calls/mean": calls / len(own),
            "tool_error_rate": sum(r["tool_rejections"] for r in records) / max(1, calls),
            "infra_error_rate": _mean(
                record["stop_reason"] == StopReason.INFRA_ERROR for record in records
            ),
            "tool_latency_s/p50": _percentile(latencies, 50),
            "tool_latency_s/p95": _percentile(latencies, 95),
            "limiter_wait_s/mean": _mean(s for record in records for s in record["limiter_wait_s"]),
            "truncated_rate": _mean(
                record["stop_reason"] in (StopReason.RESPONSE_BUDGET, StopReason.DEADLINE)
                for record in records
            ),
        }
        metrics.update({f"mixed/{source}/{name}": value for name, value in values.items()})
    return metrics


def prompts_per_source(trajectories: Iterable[TrainedTrajectory]) -> dict[str, int]:
    """source -> groups that were trained."""
    counts: dict[str, int] = defaultdict(int)
    for group in _groups(trajectories).values():
        counts[group[0].source] += 1
    return dict(counts)


def ratio_error(planned: Mapping[str, int], trained: Mapping[str, int]) -> int:
    """The largest difference between planned and trained prompts of a source."""
    return max(abs(planned.get(s, 0) - trained.get(s, 0)) for s in planned.keys() | trained.keys())


def validation_metrics(
    sources: Sequence[str], rewards: Sequence[float], accs: Sequence[float]
) -> dict[str, float]:
    """`mixed/<source>/val/...` over one validation.

    Args:
        sources: (V,) source of each validation trajectory.
        rewards: (V,).
        accs: (V,) 1 where the trajectory solved its prompt.
    """
    metrics: dict[str, float] = {}
    for source in sorted(set(sources)):
        own = [i for i, name in enumerate(sources) if name == source]
        metrics[f"mixed/{source}/val/reward/mean"] = _mean(rewards[i] for i in own)
        metrics[f"mixed/{source}/val/pass_rate"] = _mean(accs[i] >= 1 for i in own)
        metrics[f"mixed/{source}/val/count"] = float(len(own))
    return metrics
