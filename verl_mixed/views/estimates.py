"""95 % intervals of rewards and pass rates, and what training changed. Pure.

Functions over lines of `metrics.jsonl`, like those of summary.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, sqrt
from statistics import fmean
from typing import Literal

from agent_loop.metrics.intervals import Z95, half_width95
from verl_mixed.views.progress import Line, series, sources_of
from verl_mixed.views.summary import AVERAGE_OVER, Points, first_and_last, trained, windows

LEAST_STEPS = 3
"""Steps that a mean needs for an interval from the differences between its steps."""

Measure = Literal["validation reward", "validation pass rate", "training reward"]


def wilson(share: float, count: float) -> tuple[float, float]:
    """95 % interval of a mean of `count` values in [0, 1].

    The interval is made for shares (values 0 and 1). For other values in [0, 1] it is too wide
    rather than too narrow, because shares have the largest variance of all values with that mean.

    Args:
        share: the observed mean, 0 to 1.
        count: above 0.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    scale = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over some steps and its 95 % interval (None: not known)."""

    steps: tuple[int, int]
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The change of one source's reward from the beginning to the end of a run."""

    source: str
    measure: Measure
    first: Estimate
    last: Estimate
    low: float | None
    """Lower end of the 95 % interval of the change; None: not known."""
    high: float | None

    @property
    def change(self) -> float:
        """Last minus first."""
        return self.last.mean - self.first.mean

    @property
    def change_words(self) -> str:
        """The change, and its interval if known: `+0.20 [+0.06, +0.33]`."""
        text = f"{self.change:+.2f}"
        if self.low is None or self.high is None:
            return text
        return f"{text} [{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def verdict(self) -> str:
        """`no clear change` if the interval of the change includes 0."""
        if self.low is None or self.high is None:
            return "interval unknown"
        return "improved" if self.low > 0 else "got worse" if self.high < 0 else "no clear change"


def improvements(lines: Sequence[Line], over: int = AVERAGE_OVER) -> list[Improvement]:
    """What training changed, for every source that can be compared.

    | if the source has | compared | interval of each mean |
    | --- | --- | --- |
    | two validations | mean reward of the first and the last validation | `wilson` |
    | two validations, rewards outside of [0, 1], and a solved trajectory | pass rate | `wilson` |
    | two training steps | mean reward of both parts of `first_and_last` | Student's t over steps |

    The last kind of interval is computed from `reward/ci95` if a part has fewer than `LEAST_STEPS`
    steps or all its steps are equal. The interval of the change is Newcombe's square-and-add. Both
    validations judge the same prompts, which this method does not use, so the interval of a change
    is too wide rather than too narrow. `not_comparable` names the other sources.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions",
    method 10.
    """
    changes = []
    for source in sources_of(lines):
        ends = _validated(lines, source) or _trained_ends(lines, source, over)
        if ends is not None:
            measure, first, last = ends
            low, high = _change(first, last)
            changes.append(
                Improvement(
                    source=source, measure=measure, first=first, last=last, low=low, high=high
                )
            )
    return changes


def not_comparable(lines: Sequence[Line], over: int = AVERAGE_OVER) -> dict[str, str]:
    """Source that `improvements` leaves out -> the reason as text."""
    compared = {one.source for one in improvements(lines, over)}
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


_Ends = tuple[Measure, Estimate, Estimate]


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
        one, count = Estimate(steps=(step, step), mean=mean), counts.get(step, 0.0)
        if has_shares and count >= 1 and 0 <= mean <= 1:
            low, high = wilson(mean, count)
            one = replace(one, low=low, high=high)
        estimates.append(one)
    return estimates


def _validated(lines: Sequence[Line], source: str) -> _Ends | None:
    rewards, solved = validations(lines, source), validations(lines, source, "pass_rate")
    if len(rewards) < 2:
        return None
    has_intervals = rewards[0].low is not None and rewards[-1].low is not None
    if not has_intervals and len(solved) > 1 and any(one.mean for one in solved):
        return "validation pass rate", solved[0], solved[-1]
    return "validation reward", rewards[0], rewards[-1]


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


def _trained_ends(lines: Sequence[Line], source: str, over: int) -> _Ends | None:
    ends = first_and_last(series(trained(lines), f"mixed/{source}/reward/mean"), over)
    if ends is None:
        return None
    halves = dict(series(lines, f"mixed/{source}/reward/ci95"))
    first, last = (_over_steps(points, halves) for points in ends)
    return "training reward", first, last


def _over_steps(points: Points, halves: Mapping[int, float]) -> Estimate:
    """The mean of some steps.

    Args:
        points: (step, mean), at least one.
        halves: step -> half the width of that step's own interval; steps without one are missing.
    """
    values = [value for _, value in points]
    steps, mean = (points[0][0], points[-1][0]), fmean(values)
    half = half_width95(values) if len(values) >= LEAST_STEPS else None
    if not half:
        half = _half_of_mean([halves.get(step) for step, _ in points])
    if not half:  # equal values do not mean that the mean is certain
        return Estimate(steps=steps, mean=mean)
    return Estimate(steps=steps, mean=mean, low=mean - half, high=mean + half)


def _half_of_mean(halves: Sequence[float | None]) -> float | None:
    """Half width of a mean of means with these half widths; None if one is not known."""
    known = [half for half in halves if half is not None]
    if len(known) < len(halves):
        return None
    return sqrt(sum(half**2 for half in known)) / len(known)


def _change(first: Estimate, last: Estimate) -> tuple[float | None, float | None]:
    if first.low is None or first.high is None or last.low is None or last.high is None:
        return None, None
    change = last.mean - first.mean
    below = sqrt((last.mean - last.low) ** 2 + (first.high - first.mean) ** 2)
    above = sqrt((last.high - last.mean) ** 2 + (first.mean - first.low) ** 2)
    return change - below, change + above


@dataclass(frozen=True, slots=True, kw_only=True)
class BandPoint:
    """A moving average and its 95 % interval."""

    step: int
    mean: float
    low: float
    high: float


def reward_band(lines: Sequence[Line], source: str, over: int = AVERAGE_OVER) -> list[BandPoint]:
    """Moving average of a source's training reward, with the interval from `reward/ci95`.

    A window with a step that has no `reward/ci95` has no point.
    """
    name = f"mixed/{source}/reward/mean"
    rows = [
        (line["step"], line["metrics"][name], line["metrics"].get(f"mixed/{source}/reward/ci95"))
        for line in trained(lines)
        if name in line["metrics"]
    ]
    band = []
    for window in windows(rows, over):
        half = _half_of_mean([half for _, _, half in window])
        if half is not None:
            step, mean = window[-1][0], fmean(value for _, value, _ in window)
            band.append(BandPoint(step=step, mean=mean, low=mean - half, high=mean + half))
    return band


def pass_rate_band(lines: Sequence[Line], source: str, over: int = AVERAGE_OVER) -> list[BandPoint]:
    """Moving average of a source's pass rate, with `wilson`'s interval.

    Each step counts by its judged groups. A group counts as one observation, as if all its
    trajectories were equal, so the interval is too wide rather than too narrow.
    """
    rows = [
        (line["step"], line["metrics"][f"mixed/{source}/pass_rate"], _judged(line, source))
        for line in trained(lines)
        if f"mixed/{source}/pass_rate" in line["metrics"]
    ]
    band = []
    for window in windows(rows, over):
        groups = sum(judged for _, _, judged in window)
        if groups >= 1:
            mean = sum(share * judged for _, share, judged in window) / groups
            low, high = wilson(min(1.0, max(0.0, mean)), groups)
            band.append(BandPoint(step=window[-1][0], mean=mean, low=low, high=high))
    return band


def _judged(line: Line, source: str) -> float:
    """Groups of a step with a judged trajectory; if not logged, the least possible number."""
    metrics, prefix = line["metrics"], f"mixed/{source}"
    lost = sum(metrics.get(f"{prefix}/{kind}_error_rate", 0.0) for kind in ("infra", "loop"))
    least = metrics.get(f"{prefix}/count", 0.0) * max(0.0, 1 - lost)
    return metrics.get(f"{prefix}/judged", least)
