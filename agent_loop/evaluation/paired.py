"""Paired differences of two evaluations: the same prompts, with an interval and a test. Pure.

A prompt's samples are one observation: their mean. A lost trajectory does not count.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from agent_loop.evaluation.records import Record
from agent_loop.evaluation.statistics import LEVEL, Interval, by_prompt
from agent_loop.evaluation.student import student_quantile

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
) -> Difference | None:
    """Compare the means of the prompts that both have; None if they have none in common.

    The interval is Student's t over the differences of the prompts. With several comparisons each
    gets a level of 1 - 0.05 / comparisons (Bonferroni), so the chance that any of them calls an
    unchanged source better or worse is 5 % at most. Student's t does not hold for a few discrete
    differences, so a verdict also needs the sign-flip test, which is exact: if both evaluations
    have the same policy, each prompt's difference is as likely as its opposite.

    Args:
        first: prompt -> mean of its judged samples; likewise `last`.
        comparisons: differences that are looked at together, 1 or more.

    Source: Miller 2024, "Adding Error Bars to Evals", section 4.2 (paired differences); Fisher
    1935, "The Design of Experiments", section 21 (sign-flip test).
    """
    rows = sorted(first.keys() & last.keys())
    if not rows:
        return None
    gaps = [last[row] - first[row] for row in rows]
    gaps = [0.0 if abs(gap) < 1e-12 else gap for gap in gaps]
    change, level, interval = fmean(gaps), 1 - (1 - LEVEL) / comparisons, None
    if len(gaps) > 1 and (spread := stdev(gaps)) > 1e-12:
        half = student_quantile(level, len(gaps) - 1) * spread / sqrt(len(gaps))
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


def prompt_means(records: Iterable[Record], measure: str = "reward") -> dict[str, dict[str, float]]:
    """Source -> row_id -> mean of its judged samples.

    Args:
        measure: `reward`, or `solved` for the share that solved the prompt.
    """
    by_source: defaultdict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.key):
        if not record.lost:
            by_source[record.source].append(record)
    return {
        source: {
            row: fmean(
                each.reward if measure == "reward" else float(each.is_solved) for each in group
            )
            for row, group in by_prompt(own).items()
        }
        for source, own in sorted(by_source.items())
    }


def differences(
    first: Iterable[Record], last: Iterable[Record], measure: str = "reward"
) -> dict[str, Difference]:
    """Source -> its paired difference, for the sources with a prompt in common."""
    before, after = prompt_means(first, measure), prompt_means(last, measure)
    both = [s for s in before if before[s].keys() & after.get(s, {}).keys()]
    found = {s: difference(before[s], after[s], len(both)) for s in both}
    return {source: one for source, one in found.items() if one is not None}
