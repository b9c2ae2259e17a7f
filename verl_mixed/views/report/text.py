"""Numbers, names and cells as the text of charts, tables and sentences."""

import math

from verl_mixed.run.text import printable

LONGEST_VALUE = 2000
"""Characters of a cell."""


def number(value: float) -> str:
    """A number with about three digits; thousands without decimals."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    size = abs(value)
    text = f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def plain(text: object, longest: int = 400) -> str:
    """Text without control characters and changes of direction, cut when long. Not escaped."""
    clean = printable(str(text)[: longest + 1])
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def cell(value: object) -> str:
    """The text of a table's cell. Not escaped."""
    if isinstance(value, tuple):
        return " → ".join(cell(part) for part in value)
    if isinstance(value, float):
        return number(value)
    return plain(value, LONGEST_VALUE)
