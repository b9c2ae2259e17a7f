"""The limits that a tool has of its own: rate, slots, deadline, retries, cache.

The state of each is beside that of the run's limiter, named by what the entry names, so that all
processes of the run and all sources that name one tool share it.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent_loop.calls.limiter import Limiter, end_earlier, limiter_of, own_folder, state_path
from config.schema import MixedConfig, ToolConfig
from config.tool_entries import per_minute, without_secrets
from rate_limit.gcra import Rate

if TYPE_CHECKING:
    from agent_loop.calls.routes import Route


def own_name(target: str) -> str:
    """The name of the limits of what an entry names, in files and metrics."""
    words = re.sub(r"\W+", "_", without_secrets(target)).strip("_")[-40:]
    return f"{words}-{hashlib.sha1(target.encode()).hexdigest()[:8]}"


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
    return own_folder(state_path(tools, mixed)) / f"{own_name(target)}.state"


def own_limiter(entry: OwnLimits, tools: ToolConfig, mixed: MixedConfig) -> Limiter | None:
    """The limiter of an entry with a rate; None without one.

    Raises:
        ValueError, OSError, RuntimeError: see `make_limiter`.
    """
    if entry.rate is None or (calls := per_minute(entry.rate)) is None:
        return None
    path = own_state_path(entry.target, tools, mixed)
    return limiter_of(Rate(per_minute=calls, burst=1), path, mixed)


def limited(
    route: "Route",
    limits: OwnLimits,
    tools: ToolConfig | None = None,
    mixed: MixedConfig | None = None,
) -> "Route":
    """The route with the deadline, retries and cache of `limits`; and with their rate and slots, if
    the settings of a run say where the state of these is."""
    changes = {"timeout_s": limits.timeout, "max_retries": limits.retry, "caches": limits.cache}
    if tools is None or mixed is None:
        return route.limited(**changes)
    from rate_limit.slots import FileSlots  # late: the trainer needs the limits' names alone

    slots = None
    if limits.slots is not None:
        path = own_state_path(limits.target, tools, mixed).with_suffix(".slots")
        slots = FileSlots(path, limits.slots)
    return route.limited(**changes, limiter=own_limiter(limits, tools, mixed), slots=slots)


def open_own_limiters(
    owners: Iterable[OwnLimits], tools: ToolConfig, mixed: MixedConfig
) -> dict[str, Limiter]:
    """Name -> limiter, of the tools and judges that have a rate of their own.

    Only the process that starts a run calls this function: with the Ray backend it ends the actors
    that an earlier start of the run left behind.

    Raises:
        ValueError, OSError, RuntimeError: see `make_limiter`.
    """
    limiters: dict[str, Limiter] = {}
    for owner in owners:
        name = own_name(owner.target)
        if owner.rate is None or name in limiters:
            continue
        end_earlier(own_state_path(owner.target, tools, mixed), mixed.rate_limit)
        if (limiter := own_limiter(owner, tools, mixed)) is not None:
            limiters[name] = limiter
    return limiters
