"""Imports each module first, in a process of its own: `python -m tests.import_alone [EVERY]`.

With a number, only every so many of the modules.

An interpreter needs six seconds for torch, transformers, Ray and the packages that verl imports.
So one process imports those once, neither verl nor this project, and forks for each module. Prints
`{module: error}` as JSON; an empty object when all modules can be imported.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("agent_loop", "cluster", "config", "cpu_engine"),
    *("rate_limit", "samplers", "tool_server", "verl_mixed"),
)
EXEMPT = (
    "tool_server.sandbox.inside",
    "cpu_engine.vllm_cpu",
)
"""Beginnings of names: the first runs in the sandbox only, vLLM the second."""

HEAVY = ("verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl.workers.engine_workers")
"""Modules of verl whose imports of other packages are taken over by the first process."""

AT_ONCE = 2
DEADLINE_S = 60


def modules() -> list[str]:
    """Dotted names of all modules of the packages, without the exempt ones."""
    paths = (path for package in PACKAGES for path in (REPO_ROOT / package).rglob("*.py"))
    names = {
        ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    }
    return sorted(name for name in names if not name.startswith(EXEMPT))


def is_ours_or_verls(name: str) -> bool:
    return name.split(".")[0] in (*PACKAGES, "verl")


class Fork:
    """A forked process, and the text that it hands back.

    Args:
        work: is called in the new process; its text is handed back.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        self._pipe, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(DEADLINE_S)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nowhere, descriptor)
            os.write(theirs, work().encode())
            os._exit(0)
        os.close(theirs)

    def text(self) -> str:
        """Wait for the end of the process; its text, or how the process was ended."""
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        return text if status == 0 else f"ended with wait status {status}, after {DEADLINE_S=}"


def imported_by_verl() -> str:
    """Modules of other packages that verl's heavy modules import, a line each."""
    for name in HEAVY:
        importlib.import_module(name)
    return "\n".join(name for name in sys.modules if not is_ours_or_verls(name))


def error_of(name: str) -> str:
    """Import one module; the last line of its traceback, an empty text without one."""
    early = [module for module in sys.modules if is_ours_or_verls(module)]
    if early:
        return f"imported before it: {early}"
    try:
        importlib.import_module(name)
    except BaseException:
        return traceback.format_exc().strip().splitlines()[-1]
    return ""


def errors(names: list[str]) -> Iterator[tuple[str, str]]:
    """(name, error) of the modules that cannot be imported first."""
    for at in range(0, len(names), AT_ONCE):
        forks = {name: Fork(lambda name=name: error_of(name)) for name in names[at : at + AT_ONCE]}
        for name, fork in forks.items():
            if text := fork.text():
                yield name, text


def main() -> None:
    for name in Fork(imported_by_verl).text().splitlines():
        with contextlib.suppress(ImportError):  # a few can be imported by their package only
            importlib.import_module(name)
    gc.freeze()  # otherwise a collection in a forked process copies all pages
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print(json.dumps(dict(errors(modules()[::every])), indent=1))


if __name__ == "__main__":
    main()
