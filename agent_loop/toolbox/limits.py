"""The limits that a tool has of its own: rate, slots, deadline, retries, cache.

The state of each is beside that of the run's limiter, named by what the entry names, so that all
processes of the run and all sources that name one tool share it.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_loop.tools.limiter import Limiter, limiter_of, own_folder, state_path
from agent_loop.tools.routes import Route
from config.schema import MixedConfig, SourceConfig, ToolConfig
from config.tool_entries import ToolEntry, per_minute
from rate_limit import ray_limiter
from rate_limit.gcra import Rate
from rate_limit.slots import FileSlots


def own_name(target: str) -> str:
    """The name of the limits of what an entry names, in files and metrics."""
    words = re.sub(r"\W+", "_", target).strip("_")[-40:]
    return f"{words}-{hashlib.sha1(target.encode()).hexdigest()[:8]}"


def own_state_path(target: str, tools: ToolConfig, mixed: MixedConfig) -> Path:
    """Path of the limiter of what an entry names."""
    return own_folder(state_path(tools, mixed)) / f"{own_name(target)}.state"


def own_limiter(entry: ToolEntry, tools: ToolConfig, mixed: MixedConfig) -> Limiter | None:
    """The limiter of an entry with a rate; None without one.

    Raises:
        ValueError, OSError, RuntimeError: see `make_limiter`.
    """
    calls = per_minute(entry.rate) if entry.rate is not None else None
    if calls is None:
        return None
    path = own_state_path(entry.target, tools, mixed)
    return limiter_of(Rate(per_minute=calls, burst=1), path, mixed)


def limited(route: Route, entry: ToolEntry, tools: ToolConfig, mixed: MixedConfig) -> Route:
    """The route with the limits of an entry."""
    path = own_state_path(entry.target, tools, mixed).with_suffix(".slots")
    changes: dict[str, Any] = {
        "limiter": own_limiter(entry, tools, mixed),
        "slots": None if entry.slots is None else FileSlots(path, entry.slots),
        "timeout_s": entry.timeout,
        "max_retries": entry.retry,
        "caches": entry.cache,
    }
    return route.limited(**changes)


def open_own_limiters(tools: ToolConfig, mixed: MixedConfig) -> dict[str, Limiter]:
    """Name -> limiter, of all tools of the run that have a rate of their own.

    Only the process that starts a run calls this function: with the Ray backend it ends the actors
    that an earlier start of the run left behind.

    Raises:
        ValueError, OSError, RuntimeError: see `make_limiter`.
    """
    limiters: dict[str, Limiter] = {}
    settings = mixed.rate_limit
    for entry in limited_entries(mixed.sources.values()):
        if settings.backend == "ray" and settings.on_config_change == "adopt":
            ray_limiter.end(str(own_state_path(entry.target, tools, mixed)))
        if (limiter := own_limiter(entry, tools, mixed)) is not None:
            limiters[own_name(entry.target)] = limiter
    return limiters


def limited_entries(sources: Iterable[SourceConfig]) -> list[ToolEntry]:
    """The entries of all sources that have a rate of their own, one for each target."""
    entries = {
        entry.target: entry
        for source in sources
        for entry in source.tools or ()
        if entry.rate is not None
    }
    return list(entries.values())
