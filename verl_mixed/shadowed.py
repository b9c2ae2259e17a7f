"""Finds what hides a package of this project: `config` and `cluster` are common names."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = (
    *("agent_loop", "cluster", "config", "cpu_engine"),
    *("rate_limit", "samplers", "tool_server"),
)


def shadows() -> list[str]:
    """A sentence for each package that Python would import from elsewhere."""
    found = []
    for name in PACKAGES:
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        place = next((each for each in places if each), None)
        ours = os.path.join(ROOT, name)
        if place is None or f"{os.path.realpath(place)}/".startswith(f"{os.path.realpath(ours)}/"):
            continue
        found.append(
            f"{place} hides the package {name!r} of this project, which is in {ours}: rename it, "
            "uninstall it, or take its folder off PYTHONPATH"
        )
    return found


def share_names() -> list[str]:
    """Look for modules of the core behind a package or module of the user's with the same name.

    A user's `samplers/` or `config.py` is what `import samplers` or `import config` finds then, and
    `samplers.ledger` is ours.

    Returns:
        Names of modules that both have, the user's first.

    Raises:
        ImportError: the user's module cannot be imported.
    """
    both: list[str] = []
    for name in ("config", "rate_limit", "samplers"):
        ours = Path(ROOT, name)
        try:
            found = import_module(name)
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"cannot import {name!r} of this folder, which hides {ours}: {error!r}; rename it"
            ) from error
        places: list[str] = list(getattr(found, "__path__", []))
        if str(ours) in map(os.path.realpath, places):
            continue
        both += [
            f"{name}.{path.stem}"
            for path in ours.glob("[!_]*")
            if any(Path(place, path.name).exists() for place in places)
        ]
        found.__path__ = [*places, str(ours)]
        if found.__spec__ is not None:
            found.__spec__.submodule_search_locations = found.__path__
    return both


def refuse_loaded(both: list[str]) -> None:
    """Refuse a user's module that was loaded in the place of one of ours.

    Raises:
        ImportError: one was.
    """
    if wrong := [name for name in both if name in sys.modules]:
        place = sys.modules[wrong[0]].__file__
        raise ImportError(f"{place} hides {wrong[0]} of this project: rename it")
