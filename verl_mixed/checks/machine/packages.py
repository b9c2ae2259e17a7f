"""Python, the packages and whether they go together, and our plugin. Imports none of them here."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from verl_mixed.checks.finding import Finding, bad, ok, warning
from verl_mixed.run.environment import PACKAGES, package_problems, plugin_problems, versions

ROOTS = (*PACKAGES, "vllm", "sglang", "accelerate", "peft", "tokenizers", "datasets")
"""Whose requirements are looked at, where they are installed."""

PLUGIN_S = 60.0

_PLUGIN = "from agent_loop.plugin import is_loaded; import verl, sys; sys.exit(not is_loaded())"


def python() -> list[Finding]:
    """The version of this Python."""
    words = f"{platform.python_version()} ({sys.executable})"
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return [ok("python", words)]
    return [bad("python", words, "use Python 3.10 to 3.12 (CONDA_ENV, or VENV)")]


def packages() -> list[Finding]:
    """What is missing, or of versions that exclude each other."""
    remedy = "start run_mixed_training.sh once, or install it into the CONDA_ENV or VENV you use"
    findings = [bad("packages", problem, remedy) for problem in package_problems()]
    findings += [bad("packages", words, f"pip install '{wanted}'") for words, wanted in conflicts()]
    findings += [
        warning("packages", f"{owner} wants {name}, which is missing", f"pip install '{name}'")
        for owner, name in missing()
    ]
    shown = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    return findings or [ok("packages", shown)]


def conflicts() -> Iterator[tuple[str, str]]:
    """(what excludes what, the requirement that is not met), of what is installed."""
    for owner, wanted, found in _requirements():
        if found is not None and not wanted.specifier.contains(found, prereleases=True):
            yield f"{owner} wants {wanted.name}{wanted.specifier}, there is {found}", _plain(wanted)


def missing() -> Iterator[tuple[str, str]]:
    """(who wants it, the requirement), of packages that are not there at all."""
    ours = {canonicalize_name(name) for name in PACKAGES}
    for owner, wanted, found in _requirements():
        if found is None and canonicalize_name(wanted.name) not in ours:
            yield owner, _plain(wanted)


def _plain(wanted: Requirement) -> str:
    return f"{wanted.name}{wanted.specifier}"


def _requirements() -> Iterator[tuple[str, Requirement, str | None]]:
    """Owner with its version, requirement that applies here, version that is installed."""
    for name in ROOTS:
        if (owner := _installed(name)) is None:
            continue
        for text in owner.requires or []:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                other = _installed(wanted.name)
                found = None if other is None else other.version
                yield f"{name} {owner.version}", wanted, found


def _installed(name: str):
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def plugin() -> list[Finding]:
    """Whether verl loads this project, tried in a process of its own: it imports verl."""
    remedy = "pip install --no-deps -e . in the checkout; see the end of the message"
    if problems := plugin_problems():
        return [bad("plugin", problem, remedy) for problem in problems]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PLUGIN],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PLUGIN_S,
        )
    except subprocess.TimeoutExpired:
        words = f"`import verl` took more than {PLUGIN_S:g} s"
        return [bad("plugin", words, "look at the disk that the environment is on")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [bad("plugin", f"verl did not load agent_loop.plugin: {last}", remedy)]
    return [ok("plugin", "loaded by verl")]
