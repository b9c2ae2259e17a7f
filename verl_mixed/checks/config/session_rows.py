"""Sources whose sessions may be several rows, with settings that depend on how a session is cut."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from agent_loop.training.session_rules import faults_of_sequences
from config.gateway import GATEWAY_LOOP
from verl_mixed.checks.config.tools import agents_of
from verl_mixed.run.sections import entry_of, loaded


def session_row_problems(config: Mapping[str, Any], *, data: bool = True) -> list[str]:
    """Every such setting, one sentence each.

    Args:
        data: whether the rows may be read, for the agents of sources that name none.
    """
    found = [
        f"{name} ({agent})"
        for name, agents in sorted(agents_of(config, data=data).items())
        for agent in agents
        if _several_rows_of(str(entry_of(config, agent).get("_target_", "")))
    ]
    if not found:
        return []
    why = f"a session of these sources may be several rows: {', '.join(found)}"
    faults = faults_of_sequences(config)
    return [f"{setting}: {rule}, and {why}; {remedy}" for setting, rule, remedy in faults]


@cache
def _several_rows_of(target: str) -> bool:
    if target.startswith(("agent_loop.", "verl.")) or not target:
        return target == GATEWAY_LOOP  # without an import, which takes seconds
    return bool(getattr(loaded(target)[0], "several_rows", False))
