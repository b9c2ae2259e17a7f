"""`python -m agentfly.cli` where AgentFly is not installed: says what to type here.

A module, not a package: where both are in one folder, Python takes AgentFly's package. Where this
module is found first, it looks for the package behind it and steps aside.
"""

import os
import runpy
import shlex
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

NAME = "agentfly"


def installed() -> ModuleSpec | None:
    """AgentFly's package, on the path or from the finder of an editable install."""
    found = [PathFinder.find_spec(NAME, [place]) for place in sys.path]
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    found += [finder.find_spec(NAME, None) for finder in finders]
    return next((spec for spec in found if spec and spec.origin and not is_this(spec.origin)), None)


def is_this(file: str) -> bool:
    return os.path.realpath(file) == os.path.realpath(__file__)


if (spec := installed()) is not None:
    sys.modules[NAME] = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(sys.modules[NAME])
    if __name__ == "__main__":
        runpy.run_module(NAME, run_name="__main__", alter_sys=True)
else:
    words = sys.orig_argv
    at = next((at for at, word in enumerate(words) if word.split(".")[0] == NAME), 0)
    if not at or words[at - 1] != "-m":
        raise ModuleNotFoundError(f"No module named {NAME!r}", name=NAME)
    typed = words[at + 1 :] if words[at + 1 : at + 2] == ["train"] else ["train", "KEY=VALUE"]
    print(
        f"error: AgentFly is not installed; type its keys here as: verl-mixed {shlex.join(typed)}",
        file=sys.stderr,
    )
    sys.exit(2)
