"""Agent loops that the run config itself registers, besides those of `config/agent_loops.yaml`.

The checks before a run and the workers that run agent loops merge them alike. What is wrong with an
entry is said by `verl_mixed.run.sections.agent_loops`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

BLOCKS = ("mixed.agent_loops", "agent_loops")
"""Sections of the run config with agent loops by name; the later one wins. The first one is for a
file of `config/mixture/`."""


def with_blocks(
    entries: Mapping[str, Mapping[str, Any]], blocks: Iterable[Any]
) -> dict[str, dict[str, Any]]:
    """Name -> settings of each agent loop: `entries`, with the blocks over them.

    A block changes single settings of an entry with the same name. What is no mapping is left out.

    Args:
        entries: agent loops of the file, or those that are registered.
        blocks: the values at `BLOCKS`, resolved and as plain containers.
    """
    merged = {name: dict(entry) for name, entry in entries.items()}
    for block in blocks:
        for name, entry in block.items() if isinstance(block, Mapping) else ():
            if isinstance(entry, Mapping):
                merged[name] = merged.get(name, {}) | dict(entry) | {"name": name}
    return merged
