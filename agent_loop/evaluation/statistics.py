"""Means, pass@k and paired differences of evaluation records, with intervals over prompts. Pure.

Samples of one prompt are not independent: all are easy, or all are hard. Intervals therefore treat
the prompts as the independent observations, and a prompt's samples as one cluster. A lost
trajectory (a fault or a deadline) is no failure: it is counted apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, sqrt
from statistics import fmean, stdev

import numpy as np

from agent_loop.evaluation.records import Record
from agent_loop.evaluation.student import normal_quantile, student_quantile

LEVEL = 0.95
"""Probability that an interval contains the true value."""

EXACT_FLIPS = 14
"""Up to this number of changed prompts, all sign patterns are enumerated."""

DRAWN_FLIPS = 19_999
"""Sign patterns that are drawn where there are more."""

Interval = tuple[float, float]
"""(low, high)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    interval: Interval | None
    """None: one prompt, or equal values outside of [0, 1]."""

    prompts: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """The results of one source."""

    source: str
    prompts: int
    """Prompts with a judged trajectory."""

    trajectories: int
    """Judged ones."""

    lost: int
    reward: Estimate | None
    """None: all trajectories were lost."""

    pass_at: Mapping[int, Estimate]
    """k -> share of prompts that k samples solve. A k that no prompt has samples for is absent."""

    sampled_tokens: float
    """Mean of a judged trajectory, as are the next three."""

    response_tokens: float
    turns: float
    tool_calls: float
    total_sampled_tokens: int
    """Of all trajectories, lost ones included; so is the next."""

    total_tool_calls: int


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples solves a prompt.

    It is the share of the sets of k of its samples that have a solved one: 1 - C(n-c, k) / C(n, k).

    Args:
        samples: n, at least k.
        solved: c of them, 0 to n.

    Raises:
        ValueError: k is below 1 or above n.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(
            f"pass@{k} of {samples} samples, {solved} solved: want 1 <= k <= samples and 0 <= "
            "solved <= samples; draw more samples, or ask for a smaller k"
        )
    return 1 - comb(samples - solved, k) / comb(samples, k)


def results_of(records: Iterable[Record], ks: Sequence[int] = (1,)) -> dict[str, SourceResult]:
    """Source -> its results, in order of names. The order of the records does not matter."""
    by_source: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_source[record.source].append(record)
    return {source: _of_source(source, own, ks) for source, own in sorted(by_source.items())}


def _of_source(source: str, records: Sequence[Record], ks: Sequence[int]) -> SourceResult:
    own = sorted(records, key=lambda record: record.key)  # sums of floats depend on the order
    judged = [record for record in own if not record.lost]
    prompts = by_prompt(judged)
    solved = {row: [float(each.is_solved) for each in group] for row, group in prompts.items()}
    pass_at: dict[int, Estimate] = {}
    for k in ks:
        shares = {
            row: [pass_at_k(len(values), round(sum(values)), k)]
            for row, values in solved.items()
            if len(values) >= k
        }
        # pass@1 of a prompt is its mean; the interval of k = 1 is that of the trajectories
        if shares and (found := estimate(solved if k == 1 else shares)) is not None:
            pass_at[k] = found
    return SourceResult(
        source=source,
        prompts=len(prompts),
        trajectories=len(judged),
        lost=len(own) - len(judged),
        reward=estimate({row: [each.reward for each in group] for row, group in prompts.items()}),
        pass_at=pass_at,
        sampled_tokens=_mean([each.sampled_tokens for each in judged]),
        response_tokens=_mean([each.response_tokens for each in judged]),
        turns=_mean([each.turns for each in judged]),
        tool_calls=_mean([each.tool_calls for each in judged]),
        total_sampled_tokens=sum(each.sampled_tokens for each in own),
        total_tool_calls=sum(each.tool_calls for each in own),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def by_prompt(records: Iterable[Record]) -> dict[str, list[Record]]:
    """row_id -> its records, of one source."""
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.row_id].append(record)
    return groups


def estimate(prompts: Mapping[str, Sequence[float]], level: float = LEVEL) -> Estimate | None:
    """The mean of all values and its interval, with the values of a prompt as one cluster.

    The standard error is that of cluster sampling, with the factor G / (G - 1) for G prompts. If
    all values are in [0, 1], the interval is Wilson's for the effective number of observations
    p (1 - p) / SE^2, corrected for G - 1 degrees of freedom, and at most the number of values; it
    stays in [0, 1] and has a width also if all values are equal. Otherwise it is Student's t with
    G - 1 degrees of freedom.

    Example: 2 prompts with the values 1, 1 and 0, 0. The mean is 0.5, and the residuals of the
    clusters are 1 and -1. So SE^2 = 2 / 1 * (1 + 1) / 4^2 = 0.25. Four independent values would
    have 0.083, so these four are worth about one.

    Args:
        prompts: prompt -> its values, at least one; no prompt gives None.

    Source: Miller 2024, "Adding Error Bars to Evals", section 2.2 (clustered standard errors);
    Korn & Graubard 1998, "Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data" (effective sample size); Wilson 1927.
    """
    values = [value for _, own in sorted(prompts.items()) for value in own]
    if not values:
        return None
    mean, count, groups = fmean(values), len(values), len(prompts)
    interval = None
    if groups > 1:
        residuals = [fsum(value - mean for value in own) for own in prompts.values()]
        squares = fsum(residual**2 for residual in sorted(residuals))
        error = sqrt(groups / (groups - 1) * squares) / count
        t = student_quantile(level, groups - 1)
        if min(values) >= 0 and max(values) <= 1:
            z = normal_quantile(level)
            effective = mean * (1 - mean) / error**2 * (z / t) ** 2 if error > 1e-12 else groups
            interval = wilson(mean, min(effective, count), level)
        elif error > 0:
            interval = (mean - t * error, mean + t * error)
    return Estimate(mean=mean, interval=interval, prompts=groups, trajectories=count)


def wilson(share: float, count: float, level: float = LEVEL) -> Interval:
    """Interval of a share of `count` independent observations, above 0.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = normal_quantile(level)
    scale = 1 + z**2 / count
    middle = (share + z**2 / (2 * count)) / scale
    half = z / scale * sqrt(max(0.0, share * (1 - share)) / count + z**2 / (4 * count**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


# --- paired differences ---------------------------------------------------------------------------


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
