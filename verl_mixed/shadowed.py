"""Finds what hides a package of this project: `config` and `cluster` are common names."""

import os
from importlib.util import find_spec

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
