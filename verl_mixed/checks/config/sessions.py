"""Persistent interpreters: whether the tool servers keep one for each trajectory under way."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mixed.checks.config.batches import stored_rows
from verl_mixed.run.sections import agent_loops, sound_sources


def sessions_needed(config: Mapping[str, Any]) -> int:
    """Interpreters that trajectories may hold at once; 0 if no agent loop keeps one.

    An upper bound: every trajectory is counted, of each source. A trajectory whose interpreter is
    ended by the server is lost.
    """
    loops, _ = agent_loops(config)
    keeps = {name for name, loop in (loops or {}).items() if loop.get("persistent_interpreter")}
    agents = {source.agent for source in sound_sources(config).values() if source.takes_part}
    rows = stored_rows(config)
    if rows is None or not (agents & keeps or (None in agents and keeps)):
        return 0  # a source without an agent takes the one that its rows name
    return rows.trajectories


def own_session_problems(config: Mapping[str, Any], max_sessions: Any) -> Iterator[str]:
    """`mixed.tool_server.max_sessions` that is too small; the run chooses one if there is none."""
    needed = sessions_needed(config)
    if isinstance(max_sessions, int) and max_sessions < needed:
        yield (
            f"mixed.tool_server.max_sessions={max_sessions}: {needed} trajectories with "
            "persistent_interpreter may be under way, and those above the limit are lost; leave it "
            "out, or raise it"
        )


def given_session_problems(config: Mapping[str, Any], healths: Sequence[bytes]) -> Iterator[str]:
    """Tool servers that are given and keep too few interpreters, all together.

    Args:
        healths: what the `/health` of each server answers.
    """
    needed = sessions_needed(config)
    kept = [_max_sessions(health) for health in healths]
    known = [count for count in kept if count is not None]
    if known and len(known) == len(kept) and sum(known) < needed:
        yield (
            f"TOOL_SERVER_URL: the tool servers keep {sum(known)} persistent interpreters, and "
            f"{needed} trajectories with persistent_interpreter may be under way; start them with "
            f"`verl-mixed serve-tools --max-sessions {-(-needed // len(known))}`"
        )


def _max_sessions(health: bytes) -> int | None:
    """None if the answer does not say it: without the token, or by another kind of server."""
    try:
        count = json.loads(health).get("max_sessions")
    except (ValueError, AttributeError):
        return None
    return count if isinstance(count, int) else None
