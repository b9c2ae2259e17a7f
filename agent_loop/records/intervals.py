"""Half widths of 95 % intervals. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import stdev

Z95 = 1.959964
"""Half width of a 95 % interval of the normal distribution, in standard errors."""

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The same for Student's t, for 1 to 9 degrees of freedom."""


def student95(freedom: int) -> float:
    """Half width of a 95 % interval of Student's t in standard errors, for 1 degree of freedom or
    more; from ten on it is computed by its expansion around the normal distribution."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3) / (96 * freedom**2)


def half_width95(values: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of the mean of two or more independent values, else None."""
    if len(values) < 2:
        return None
    return student95(len(values) - 1) * stdev(values) / sqrt(len(values))
