"""Means and pass@k of evaluation records, with intervals over prompts, and the quantiles that
intervals need. Pure, without numpy.

Samples of one prompt are not independent: all are easy, or all are hard. Intervals therefore treat
the prompts as the independent observations, and a prompt's samples as one cluster. A lost
trajectory (a fault or a deadline) is no failure: it is counted apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import atan, comb, cos, fsum, pi, sin, sqrt
from statistics import NormalDist, fmean, stdev

from agent_loop.records.evaluation_records import Record

LEVEL = 0.95
"""Probability that an interval contains the true value."""

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
    for record in sorted(records, key=lambda each: each.key):  # sums of floats depend on the order
        by_source[record.source].append(record)
    return {source: _of_source(source, own, ks) for source, own in by_source.items()}


def _of_source(source: str, own: Sequence[Record], ks: Sequence[int]) -> SourceResult:
    judged = [record for record in own if not record.lost]
    prompts: defaultdict[str, list[Record]] = defaultdict(list)
    for record in judged:
        prompts[record.row_id].append(record)
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
        sampled_tokens=_mean(each.sampled_tokens for each in judged),
        response_tokens=_mean(each.response_tokens for each in judged),
        turns=_mean(each.turns for each in judged),
        tool_calls=_mean(each.tool_calls for each in judged),
        total_sampled_tokens=sum(each.sampled_tokens for each in own),
        total_tool_calls=sum(each.tool_calls for each in own),
    )


def _mean(values: Iterable[float]) -> float:
    return fmean(collected) if (collected := [*values]) else 0.0


def estimate(prompts: Mapping[str, Sequence[float]]) -> Estimate | None:
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
        t = student_quantile(LEVEL, groups - 1)
        if min(values) >= 0 and max(values) <= 1:
            z = normal_quantile(LEVEL)
            effective = mean * (1 - mean) / error**2 * (z / t) ** 2 if error > 1e-12 else groups
            interval = wilson(mean, min(effective, count))
        elif error > 0:
            interval = (mean - t * error, mean + t * error)
    return Estimate(mean=mean, interval=interval, prompts=groups, trajectories=count)


def wilson(share: float, count: float) -> Interval:
    """Interval of a mean of `count` independent values in [0, 1].

    The interval is made for shares (values 0 and 1). For other values in [0, 1] it is too wide
    rather than too narrow, because shares have the largest variance of all values with that mean.

    Args:
        share: the observed mean, 0 to 1.
        count: above 0; need not be whole.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = normal_quantile(LEVEL)
    scale = 1 + z**2 / count
    middle = (share + z**2 / (2 * count)) / scale
    half = z / scale * sqrt(max(0.0, share * (1 - share)) / count + z**2 / (4 * count**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def half_width(values: Sequence[float], level: float = LEVEL) -> float:
    """Half width of the interval of the mean of two or more independent values."""
    return student_quantile(level, len(values) - 1) * stdev(values) / sqrt(len(values))


def normal_quantile(level: float) -> float:
    """Half width of a two-sided interval of the normal distribution, in standard errors."""
    return NormalDist().inv_cdf((1 + level) / 2)


@lru_cache(maxsize=512)
def student_quantile(level: float, freedom: int) -> float:
    """Half width of a two-sided interval of Student's t, in standard errors.

    Args:
        level: probability inside the interval, above 0 and below 1.
        freedom: degrees of freedom, 1 or more.

    Source: Abramowitz & Stegun 1964, formulas 26.7.3 and 26.7.4.
    """

    def inside(t: float) -> float:
        """Probability that |T| < t."""
        angle = atan(t / sqrt(freedom))
        is_odd, square = freedom % 2, cos(angle) ** 2
        term, total = (cos(angle), 0.0) if is_odd else (1.0, 0.0)
        for i in range(1 + is_odd, freedom, 2):
            total += term
            term *= square * i / (i + 1)
        return (angle + sin(angle) * total) * 2 / pi if is_odd else sin(angle) * total

    low, high = 0.0, 2.0
    while inside(high) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return (low + high) / 2
