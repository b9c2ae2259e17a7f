"""Text for a terminal: harmless characters, errors, durations, counts of unreadable lines."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from config.lookup import at

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that colour text or move the cursor."""


def printable(text: str, *, ascii_only: bool = False) -> str:
    """The text without characters that act on a terminal: control characters become spaces.

    With `ascii_only`, characters outside of ASCII become `?`.
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
    """A warning that `count` complete lines of `metrics.jsonl` are not valid and were left out."""
    lines, were = ("line", "was") if count == 1 else ("lines", "were")
    return f"metrics.jsonl: {count} {lines} cannot be read and {were} passed over"


def retention_words(config: Mapping[str, Any]) -> str:
    """The settings of a run by which trajectories have no file; empty if none has."""
    names = ("trajectory_sample", "trajectory_sample_step", "trajectory_keep")
    values = {name: at(config, f"mixed.{name}") for name in names}
    return ", ".join(f"mixed.{name}={most}" for name, most in values.items() if most is not None)
