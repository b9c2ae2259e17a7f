"""Starts a module of this project as a process: `python config/child.py MODULE ARG...`.

As `python -m MODULE`, but the current folder is last on `sys.path`, behind this project, and not
first, because a user's config.py or samplers/ there would hide ours. (`python -P` is new in 3.11.)
Standard library only, because a jumphost runs it too.
"""

import os
import sys

VARIABLE = "VERL_MIXED_FOLDER"
"""The folder in which a run was started, for its processes: users' modules are found there."""

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of this project's packages."""


def command(module: str, *words: str) -> list[str]:
    """The command that runs a module of this project with some arguments."""
    return [sys.executable, os.path.join(ROOT, "config", "child.py"), module, *words]


def put_last(folder: str) -> None:
    """Let users' modules in a folder be found, after the modules of this project."""
    sys.path += [path for path in (ROOT, folder) if path not in sys.path]


if __name__ == "__main__":
    import runpy

    if os.path.abspath(sys.path[0]) == os.path.join(ROOT, "config"):
        del sys.path[0]
    put_last(os.environ.setdefault(VARIABLE, os.getcwd()))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
