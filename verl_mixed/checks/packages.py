"""Checks of Python, of the installed packages, and of verl's way to our plugin.

`python -m verl_mixed.checks.packages` names what is missing in an environment that the scripts do
not install into (CONDA_ENV or VENV). Such an environment may lack any package, so this module
imports only the standard library at the top.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import TYPE_CHECKING

from verl_mixed.checks.finding import Finding, bad, from_problem, ok, problems, warning
from verl_mixed.run.requirements import ALL, PROJECT, NotComplete, required, version_of

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PLUGIN_NAME, PLUGIN_MODULE = "mixed_agent_loop", "agent_loop.plugin"

OPTIONAL = ("vllm", "sglang", "accelerate", "peft", "datasets")
"""Packages that some runs use; what they want of others is looked at too."""

PLUGIN_S = 60.0

_PLUGIN = """\
import sys
import verl

by_verl = "agent_loop.plugin" in sys.modules
from agent_loop.plugin import is_loaded  # its error says why verl could not import it

sys.exit(None if by_verl and is_loaded() else "verl has not registered it")
"""
"""Program that fails unless `import verl` has loaded the plugin; its last line says why."""


def python() -> list[Finding]:
    """The version of this Python."""
    found = f"{platform.python_version()} ({sys.executable})"
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return [ok("python", found)]
    return [bad("python", found, "use Python 3.10 to 3.12 (CONDA_ENV, or VENV)")]


def packages() -> list[Finding]:
    """Packages that are missing, or whose versions exclude each other."""
    findings = [*missing(), *_unmet_requirements()]
    if findings:
        return findings
    shown = ", ".join(f"{one.name} {version_of(one.name)}" for one in required(ALL))
    return [ok("packages", shown)]


def missing() -> Iterator[Finding]:
    """Packages of the extra `all` that are not installed, and a verl of another release."""
    remedy = "start run_mixed_training.sh once, or install it into the CONDA_ENV or VENV you use"
    try:
        wanted = required(ALL)
    except NotComplete as error:
        yield from_problem("packages", str(error).replace(": pip", "; pip", 1))
        return
    for one in wanted:
        number = version_of(one.name)
        if number is None:
            yield bad("packages", f"{one.name} is not installed", remedy)
        elif one.name == "verl" and not one.specifier.contains(number, prereleases=True):
            text = f"verl is {number}; this project is written for {one.specifier}"
            yield bad("packages", text, remedy)


def _unmet_requirements() -> list[Finding]:
    """Versions that installed packages exclude, then missing packages that they want."""
    from packaging.utils import canonicalize_name

    try:
        ours = {canonicalize_name(one.name) for one in required(ALL)}  # `missing` reports them
    except NotComplete:
        return []
    excluded, lacking = [], []
    for owner, wanted, found in _requirements():
        words = f"{owner} wants {wanted.name}{wanted.specifier}"
        remedy = f"pip install '{wanted.name}{wanted.specifier}'"
        if found is not None:
            if not wanted.specifier.contains(found, prereleases=True):
                excluded.append(bad("packages", f"{words}, there is {found}", remedy))
        elif canonicalize_name(wanted.name) not in ours:
            lacking.append(warning("packages", f"{words}, which is missing", remedy))
    return excluded + lacking


def _requirements() -> Iterator[tuple[str, "Requirement", str | None]]:
    """(owner with its version, requirement that applies on this machine, installed version)."""
    from packaging.requirements import InvalidRequirement, Requirement

    of_ours = required(ALL)
    for one in of_ours:
        if one.name != "verl":  # `missing` looks at it
            yield f"{PROJECT} {version_of(PROJECT)}", one, version_of(one.name)
    for name in (*(one.name for one in of_ours), *OPTIONAL):
        if (owner := _installed(name)) is None:
            continue
        for text in owner.requires or []:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                yield f"{name} {owner.version}", wanted, version_of(wanted.name)


def _installed(name: str):
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def entry_point() -> list[Finding]:
    """Why `import verl` would not load our plugin; verl itself reports nothing about it."""
    findings = []
    registered = {point.name: point.value for point in entry_points(group="verl.plugins")}
    if registered.get(PLUGIN_NAME) != PLUGIN_MODULE:
        findings.append(
            bad(
                "plugin",
                f"no entry point verl.plugins {PLUGIN_NAME} -> {PLUGIN_MODULE}: verl would train "
                "without this project",
                "install the checkout with `pip install --no-deps -e .`",
            )
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and PLUGIN_NAME not in [name.strip() for name in policy.split(",")]:
        text = f"VERL_USE_EXTERNAL_PLUGINS={policy!r} switches {PLUGIN_NAME} off"
        findings.append(bad("plugin", text, "unset it"))
    return findings


def plugin() -> list[Finding]:
    """Whether verl loads this project; tried in a process of its own, because it imports verl."""
    if findings := entry_point():
        return findings
    remedy = "pip install --no-deps -e . in the checkout; see the end of the message"
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
        text = f"`import verl` took more than {PLUGIN_S:g} s"
        return [bad("plugin", text, "look at the disk that the environment is on")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [bad("plugin", f"verl did not load agent_loop.plugin: {last}", remedy)]
    return [ok("plugin", "loaded by verl")]


if __name__ == "__main__":
    found = problems([*missing(), *entry_point()])
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
