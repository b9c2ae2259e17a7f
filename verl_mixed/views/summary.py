"""Means, tables and phase times of a run, for the live screen and the report. Pure.

Functions over lines of `metrics.jsonl`. A metric that was not logged gives no number, never a 0.
Intervals of means are in estimates.py, the mixture is in mixture_rows.py.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, pvariance
from typing import TypeVar

from verl_mixed.views.progress import Line, phase_times, series, sources_of

AVERAGE_OVER = 10
"""Steps of every moving average, and of the first and the last part of a run that are compared."""

Points = Sequence[tuple[int, float]]

_Point = TypeVar("_Point")

SOURCE_FACTS: Mapping[str, str] = {
    "reward/mean": "reward",
    "pass_rate": "solved",
    "count": "prompts a step",
    "solved_all": "groups all solved",
    "solved_none": "groups none solved",
    "zero_variance": "groups all equal",
    "too_small": "groups too small",
    "advantage_share": "share of |advantage|",
    "gradient_token_share": "share of gradient tokens",
    "turns/mean": "turns",
    "prompt_length/mean": "prompt tokens",
    "response_length/mean": "response tokens",
    "response_length/max": "longest response, tokens",
    "masked_fraction": "masked",
    "truncated_rate": "out of turns or tokens",
    "entropy/mean": "entropy, nats",
    "kl/mean": "KL to the reference",
    "importance/mean": "importance weight",
    "tool_calls/mean": "tool calls",
    "tool_error_rate": "tool calls rejected",
    "tool_latency_s/p50": "tool latency p50, s",
    "tool_latency_s/p95": "tool latency p95, s",
    "tool_cache_hit_rate": "tool cache hits",
    "limiter_wait_s/mean": "limiter wait per call, s",
    "infra_error_rate": "lost to infrastructure",
    "loop_error_rate": "lost to exceptions",
    "deadline_rate": "lost to deadlines",
}
"""`mixed/<source>/<name>` -> the title of its row in a table, in the order of the rows."""


PHASE_WORDS: Mapping[str, str] = {
    "gen": "generation",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "policy update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
    "accounts": "accounts",
    "testing": "validation",
}
"""verl's name of a phase of the step -> the name that views show."""

AFTER_STEP = "testing"
"""The phase that `timing_s/step` does not include."""


def windows(points: Sequence[_Point], over: int = AVERAGE_OVER) -> Iterator[Sequence[_Point]]:
    """For each point, a window of at most `over` points that ends with it."""
    return (points[max(0, end - over) : end] for end in range(1, len(points) + 1))


def moving_average(points: Points, over: int = AVERAGE_OVER) -> list[tuple[int, float]]:
    """(step, mean of the window that ends with the point); windows of at most `over` points."""
    return [
        (window[-1][0], fmean(value for _, value in window)) for window in windows(points, over)
    ]


def mean_of_last(points: Points, over: int = AVERAGE_OVER) -> float | None:
    """Mean of the last `over` points; None without a point."""
    return fmean(value for _, value in points[-over:]) if points else None


def increments(points: Points, restarts: Collection[int] = ()) -> list[tuple[int, float]]:
    """(step, gain) of a counter that the trainer starts at 0.

    A gain is the difference from the point before. After a restart (see `restarts_of`), and where
    the counter fell, the gain is the counter itself.
    """

    def is_restarted(after: int, until: int) -> bool:
        return any(after < step <= until for step in restarts)

    return [
        (step, value if value < before or is_restarted(last, step) else value - before)
        for (last, before), (step, value) in pairwise([(0, 0.0), *points])
    ]


def restarts_of(lines: Sequence[Line], starts: Iterable[float]) -> list[int]:
    """The first step after each start (seconds since 1970) of a run that has a step already."""
    moments = [(line["time"], line["step"]) for line in trained(lines)]
    before = ([step for moment, step in moments if moment < start] for start in starts)
    return sorted({max(steps) + 1 for steps in before if steps})


def in_buckets(steps: Sequence[int], most: int) -> list[list[int]]:
    """Indices of `steps` (at least one), grouped by at most `most` equal parts of their range.

    Empty parts are left out. For example steps 1, 2, 9, 10 in at most 2 parts give
    [[0, 1], [2, 3]].
    """
    first, last = min(steps), max(steps)
    groups: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault((step - first) * most // (last - first + 1), []).append(i)
    return [indices for _, indices in sorted(groups.items())]


def first_and_last(points: Points) -> tuple[Points, Points] | None:
    """The first and the last `AVERAGE_OVER` points; None if there are fewer than two points.

    A short series is divided in two halves, so no point is in both parts.
    """
    over = min(AVERAGE_OVER, len(points) // 2)
    return (points[:over], points[-over:]) if over else None


def trained(lines: Sequence[Line]) -> list[Line]:
    """The lines of optimizer steps: without step 0, the validation before training."""
    return [line for line in lines if line["step"] > 0]


def source_table(lines: Sequence[Line]) -> dict[str, dict[str, tuple[float, ...]]]:
    """Fact of `SOURCE_FACTS` -> source -> (mean of the first part, mean of the last part).

    The parts are those of `first_and_last`. A series of one point gives (its value,); facts and
    sources that were never logged have no entry.
    """
    table: dict[str, dict[str, tuple[float, ...]]] = {}
    steps, sources = trained(lines), sources_of(lines)
    for fact in SOURCE_FACTS:
        for source in sources:
            points = series(steps, f"mixed/{source}/{fact}")
            ends = first_and_last(points) or ([points] if points else [])
            if ends:
                means = tuple(fmean(value for _, value in end) for end in ends)
                table.setdefault(fact, {})[source] = means
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """The rewards of one source in the last steps."""

    source: str
    steps: int
    mean: float
    least: float | None
    """Smallest reward of a trajectory; None where an older release did not log it."""
    most: float | None
    std: float
    """Standard deviation over the trajectories, each step weighing the same."""


def reward_rows(lines: Sequence[Line], over: int = AVERAGE_OVER) -> list[RewardRow]:
    """A row for each source, over the last `over` steps in which it has a reward."""
    rows, steps = [], trained(lines)
    for source in sources_of(lines):
        prefix = f"mixed/{source}/reward"
        means, stds, leasts, mosts = (
            [value for _, value in series(steps, f"{prefix}/{name}")][-over:]
            for name in ("mean", "std", "min", "max")
        )
        if means and stds:
            row = RewardRow(
                source=source,
                steps=len(means),
                mean=fmean(means),
                least=min(leasts, default=None),
                most=max(mosts, default=None),
                # of all trajectories: the mean variance of a step, and the variance of the means
                std=sqrt(fmean(std**2 for std in stds) + pvariance(means)),
            )
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRow:
    """One tool over some steps."""

    tool: str
    calls: int
    failed: int
    """Calls without a result: the model's mistakes and faults of the infrastructure."""
    p50_s: float | None
    """Median over the steps of their p50."""
    p95_s: float | None
    worst_p95_s: float | None

    @property
    def error_rate(self) -> float | None:
        """Share of calls that failed; None without a call."""
        return self.failed / self.calls if self.calls else None


def tool_rows(lines: Sequence[Line], source: str | None = None) -> list[ToolRow]:
    """A row for each tool, over all lines; of the calls of one source, or of all (None)."""
    prefix = "mixed/tools" if source is None else f"mixed/{source}/tools"
    tools = {
        name.removeprefix(f"{prefix}/").removesuffix("/calls")
        for line in lines
        for name in line["metrics"]
        if name.startswith(f"{prefix}/") and name.endswith("/calls")
    }
    rows = []
    for tool in sorted(tools):
        calls, failed = 0.0, 0.0
        for line in lines:
            step_calls = line["metrics"].get(f"{prefix}/{tool}/calls", 0.0)
            calls += step_calls
            failed += step_calls * line["metrics"].get(f"{prefix}/{tool}/error_rate", 0.0)
        p50_s = [value for _, value in series(lines, f"{prefix}/{tool}/latency_s/p50")]
        p95_s = [value for _, value in series(lines, f"{prefix}/{tool}/latency_s/p95")]
        rows.append(
            ToolRow(
                tool=tool,
                calls=round(calls),
                failed=round(failed),
                p50_s=median(p50_s) if p50_s else None,
                p95_s=median(p95_s) if p95_s else None,
                worst_p95_s=max(p95_s, default=None),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What took the time of a step; of several steps, the means."""

    phase: str
    """The longest phase, by verl's name."""
    phase_s: float
    step_s: float
    validation_s: float
    """Mean seconds of validation for each step, which `step_s` does not include."""
    tool_share: float | None
    """Share of the trajectories' time (not of the step's) that tools took, without waiting for the
    rate limiter; None: not logged."""
    limiter_share: float | None
    """Share of the trajectories' time that they waited for the rate limiter; None: not logged."""

    @property
    def share(self) -> float:
        """Share of the step that the longest phase took."""
        return self.phase_s / self.step_s


def limits_of(lines: Sequence[Line]) -> Limits | None:
    """What took the time of the steps of these lines; None if no step was timed."""
    timed = [line for line in trained(lines) if line["metrics"].get("timing_s/step", 0.0) > 0]
    means = phase_means(timed)
    validation_s = means.pop(AFTER_STEP, 0.0)
    if not means:
        return None
    phase = next(iter(means))  # the longest
    tool_share, limiter_share = _inside_generation(timed)
    return Limits(
        phase=phase,
        phase_s=means[phase],
        step_s=fmean(line["metrics"]["timing_s/step"] for line in timed),
        validation_s=validation_s,
        tool_share=tool_share,
        limiter_share=limiter_share,
    )


def phase_means(lines: Sequence[Line]) -> dict[str, float]:
    """Phase -> mean seconds a step, longest first; a step without the phase counts as 0 s."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for phase, seconds in phase_times(line["metrics"]).items():
            totals[phase] += seconds
    longest = sorted(totals.items(), key=lambda item: -item[1])
    return {phase: total / len(lines) for phase, total in longest}


def _inside_generation(lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """(share of tools, share of waiting for the limiter) of the trajectories' time."""
    model_s = tools_s = wait_s = 0.0
    for line in lines:
        metrics = line["metrics"]
        for source in sources_of([line]):
            prefix = f"mixed/{source}"
            weight = metrics.get(f"{prefix}/trajectories", metrics.get(f"{prefix}/count", 0.0))
            own_model_s = metrics.get(f"{prefix}/generate_s/mean")
            own_tools_s = metrics.get(f"{prefix}/tools_s/mean")
            if own_model_s is None or own_tools_s is None:
                continue
            model_s += weight * own_model_s
            tools_s += weight * own_tools_s
            calls = weight * metrics.get(f"{prefix}/tool_calls/mean", 0.0)
            wait_s += calls * metrics.get(f"{prefix}/limiter_wait_s/mean", 0.0)
    total_s = model_s + tools_s
    if total_s <= 0:
        return None, None
    wait_s = min(wait_s, tools_s)  # calls of one turn wait at the same time
    return (tools_s - wait_s) / total_s, wait_s / total_s
