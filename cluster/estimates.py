"""How sure a mean is: 95 % intervals of rewards, and what training changed. Pure.

Functions over lines of `metrics.jsonl`, as in `cluster.summary`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from cluster.progress import Line, series, sources_of
from cluster.summary import AVERAGE_OVER, Points, trained

Z95 = 1.959964
"""Of a 95 % interval of the normal distribution."""

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The same of Student's t, for 1 to 9 degrees of freedom."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """95 % interval of a mean of `count` values in [0, 1].

    Exact in its idea for shares, and too wide rather than too narrow for other values between 0 and
    1: none has more variance than a share with the same mean.

    Args:
        share: the mean seen, 0 to 1.
        count: above 0.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    scale = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over some steps and its 95 % interval; None where it cannot be told."""

    steps: tuple[int, int]
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What training did to the reward of one source."""

    source: str
    measure: Literal["validation reward", "training reward"]
    first: Estimate
    last: Estimate
    low: float | None
    """Of the 95 % interval of the change; None where it cannot be told."""
    high: float | None

    @property
    def change(self) -> float:
        """Last minus first."""
        return self.last.mean - self.first.mean

    @property
    def verdict(self) -> str:
        """In words: a change whose interval holds 0 is none that was shown."""
        if self.low is None or self.high is None:
            return "interval unknown"
        return "improved" if self.low > 0 else "got worse" if self.high < 0 else "no clear change"


def improvements(lines: Sequence[Line], over: int = AVERAGE_OVER) -> list[Improvement]:
    """First against last of every source: validation where there were two, else training reward.

    Validation: intervals as `wilson`, the change by Newcombe's square-and-add. Both validations
    judge the same prompts; that is not used, so the interval is too wide rather than too narrow.
    They are there only when every reward of the run lies in [0, 1]. Training: the mean of the first
    and the last `over` steps (fewer in a short run: no step is in both), intervals by Student's t
    over the steps.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions",
    method 10.
    """
    found = []
    for source in sources_of(lines):
        ends = _validated(lines, source) or _trained_ends(lines, source, over)
        if ends is None:
            continue
        measure, first, last = ends
        low, high = _change(first, last)
        found.append(
            Improvement(source=source, measure=measure, first=first, last=last, low=low, high=high)
        )
    return found


_Ends = tuple[Literal["validation reward", "training reward"], Estimate, Estimate]


def validations(
    lines: Sequence[Line], source: str, metric: Literal["reward/mean", "pass_rate"] = "reward/mean"
) -> list[Estimate]:
    """Every validation of a source in order, each with `wilson`'s interval where it has one."""
    shares = metric == "pass_rate" or _rewards_are_shares(lines)
    counts = dict(series(lines, f"mixed/{source}/val/count"))
    found = []
    for step, mean in series(lines, f"mixed/{source}/val/{metric}"):
        one, count = Estimate(steps=(step, step), mean=mean), counts.get(step, 0.0)
        if shares and count > 0 and 0 <= mean <= 1:
            low, high = wilson(mean, count)
            one = replace(one, low=low, high=high)
        found.append(one)
    return found


def _validated(lines: Sequence[Line], source: str) -> _Ends | None:
    found = validations(lines, source)
    return ("validation reward", found[0], found[-1]) if len(found) > 1 else None


def _rewards_are_shares(lines: Sequence[Line]) -> bool:
    """Whether no reward of the run is known to lie outside of [0, 1]."""
    lows = [value for _, value in series(lines, "critic/score/min")]
    highs = [value for _, value in series(lines, "critic/score/max")]
    return min(lows, default=0.0) >= 0 and max(highs, default=1.0) <= 1


def _trained_ends(lines: Sequence[Line], source: str, over: int) -> _Ends | None:
    points = series(trained(lines), f"mixed/{source}/reward/mean")
    over = min(over, len(points) // 2)
    if not over:
        return None
    return "training reward", _over_steps(points[:over]), _over_steps(points[-over:])


def _over_steps(points: Points) -> Estimate:
    values = [value for _, value in points]
    steps, mean = (points[0][0], points[-1][0]), fmean(values)
    if len(values) < 2:
        return Estimate(steps=steps, mean=mean)
    half = _student(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Estimate(steps=steps, mean=mean, low=mean - half, high=mean + half)


def _student(freedom: int) -> float:
    """Of a 95 % interval of Student's t; from ten on by its expansion around the normal."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3) / (96 * freedom**2)


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
    """Moving average of a source's training reward with the interval that its groups give it.

    Steps without `reward/ci95` have no band.
    """
    name = f"mixed/{source}/reward/mean"
    rows = [
        (line["step"], line["metrics"][name], line["metrics"].get(f"mixed/{source}/reward/ci95"))
        for line in trained(lines)
        if name in line["metrics"]
    ]
    band = []
    for i, (step, _, _) in enumerate(rows):
        window = rows[max(0, i + 1 - over) : i + 1]
        halves = [half for _, _, half in window if half is not None]
        if len(halves) == len(window):
            mean = fmean(value for _, value, _ in window)
            half = sqrt(sum(half**2 for half in halves)) / len(window)
            band.append(BandPoint(step=step, mean=mean, low=mean - half, high=mean + half))
    return band


def pass_rate_band(lines: Sequence[Line], source: str, over: int = AVERAGE_OVER) -> list[BandPoint]:
    """Moving average of a source's pass rate with `wilson`'s interval over its groups.

    Each group counts as one observation, as if its trajectories said the same: too wide rather than
    too narrow.
    """
    names = (f"mixed/{source}/pass_rate", f"mixed/{source}/count")
    rows = [
        (line["step"], *(line["metrics"][name] for name in names))
        for line in trained(lines)
        if all(name in line["metrics"] for name in names)
    ]
    band = []
    for i, (step, _, _) in enumerate(rows):
        window = rows[max(0, i + 1 - over) : i + 1]
        groups = sum(count for _, _, count in window)
        if groups > 0:
            mean = fmean(share for _, share, _ in window)
            low, high = wilson(min(1.0, max(0.0, mean)), groups)
            band.append(BandPoint(step=step, mean=mean, low=low, high=high))
    return band
