"""95 % intervals of rewards and pass rates, and what training changed. Pure.

Functions over lines of `metrics.jsonl`, like those of summary.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, sqrt
from statistics import fmean
from types import MappingProxyType
from typing import Literal

from agent_loop.records.evaluation_records import Record
from agent_loop.records.paired import Difference, difference, paired_means
from agent_loop.records.statistics import (
    LEVEL,
    Interval,
    half_width,
    normal_quantile,
    results_of,
    wilson,
)
from verl_mixed.views.progress import Line, series, sources_of
from verl_mixed.views.summary import AVERAGE_OVER, Points, first_and_last, trained, windows

LEAST_STEPS = 3
"""Steps that a mean needs for an interval from the differences between its steps."""

Measure = Literal["validation reward", "validation pass rate", "training reward"]

Validated = Mapping[int, Sequence[Record]]
"""Step -> records of its validation."""

NO_RECORDS: Validated = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over some steps."""

    steps: tuple[int, int]
    """(first, last)"""
    mean: float
    interval: Interval | None = None
    """95 % interval of the mean; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The change of one source's reward from the beginning to the end of a run."""

    source: str
    measure: Measure
    first: Estimate
    last: Estimate
    comparisons: int = 1
    """Sources that are compared beside each other, this one included."""

    paired: Difference | None = None
    """The difference over the same questions; None: a validation has no records."""

    @property
    def change(self) -> float:
        """Last minus first."""
        return self.last.mean - self.first.mean if self.paired is None else self.paired.change

    @property
    def interval(self) -> Interval | None:
        """Interval of the change, corrected for the comparisons; None: not known.

        Without pairs, Newcombe's square-and-add of the two 95 % intervals, each wider by the ratio
        of the normal quantiles.
        """
        if self.paired is not None:
            return self.paired.interval
        first, last = self.first, self.last
        if first.interval is None or last.interval is None:
            return None
        below = sqrt((last.mean - last.interval[0]) ** 2 + (first.interval[1] - first.mean) ** 2)
        above = sqrt((last.interval[1] - last.mean) ** 2 + (first.mean - first.interval[0]) ** 2)
        wider = normal_quantile(1 - (1 - LEVEL) / self.comparisons) / normal_quantile(LEVEL)
        return self.change - wider * below, self.change + wider * above

    @property
    def change_words(self) -> str:
        """The change, and its interval if known: `+0.20 [+0.06, +0.33]`."""
        text = f"{self.change:+.2f}"
        if self.interval is None:
            return text
        low, high = self.interval
        return f"{text} [{low:+.2f}, {high:+.2f}]"

    @property
    def verdict(self) -> str:
        """`no clear change` if the interval of the change includes 0, or too few questions changed
        for a verdict (`Difference.verdict`)."""
        if self.paired is not None:
            return self.paired.verdict
        if self.interval is None:
            return "interval unknown"
        low, high = self.interval
        return "improved" if low > 0 else "got worse" if high < 0 else "no clear change"


def comparison_words(changes: Sequence[Improvement]) -> str:
    """How the changes were compared, a sentence; empty without a change."""
    if not changes:
        return ""
    count = len(changes)
    paired = [one.source for one in changes if one.paired is not None]
    how = "Paired by question"
    if not paired:
        how = "Unpaired"
    elif len(paired) < count:
        others = ", ".join(one.source for one in changes if one.paired is None)
        how = f"Paired by question ({others}: unpaired)"
    if count == 1:
        return f"{how}; 1 comparison, its interval at 95 %."
    level = 100 * (1 - (1 - LEVEL) / count)
    return (
        f"{how}; {count} comparisons, each interval at {level:.1f} %, together 95 % (Bonferroni)."
    )


def improvements(lines: Sequence[Line], validated: Validated = NO_RECORDS) -> list[Improvement]:
    """What training changed, for every source that can be compared.

    | if the source has | compared | interval of each mean |
    | --- | --- | --- |
    | records of two validations | reward of the same questions in both | over questions |
    | two validations | mean reward of the first and the last validation | `wilson` |
    | two validations, rewards outside of [0, 1], and a solved trajectory | pass rate | `wilson` |
    | two training steps | mean reward of both parts of `first_and_last` | Student's t over steps |

    With records, the change is the paired difference of `agent_loop.records.paired`. Without
    them its interval is Newcombe's square-and-add. The last kind of interval is computed from
    `reward/ci95` if a part has fewer than `LEAST_STEPS` steps or all its steps are equal. All
    intervals of changes are corrected for the number of sources (Bonferroni), so that the chance of
    a verdict on any unchanged source is about 5 %. `not_comparable` names the other sources.

    Args:
        validated: at least of the first and the last validation, where they have records.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions",
    method 10.
    """
    changes = (
        _in_validation(lines, source, validated) or _in_training(lines, source)
        for source in sources_of(lines)
    )
    found = [change for change in changes if change is not None]
    return [_paired(one, validated, len(found)) for one in found]


def _paired(one: Improvement, validated: Validated, comparisons: int) -> Improvement:
    """The improvement with the number of comparisons, and with pairs where there are records."""
    first, last = (validated.get(each.steps[0], ()) for each in (one.first, one.last))
    found = None
    if one.measure == "validation reward" and first and last:
        pairs = paired_means(first, last).get(one.source)
        found = None if pairs is None else difference(pairs.first, pairs.last, comparisons)
    return replace(one, comparisons=comparisons, paired=found)


def not_comparable(lines: Sequence[Line]) -> dict[str, str]:
    """Source that `improvements` leaves out -> the reason as text."""
    compared = {one.source for one in improvements(lines)}
    reasons = {}
    for source in sources_of(lines):
        if source not in compared:
            judged = len(validations(lines, source)) or "no"  # 0 or 1
            steps = len(series(trained(lines), f"mixed/{source}/reward/mean")) or "no"
            reasons[source] = (
                f"nothing to compare: it has a reward in {judged} validation and {steps} training "
                "step; it takes two of either"
            )
    return reasons


def validations(
    lines: Sequence[Line], source: str, metric: Literal["reward/mean", "pass_rate"] = "reward/mean"
) -> list[Estimate]:
    """The validations of a source in order, with `wilson`'s interval if the values are in [0, 1].

    A step that was validated again after a resume has only its last validation.
    """
    has_shares = metric == "pass_rate" or _rewards_are_shares(lines, source)
    counts = dict(series(lines, f"mixed/{source}/val/count"))
    estimates = []
    for step, mean in dict(series(lines, f"mixed/{source}/val/{metric}")).items():
        count = counts.get(step, 0.0)
        is_known = has_shares and count >= 1 and 0 <= mean <= 1
        interval = wilson(mean, count) if is_known else None
        estimates.append(Estimate(steps=(step, step), mean=mean, interval=interval))
    return estimates


def _in_validation(lines: Sequence[Line], source: str, validated: Validated) -> Improvement | None:
    measure: Measure = "validation reward"
    rewards, solved = validations(lines, source), validations(lines, source, "pass_rate")
    if len(rewards) < 2:
        return None
    first, last = rewards[0], rewards[-1]
    if all(one.steps[0] in validated for one in (first, last)):
        first, last = (_over_questions(one, source, validated) for one in (first, last))
        return Improvement(source=source, measure=measure, first=first, last=last)
    has_intervals = first.interval is not None and last.interval is not None
    if not has_intervals and len(solved) > 1 and any(one.mean for one in solved):
        measure, first, last = "validation pass rate", solved[0], solved[-1]
    return Improvement(source=source, measure=measure, first=first, last=last)


def _over_questions(one: Estimate, source: str, validated: Validated) -> Estimate:
    """The estimate with the interval over questions of its records."""
    own = [record for record in validated[one.steps[0]] if record.source == source]
    result = results_of(own).get(source)
    found = None if result is None or result.reward is None else result.reward.interval
    return replace(one, interval=found)


def _rewards_are_shares(lines: Sequence[Line], source: str) -> bool:
    """Whether this source's rewards may count as shares.

    True if no reward of the run lies outside of [0, 1], or if the source's mean reward is its pass
    rate in every validation.
    """
    lows = [value for _, value in series(lines, "critic/score/min")]
    highs = [value for _, value in series(lines, "critic/score/max")]
    if min(lows, default=0.0) >= 0 and max(highs, default=1.0) <= 1:
        return True
    solved = dict(series(lines, f"mixed/{source}/val/pass_rate"))
    return all(
        isclose(mean, solved.get(step, -1.0), abs_tol=1e-9)
        for step, mean in series(lines, f"mixed/{source}/val/reward/mean")
    )


def _in_training(lines: Sequence[Line], source: str) -> Improvement | None:
    ends = first_and_last(series(trained(lines), f"mixed/{source}/reward/mean"))
    if ends is None:
        return None
    halves = dict(series(lines, f"mixed/{source}/reward/ci95"))
    first, last = (_over_steps(points, halves) for points in ends)
    return Improvement(source=source, measure="training reward", first=first, last=last)


def _over_steps(points: Points, halves: Mapping[int, float]) -> Estimate:
    """The mean of (step, mean); `halves` is step -> half width of the step's own interval."""
    values = [value for _, value in points]
    half = half_width(values) if len(values) >= LEAST_STEPS else None
    if not half:
        half = _half_of_mean([halves.get(step) for step, _ in points])
    mean = fmean(values)
    # equal values do not mean that the mean is certain
    interval = (mean - half, mean + half) if half else None
    return Estimate(steps=(points[0][0], points[-1][0]), mean=mean, interval=interval)


def _half_of_mean(halves: Sequence[float | None]) -> float | None:
    """Half width of a mean of means with these half widths; None if one is not known."""
    known = [half for half in halves if half is not None]
    if len(known) < len(halves):
        return None
    return sqrt(sum(half**2 for half in known)) / len(known)


def reward_band(lines: Sequence[Line], source: str, over: int = AVERAGE_OVER) -> list[Estimate]:
    """Moving average of a source's training reward, with the interval from `reward/ci95`.

    A window with a step that has no `reward/ci95` has no point.
    """
    name = f"mixed/{source}/reward/mean"
    band = []
    for window in windows([line for line in trained(lines) if name in line["metrics"]], over):
        metrics = [line["metrics"] for line in window]
        half = _half_of_mean([each.get(f"mixed/{source}/reward/ci95") for each in metrics])
        if half is not None:
            mean = fmean(each[name] for each in metrics)
            band.append(_of_window(window, mean, (mean - half, mean + half)))
    return band


def pass_rate_band(lines: Sequence[Line], source: str, over: int = AVERAGE_OVER) -> list[Estimate]:
    """Moving average of a source's pass rate, with `wilson`'s interval.

    Each step counts by its judged groups. A group counts as one observation, as if all its
    trajectories were equal, so the interval is too wide rather than too narrow.
    """
    name = f"mixed/{source}/pass_rate"
    band = []
    for window in windows([line for line in trained(lines) if name in line["metrics"]], over):
        judged = [_judged(line, source) for line in window]
        groups = sum(judged)
        if groups >= 1:
            shares = [line["metrics"][name] for line in window]
            mean = sum(share * each for share, each in zip(shares, judged, strict=True)) / groups
            band.append(_of_window(window, mean, wilson(min(1.0, max(0.0, mean)), groups)))
    return band


def _of_window(window: Sequence[Line], mean: float, interval: Interval) -> Estimate:
    return Estimate(steps=(window[0]["step"], window[-1]["step"]), mean=mean, interval=interval)


def _judged(line: Line, source: str) -> float:
    """Groups of a step with a judged trajectory; if not logged, the least possible number."""
    metrics, prefix = line["metrics"], f"mixed/{source}"
    lost = sum(metrics.get(f"{prefix}/{kind}_error_rate", 0.0) for kind in ("infra", "loop"))
    least = metrics.get(f"{prefix}/count", 0.0) * max(0.0, 1 - lost)
    return metrics.get(f"{prefix}/judged", least)
