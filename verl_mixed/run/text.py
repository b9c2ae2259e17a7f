"""Text for a terminal: printable characters, durations, the count of unreadable lines.

Standard library only: `python3 -m verl_mixed.diagnose` runs without packages.
"""

import re

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that colour text or move the cursor."""


def printable(text: str, *, ascii_only: bool = False) -> str:
    """Text that cannot act on a terminal: control characters become spaces.

    Args:
        text: any text; a log or a name may hold control characters.
        ascii_only: characters outside of ASCII become `?`.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    return text.encode("ascii", "replace").decode("ascii") if ascii_only else text


def clock(seconds: float | None) -> str:
    """`1h02m`, `3m05s` or `8s`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def passed_over_words(count: int) -> str:
    """The warning about finished lines of `metrics.jsonl` that cannot be read.

    Args:
        count: how many lines, above 0.
    """
    lines = (
        "1 line cannot be read and was" if count == 1 else f"{count} lines cannot be read and were"
    )
    return f"metrics.jsonl: {lines} passed over"
