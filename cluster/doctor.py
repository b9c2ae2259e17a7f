"""What this machine has of what a run needs. Prints, changes nothing."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import package_problems, plugin_problems, versions

LEAST_MEMORY_GB = 6.0
LEAST_DISK_GB = 5.0

PLUGIN_CHECK = (
    "from agent_loop.plugin import is_loaded; import verl, sys; sys.exit(not is_loaded())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor."""

    ok: bool
    what: str
    words: str


def examine() -> list[Finding]:
    """Look at everything; takes some seconds, most of them `import verl`."""
    import psutil

    memory_gb = psutil.virtual_memory().total / 2**30
    disk_gb = shutil.disk_usage(Path.cwd()).free / 2**30
    cpus = len(os.sched_getaffinity(0))
    return [
        Finding(
            ok=(3, 10) <= sys.version_info[:2] <= (3, 12),
            what="python",
            words=f"{platform.python_version()} ({sys.executable}); want 3.10 to 3.12",
        ),
        _packages(),
        _plugin(),
        _sandbox(),
        Finding(ok=cpus >= 2, what="cpus", words=f"{cpus}; want at least 2"),
        Finding(
            ok=memory_gb >= LEAST_MEMORY_GB,
            what="memory",
            words=f"{memory_gb:.1f} GB; the demo peaks at about 4, want {LEAST_MEMORY_GB:g}",
        ),
        Finding(
            ok=disk_gb >= LEAST_DISK_GB,
            what="disk",
            words=f"{disk_gb:.0f} GB free here; want {LEAST_DISK_GB:g}",
        ),
    ]


def locks(folder: Path) -> list[Finding]:
    """Try whether a file in this folder can limit all nodes of the running Ray cluster."""
    import ray

    from agent_loop.tools.lock_probe import alive_nodes, lock_problems

    folder = folder.absolute()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        words = f"no Ray cluster runs here; start one (ray start) and try again ({error})"
        return [Finding(ok=False, what="locks", words=words)]
    except RuntimeError as error:  # another version of Ray or Python, say
        words = f"cannot join the Ray cluster that runs here: {error}"
        return [Finding(ok=False, what="locks", words=words)]
    try:
        problems = lock_problems(folder)
        if not problems:
            words = f"{folder}: locks, contents and clocks agree on {len(alive_nodes())} nodes"
            return [Finding(ok=True, what="locks", words=words)]
        return [Finding(ok=False, what="locks", words=problem) for problem in problems]
    finally:
        ray.shutdown()


def report(findings: list[Finding], write: Callable[[str], object] = print) -> bool:
    """Print the findings.

    Returns:
        Whether all of them are good.
    """
    for finding in findings:
        write(f"{'ok ' if finding.ok else 'BAD'}  {finding.what:<9} {finding.words}")
    return all(finding.ok for finding in findings)


def _packages() -> Finding:
    problems = package_problems()
    shown = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    return Finding(ok=not problems, what="packages", words="; ".join(problems) or shown)


def _plugin() -> Finding:
    problems = plugin_problems()
    if not problems:
        done = subprocess.run(
            [sys.executable, "-c", PLUGIN_CHECK], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            problems = [f"verl did not load agent_loop.plugin: {last}"]
    return Finding(ok=not problems, what="plugin", words="; ".join(problems) or "loaded by verl")


def _sandbox() -> Finding:
    from agent_loop.tools.sandbox import SandboxUnavailable, choose_sandbox

    try:
        sandbox = choose_sandbox()
    except SandboxUnavailable as error:
        return Finding(ok=False, what="sandbox", words=str(error))
    sandbox.close()
    words = f"{sandbox.name} ({sandbox.why}); runs {', '.join(sandbox.languages)}"
    return Finding(ok=True, what="sandbox", words=words)
