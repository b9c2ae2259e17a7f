"""The limits that a tool has of its own: rate, slots, deadline, retries, cache.

The state of each is beside that of the run's limiter, named by what the entry names, so that all
processes of the run and all sources that name one tool share it.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from agent_loop.tools.limiter import Limiter, limiter_of, state_path
from agent_loop.tools.routes import Route
from config.schema import MixedConfig, ToolConfig
from config.tool_entries import ToolEntry, per_minute
from rate_limit.gcra import Rate
from rate_limit.slots import FileSlots


class OwnLimits(Protocol):
    """The fields of `ToolEntry` that limit its calls; the reward `judge` has them too."""

    @property
    def target(self) -> str: ...
    @property
    def rate(self) -> str | None: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def retry(self) -> int | None: ...
    @property
    def cache(self) -> bool | None: ...


def own_state_path(target: str, tools: ToolConfig, mixed: MixedConfig) -> Path:
    """Path of the limiter of what an entry names."""
    words = re.sub(r"\W+", "_", target).strip("_")[-40:]
    digest = hashlib.sha1(target.encode()).hexdigest()[:8]
    return state_path(tools, mixed).with_suffix(".tools") / f"{words}-{digest}.state"


def own_limiter(entry: OwnLimits, tools: ToolConfig, mixed: MixedConfig) -> Limiter | None:
    """The limiter of an entry with a rate; None without one.

    Raises:
        ValueError, OSError, RuntimeError: see `make_limiter`.
    """
    calls = per_minute(entry.rate) if entry.rate is not None else None
    if calls is None:
        return None
    path = own_state_path(entry.target, tools, mixed)
    return limiter_of(Rate(per_minute=calls, burst=1), path, mixed)


def limited(route: Route, entry: OwnLimits, tools: ToolConfig, mixed: MixedConfig) -> Route:
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


def limited_entries(mixed: MixedConfig) -> Iterator[ToolEntry]:
    """The entries of all sources that have a rate of their own, one for each target."""
    entries = {
        entry.target: entry
        for source in mixed.sources.values()
        for entry in source.tools or ()
        if entry.rate is not None
    }
    yield from entries.values()
