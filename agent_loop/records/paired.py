"""Paired differences of two evaluations: the same prompts, with an interval and a test. Pure.

A prompt's samples are one observation: their mean. A lost trajectory does not count. Both sides
take the same number of samples of a prompt (`paired_means`), because the sign-flip test needs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from agent_loop.records.evaluation_records import Record
from agent_loop.records.statistics import LEVEL, Interval, half_width

EXACT_FLIPS = 14
"""Up to this number of changed prompts, all sign patterns are enumerated."""

DRAWN_FLIPS = 19_999
"""Sign patterns that are drawn where there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The change of one source from one evaluation to another, over the same prompts."""

    prompts: int
    """Prompts that both have."""

    changed: int
    """Those whose mean changed."""

    first: float
    last: float
    """Means over the prompts that both have."""

    change: float
    """Last minus first."""

    interval: Interval | None
    """None if fewer than two prompts, or equal changes, say nothing about the spread."""

    level: float
    """Level of the interval: 1 - 0.05 / comparisons."""

    p: float
    """Probability of a change of at least this size, if both had the same policy."""

    comparisons: int

    @property
    def verdict(self) -> str:
        """`improved` or `got worse` if the interval excludes 0 and the sign-flip test does too."""
        if self.prompts < 2:
            return "interval unknown"
        excludes = self.interval is None or not self.interval[0] <= 0 <= self.interval[1]
        if not self.changed or not excludes or self.p > 1 - self.level:
            return "no clear change"
        return "improved" if self.change > 0 else "got worse"


def difference(
    first: Mapping[str, float], last: Mapping[str, float], comparisons: int = 1
) -> Difference:
    """Compare the means of the same prompts.

    The interval is Student's t over the differences of the prompts. With several comparisons each
    gets a level of 1 - 0.05 / comparisons (Bonferroni), so the chance that any of them calls an
    unchanged source better or worse is 5 % at most. Student's t does not hold for a few discrete
    differences, so a verdict also needs the sign-flip test, which is exact: if both evaluations
    have the same policy, each prompt's difference is as likely as its opposite. That holds only if
    both means of a prompt are over the same number of samples.

    Args:
        first: prompt -> mean of its judged samples, at least one, as `paired_means` makes it;
            likewise `last`, of the same prompts.
        comparisons: differences that are looked at together, 1 or more.

    Source: Miller 2024, "Adding Error Bars to Evals", section 4.2 (paired differences); Fisher
    1935, "The Design of Experiments", section 21 (sign-flip test).
    """
    rows = sorted(first)
    gaps = [last[row] - first[row] for row in rows]
    gaps = [0.0 if abs(gap) < 1e-12 else gap for gap in gaps]
    change, level, interval = fmean(gaps), 1 - (1 - LEVEL) / comparisons, None
    if len(gaps) > 1 and stdev(gaps) > 1e-12:
        half = half_width(gaps, level)
        interval = (change - half, change + half)
    return Difference(
        prompts=len(rows),
        changed=sum(gap != 0 for gap in gaps),
        first=fmean(first[row] for row in rows),
        last=fmean(last[row] for row in rows),
        change=change,
        interval=interval,
        level=level,
        p=sign_flip_p(gaps),
        comparisons=comparisons,
    )


def sign_flip_p(gaps: Sequence[float]) -> float:
    """Share of sign patterns whose sum is at least as far from 0 as that of the differences.

    All patterns are enumerated for up to `EXACT_FLIPS` differences that are not 0. With more, the
    same patterns are drawn each time, and the observed one is counted as one of them, so that the
    test keeps its level (Phipson & Smyth 2010, "Permutation P-values Should Never Be Zero").
    """
    moved = np.array([gap for gap in gaps if gap != 0])
    if not len(moved):
        return 1.0
    seen = abs(moved.sum()) - 1e-9
    if len(moved) <= EXACT_FLIPS:
        patterns = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ moved) >= seen))
    random = np.random.default_rng(0)
    as_far = 0
    for start in range(0, DRAWN_FLIPS, 1000):
        drawn = random.integers(0, 2, size=(min(1000, DRAWN_FLIPS - start), len(moved)))
        as_far += int(np.sum(np.abs((2 * drawn - 1) @ moved) >= seen))
    return (1 + as_far) / (1 + DRAWN_FLIPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedMeans:
    """The prompts of one source that both evaluations have, at least one."""

    first: Mapping[str, float]
    """row_id -> mean of the samples that are compared; likewise `last`."""

    last: Mapping[str, float]
    left_out: int
    """Judged samples of these prompts that one side has more than the other."""


def paired_means(
    first: Iterable[Record], last: Iterable[Record], measure: str = "reward"
) -> dict[str, PairedMeans]:
    """Source -> means of the prompts that both have, over equally many samples on both sides.

    If a prompt has n1 judged samples on one side and n2 on the other, the first min(n1, n2) of each
    side are compared. With all samples, the difference of an unchanged policy would not be as
    likely as its opposite: of a prompt that is solved once in 50 samples, the mean of 16 samples is
    above the value of a single sample far more often than below it. The sign-flip test would then
    call an unchanged policy better or worse.

    Example: a prompt has the rewards 1, 0, 0, 0 on one side; on the other it has 0, 1 and two lost
    samples. The means are 0.5 (of 1, 0) and 0.5 (of 0, 1), and two samples are left out.

    Args:
        measure: `reward`, or `solved` for the share that solved the prompt.
    """
    before, after = _judged(first, measure), _judged(last, measure)
    found: dict[str, PairedMeans] = {}
    for source in sorted(before.keys() & after.keys()):
        ours, theirs = before[source], after[source]
        rows = sorted(ours.keys() & theirs.keys())
        counts = {row: min(len(ours[row]), len(theirs[row])) for row in rows}
        if counts:
            found[source] = PairedMeans(
                first={row: fmean(ours[row][:count]) for row, count in counts.items()},
                last={row: fmean(theirs[row][:count]) for row, count in counts.items()},
                left_out=sum(abs(len(ours[row]) - len(theirs[row])) for row in rows),
            )
    return found


def _judged(records: Iterable[Record], measure: str) -> dict[str, dict[str, list[float]]]:
    """Source -> row_id -> values of its judged samples, in order of their numbers."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in sorted(records, key=lambda record: record.key):
        if not each.lost:
            value = each.reward if measure == "reward" else float(each.is_solved)
            found.setdefault(each.source, {}).setdefault(each.row_id, []).append(value)
    return found
