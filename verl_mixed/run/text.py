"""Text for a terminal: harmless characters, errors, durations, counts of unreadable lines."""

import re
import sys

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that colour text or move the cursor."""


def printable(text: str, *, ascii_only: bool = False) -> str:
    """The text without characters that act on a terminal: control characters become spaces.

    Args:
        text: anything.
        ascii_only: replace characters outside of ASCII by `?`.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    return text.encode("ascii", "replace").decode("ascii") if ascii_only else text


def print_error(error: object) -> None:
    """Print each line of an error to stderr, after `error: `."""
    for line in str(error).splitlines():
        print(f"error: {printable(line)}", file=sys.stderr)


def clock(seconds: float | None) -> str:
    """`1h02m`, `3m05s` or `8s`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def passed_over_words(count: int) -> str:
    """A warning that lines of `metrics.jsonl` are damaged and were left out.

    Args:
        count: complete lines that are not valid; above 0.
    """
    lines = (
        "1 line cannot be read and was" if count == 1 else f"{count} lines cannot be read and were"
    )
    return f"metrics.jsonl: {lines} passed over"
