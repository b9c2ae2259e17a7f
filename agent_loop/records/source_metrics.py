"""Metrics per source from a step's trajectories. Pure.

A mean over all sources hides which source improved, so every metric here belongs to one source.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from statistics import fmean
from typing import TypeVar

import msgspec
import numpy as np

from agent_loop.records.evaluation_records import Record
from agent_loop.records.statistics import half_width
from agent_loop.records.trajectory_record import TRUNCATED, Call, StopReason, TrajectoryRecord

Kind = TypeVar("Kind", TrajectoryRecord, Record)


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return float(np.mean(collected)) if collected else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def sessions_of(rows: Iterable[TrajectoryRecord]) -> list[TrajectoryRecord]:
    """The sessions of some rows, in the order of their first ones.

    A session of several rows has the sums of their tokens, all their turns and calls, and the
    prompt of its first one. Its verdict is the same in each.
    """
    sessions: dict[str, list[TrajectoryRecord]] = defaultdict(list)
    for row in rows:
        sessions[row.session].append(row)
    return [
        own[0]
        if len(own) == 1
        else msgspec.structs.replace(
            own[0],
            response_tokens=sum(row.response_tokens or 0 for row in own),
            trained_tokens=sum(row.trained_tokens or 0 for row in own),
            turns=[turn for row in own for turn in row.turns],
            calls=[call for row in own for call in row.calls],
            rows=len(own),
        )
        for own in sessions.values()
    ]


def groups_of(trajectories: Iterable[TrajectoryRecord]) -> dict[str, list[TrajectoryRecord]]:
    """uid -> the trajectories of its group, in the order of first appearance."""
    groups: dict[str, list[TrajectoryRecord]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.uid].append(trajectory)
    return groups


def source_metrics(rows: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """`mixed/<source>/...` for every source of one step, and `mixed/tools/<tool>/...`; the table is
    in docs/mixture.md."""
    sessions = sessions_of(rows)
    metrics: dict[str, float] = {}
    for source, own in sorted(_by_source(sessions).items()):
        values = _of_groups(own) | _of_trajectories(own) | _of_calls(own)
        metrics.update({f"mixed/{source}/{name}": value for name, value in values.items()})
        metrics.update(_of_tools(f"mixed/{source}/tools", own))
    if len(sessions) < len(rows):
        metrics |= _of_causes(rows, _by_source(sessions))
    return metrics | _of_tools("mixed/tools", sessions)


def _by_source(records: Iterable[Kind]) -> dict[str, list[Kind]]:
    by_source: dict[str, list[Kind]] = defaultdict(list)
    for record in records:
        by_source[record.source].append(record)
    return by_source


def _of_causes(rows: Iterable[TrajectoryRecord], sessions: Mapping[str, Sized]) -> dict[str, float]:
    """`mixed/<source>/rows/<cause>`: rows a session that began for it, in sessions of several."""
    causes = Counter((row.source, row.cause) for row in rows if row.cause and row.rows != 1)
    return {
        f"mixed/{source}/rows/{cause.replace(' ', '_')}": count / len(sessions[source])
        for (source, cause), count in causes.items()
    }


def _of_groups(own: Sequence[TrajectoryRecord]) -> dict[str, float]:
    groups = [[t for t in group if t.is_judged] for group in groups_of(own).values()]
    judged = [group for group in groups if group]
    # The interval over group means, because only groups are independent samples.
    means = [_mean(t.reward for t in group) for group in judged]
    metrics = {"reward/ci95": half_width(means)} if len(means) > 1 else {}
    if judged:
        metrics["solved_all"] = _mean(all(t.acc >= 1 for t in group) for group in judged)
        metrics["solved_none"] = _mean(not any(t.acc >= 1 for t in group) for group in judged)
    return metrics | {
        "count": float(len(groups)),
        "judged": float(len(judged)),
        "zero_variance": _mean(
            len(group) > 1 and len({t.reward for t in group}) == 1 for group in groups
        ),
        "too_small": _mean(len(group) < 2 for group in groups),
    }


def _of_trajectories(own: Sequence[TrajectoryRecord]) -> dict[str, float]:
    tokens = sum(t.response_tokens or 0 for t in own)
    reasons = Counter(t.stop_reason for t in own)
    raised = sum(t.loop_error is not None for t in own)
    lost_to = Counter(t.fault_tool for t in own if t.is_lost)
    turns = [turn for t in own for turn in t.turns]
    metrics = _of_verdicts([t for t in own if t.is_judged])
    if read := [turn for turn in turns if turn.read_tokens]:
        # how much of the prompts of an agent's requests earlier requests of its session had
        reused = sum(turn.reused_tokens or 0 for turn in read)
        metrics["prefix_reused"] = reused / sum(turn.read_tokens or 0 for turn in read)
    if misfits := [turn.misfit for turn in turns if turn.misfit is not None]:
        # how often the model missed the form that an agent's request demanded
        metrics["misfit_rate"] = _mean(bool(misfit) for misfit in misfits)
    return metrics | {
        "trajectories": float(len(own)),
        "rows/mean": _mean(t.rows or 1 for t in own),
        "turns/mean": _mean(len(t.turns) for t in own),
        "generate_s/mean": _mean(sum(x.generate_s for x in t.turns) for t in own),
        "tools_s/mean": _mean(sum(x.tools_s for x in t.turns) for t in own),
        "prompt_length/mean": _mean(t.prompt_tokens or 0 for t in own),
        "response_length/mean": tokens / len(own),
        "response_length/max": float(max(t.response_tokens or 0 for t in own)),
        "masked_fraction": 1 - sum(t.trained_tokens or 0 for t in own) / max(1, tokens),
        "infra_error_rate": (reasons[StopReason.INFRA_ERROR] - raised) / len(own),
        "loop_error_rate": raised / len(own),
        "deadline_rate": reasons[StopReason.DEADLINE] / len(own),
        "truncated_rate": sum(reasons[reason] for reason in TRUNCATED) / len(own),
        **{f"infra_errors/{tool}": float(count) for tool, count in lost_to.items()},
    }


def _of_verdicts(judged: Sequence[TrajectoryRecord]) -> dict[str, float]:
    if not judged:
        return {}
    parts: dict[str, list[float]] = defaultdict(list)  # of the reward
    for trajectory in judged:
        for name, value in trajectory.reward_parts.items():
            if name not in ("infra_error", "loop_error"):  # these are no parts of a reward
                parts[name].append(value)
    return _of_rewards([t.reward for t in judged]) | {
        "pass_rate": _mean(t.acc >= 1 for t in judged),
        **{f"reward_parts/{name}": _mean(values) for name, values in sorted(parts.items())},
    }


def _of_rewards(rewards: Sequence[float]) -> dict[str, float]:
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(np.std(rewards)),
        "reward/min": float(min(rewards)),
        "reward/max": float(max(rewards)),
    }


def _of_calls(own: Sequence[TrajectoryRecord]) -> dict[str, float]:
    calls = [call for t in own for call in t.calls]
    latencies = [call.latency_s for call in calls if call.tool or call.status == "ok"]
    return {
        "tool_calls/mean": len(calls) / len(own),
        "tool_error_rate": sum(c.status == "rejected" for c in calls) / max(1, len(calls)),
        "tool_latency_s/p50": _percentile(latencies, 50),
        "tool_latency_s/p95": _percentile(latencies, 95),
        "tool_cache_hit_rate": _mean(call.attempts == 0 for call in calls if call.status == "ok"),
        "limiter_wait_s/mean": _mean(call.limiter_wait_s for call in calls),
        "server_wait_s/sum": float(sum(call.server_wait_s for call in calls)),
    }


def _of_tools(prefix: str, own: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """The metrics per tool; latencies are those of results that came from a server."""
    by_tool: dict[str, list[Call]] = defaultdict(list)
    for call in (call for t in own for call in t.calls):
        if call.tool:
            by_tool[call.tool].append(call)
    metrics: dict[str, float] = {}
    for tool, calls in sorted(by_tool.items()):
        latencies = [call.latency_s for call in calls if call.attempts]
        metrics[f"{prefix}/{tool}/calls"] = float(len(calls))
        metrics[f"{prefix}/{tool}/error_rate"] = _mean(call.status != "ok" for call in calls)
        if latencies:
            metrics[f"{prefix}/{tool}/latency_s/p50"] = _percentile(latencies, 50)
            metrics[f"{prefix}/{tool}/latency_s/p95"] = _percentile(latencies, 95)
    return metrics


def staleness_metrics(trajectories: Sequence[TrajectoryRecord], current: int) -> dict[str, float]:
    """`mixed/<source>/staleness/{mean,max}`: weight versions between sampling and training.

    Counted over the trained tokens. All tokens of a turn count as sampled by its oldest weights.

    Args:
        current: version of the weights that are about to be updated.
    """
    lags: defaultdict[str, Counter[int]] = defaultdict(Counter)  # source -> lag -> tokens
    for trajectory in trajectories:
        if trajectory.trained_tokens:
            for turn in trajectory.turns:
                # A checkpoint of release 1.0.0 may hold trajectories without versions of turns.
                if turn.tokens and (oldest := turn.min_global_steps) is not None:
                    lags[trajectory.source][current - oldest] += turn.tokens
    metrics: dict[str, float] = {}
    for source, tokens in sorted(lags.items()):
        mean = sum(lag * count for lag, count in tokens.items()) / tokens.total()
        metrics[f"mixed/{source}/staleness/mean"] = mean
        metrics[f"mixed/{source}/staleness/max"] = float(max(tokens))
    return metrics


def loop_lag_metrics(trajectories: Iterable[TrajectoryRecord]) -> dict[str, float]:
    """`mixed/loop_lag_s/p99`: how late event loops of agent loop workers ran, in seconds.

    Each trajectory has the 99th percentile of its worker's lag while it ran; the metric is the 99th
    percentile of these. Trajectories of a checkpoint of release 1.0.0 have none.
    """
    lags = [t.loop_lag_s for t in trajectories if t.loop_lag_s is not None]
    return {"mixed/loop_lag_s/p99": _percentile(lags, 99)} if lags else {}


def eviction_metrics(prompts: Iterable[tuple[str, str]]) -> dict[str, float]:
    """`mixed/<source>/evicted/<outcome>`: replaced prompts; a missing metric means 0.

    The prompts of the step are given as (source, outcome), with the outcomes of the ledger.
    """
    counts = Counter(pair for pair in prompts if pair[1] not in ("trained", "unfinished"))
    return {
        f"mixed/{source}/evicted/{outcome}": float(count)
        for (source, outcome), count in sorted(counts.items())
    }


def prompts_per_source(trajectories: Iterable[TrajectoryRecord]) -> dict[str, int]:
    """source -> trained groups."""
    return dict(Counter(group[0].source for group in groups_of(trajectories).values()))


def validation_metrics(records: Sequence[Record]) -> dict[str, float]:
    """`mixed/<source>/val/...` of one validation; a lost trajectory does not count as a failed one.

    It counts only in `infra_error_rate`. A source whose trajectories were all lost has no reward
    and no pass rate.
    """
    metrics: dict[str, float] = {}
    for source, own in sorted(_by_source(records).items()):
        judged = [record for record in own if not record.lost]
        values: dict[str, float] = {}
        if judged:
            rewards = [record.reward for record in judged]
            values = _of_rewards(rewards) | {"reward/mean": fmean(rewards)}
            values["pass_rate"] = fmean(record.is_solved for record in judged)
        values["count"] = float(len(judged))
        values["infra_error_rate"] = (len(own) - len(judged)) / len(own)
        metrics.update({f"mixed/{source}/val/{name}": value for name, value in values.items()})
    return metrics
