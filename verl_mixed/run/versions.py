"""The record of what a run was started with: commit, versions of packages, machine, nodes.

Standard library only.
"""

import json
import platform
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config.disk import naming
from verl_mixed.run.requirements import ALL, PROJECT, required, version_of

ENGINES = ("vllm", "sglang")
"""Packages of a run that no extra of `all` names."""

REPOSITORY = Path(__file__).parents[2]

SYNCED = ".synced_commit"
"""In a repository that `setup_cluster.sh sync` wrote: the commit that it came from."""


def commit_of(repository: Path = REPOSITORY) -> str | None:
    """The commit of a checkout or of a synced copy; None: not known.

    It ends with `-dirty` if files differ from the commit.
    """
    synced = repository / SYNCED
    if synced.is_file():
        return " ".join(synced.read_text().split()) or None
    # without a .git here, the checkout around an installed copy may be another project
    if not (repository / ".git").exists():
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=repository, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def versions_now(nodes: Sequence[str]) -> dict[str, Any]:
    """One line of `versions.jsonl`; `nodes` are addresses, and empty on one machine."""
    names = (PROJECT, *(one.name for one in required(ALL)), *ENGINES)
    packages = {"python": platform.python_version()} | {name: version_of(name) for name in names}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit_of(),
        "host": socket.gethostname(),
        "nodes": list(nodes),
        "packages": packages,
    }


def note(path: Path, line: Mapping[str, Any]) -> list[str]:
    """Add a line to `versions.jsonl`; returns its differences from the last, `name: old -> new`.

    Broken lines are passed over.
    """
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    with naming(path), path.open("a", encoding="utf-8") as file:
        # a start that was killed, or a full disk, leaves a line without its end
        file.write("\n" * (not before.endswith("\n") and bool(before)) + json.dumps(line) + "\n")
    last = next(filter(None, map(_valid, reversed(before.splitlines()))), None)
    if last is None:
        return []
    old, new = _names(last), _names(line)
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted(old.keys() & new.keys())  # an earlier release wrote fewer packages
        if old.get(name) != new.get(name)
    ]


def _valid(text: str) -> dict[str, Any] | None:
    """A line of the file; None if it is broken."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_whole = (
        isinstance(line, dict) and "commit" in line and isinstance(line.get("packages"), dict)
    )
    return line if is_whole else None


def _names(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"commit": line["commit"], **line["packages"]}
