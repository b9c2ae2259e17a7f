"""Quantiles of Student's t for any level, and of the normal distribution. Pure, without numpy."""

from functools import lru_cache
from math import atan, cos, pi, sin, sqrt
from statistics import NormalDist


def normal_quantile(level: float) -> float:
    """Half width of a two-sided interval of the normal distribution, in standard errors."""
    return NormalDist().inv_cdf((1 + level) / 2)


@lru_cache(maxsize=512)
def student_quantile(level: float, freedom: int) -> float:
    """Half width of a two-sided interval of Student's t, in standard errors.

    Args:
        level: probability inside the interval, above 0 and below 1.
        freedom: degrees of freedom, 1 or more.
    """
    low, high = 0.0, 2.0
    while _inside(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _inside(t: float, freedom: int) -> float:
    """Probability that |T| < t.

    Source: Abramowitz & Stegun 1964, formulas 26.7.3 and 26.7.4.
    """
    angle = atan(t / sqrt(freedom))
    square = cos(angle) ** 2
    if freedom % 2:
        term, total = cos(angle), 0.0
        for i in range(2, freedom, 2):
            total += term
            term *= square * i / (i + 1)
        return (angle + sin(angle) * total) * 2 / pi
    term, total = 1.0, 0.0
    for i in range(1, freedom, 2):
        total += term
        term *= square * i / (i + 1)
    return sin(angle) * total
