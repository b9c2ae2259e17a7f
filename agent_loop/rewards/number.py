"""Which values are a reward. Standard library only: environments' interpreters import it too."""

import math
from numbers import Real
from typing import Any

MAX_REWARD = 1e9
"""Largest absolute value of a reward, because rewards are trained in single precision."""

WANTED = "a finite number from -1e9 to 1e9"


def finite_number(value: Any) -> float | None:
    """The value as a number; None if it is none.

    A bool counts as 1 or 0. A scalar of numpy or torch is a number, and so is an array or tensor
    with one element. None, a text, a list, a complex number, NaN and infinity are none.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        number = float(value) if isinstance(value, Real) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements, or too large
        return None
    return number if math.isfinite(number) else None


def reward_number(value: Any) -> float | None:
    """The value as a reward: a `finite_number` within the bound; None if it is none."""
    number = finite_number(value)
    return number if number is not None and abs(number) <= MAX_REWARD else None


def shown(value: Any) -> str:
    """A refused value for a message."""
    try:
        return f"{value!r:.200}"
    except Exception as error:  # an integer of 5,000 digits, or whatever a user's class raises
        return f"{type(value).__name__} that cannot be shown ({error!s:.100})"
