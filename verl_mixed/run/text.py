"""Text for a terminal: harmless characters, errors, durations, counts of unreadable lines."""

import errno
import re
import sys
from collections.abc import Mapping
from typing import Any

from config.lookup import at

LONGEST_ERROR = 4000
"""Characters that are shown of a line of an error."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that colour text or move the cursor."""


def printable(text: str, *, ascii_only: bool = False) -> str:
    """The text without characters that act on a terminal: control characters become spaces.

    With `ascii_only`, characters outside of ASCII become `?`.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    return text.encode("ascii", "replace").decode("ascii") if ascii_only else text


def print_error(error: object) -> None:
    """Print each line of an error, or its first characters, to stderr, after `error: `."""
    for line in str(error).splitlines():
        cut = line if len(line) <= LONGEST_ERROR else line[:LONGEST_ERROR] + " ..."
        print(f"error: {printable(cut)}", file=sys.stderr)


_FULL = "free some space, or name a folder on another disk"
_NO_LOCKS = "its file system has no file locks: mount it with them (Lustre: -o flock), or name a"
_NO_LOCKS += " folder on another one"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "change its owner or its mode, or name another",
    errno.EPERM: "change its owner or its mode, or name another",
    errno.EMFILE: "raise `ulimit -n`",
    errno.EINVAL: "name another",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.ENOENT: "correct the name",
    errno.EIO: "look at the disk and the server of its file system",
    errno.ESTALE: "look at the server of its file system, then mount it again",
    errno.EPIPE: "what read the output has ended",
    **dict.fromkeys((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP), _NO_LOCKS),
}


def os_error_words(error: OSError) -> str:
    """One line for an error of the operating system: which file, what, and what to do."""
    if error.errno is None or error.strerror is None:
        return str(error)  # one of ours
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    remedy = _REMEDIES.get(error.errno)
    what = f"{' -> '.join(names) or 'the output'}: {error.strerror}"
    return f"{what}; {remedy}" if remedy else what


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
