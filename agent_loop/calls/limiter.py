"""The run's rate limiter: the choice of its backend, its limits and its metrics.

A state file limits the processes of one node; a Ray actor limits the processes of a cluster. A file
is used on several nodes only if `lock_probe` has shown that locks on its folder reach all of them.
A backend is imported when it is chosen.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from config.schema import MixedConfig, RateLimitConfig, ToolConfig
from rate_limit.gcra import Rate

if TYPE_CHECKING:
    from rate_limit.file_limiter import FileRateLimiter
    from rate_limit.ray_limiter import RayRateLimiter
    from rate_limit.snapshot import Snapshot

_log = logging.getLogger(__name__)

Limiter: TypeAlias = Union["FileRateLimiter", "RayRateLimiter"]


def rate_of(tools: ToolConfig, mixed: MixedConfig) -> Rate:
    """The rate limit of a run's settings.

    Raises:
        ValueError: the limits contradict each other, for example a burst above the window's limit.
    """
    window_s = mixed.rate_limit.strict_window_s
    per_minute, shares = tools.rate_limit_per_minute, mixed.rate_limit.shares
    if window_s is not None:
        limit = math.floor(per_minute * window_s / 60)
        per_minute = Rate.within_window(limit, window_s, tools.burst).per_minute
    return Rate(
        per_minute=per_minute,
        burst=tools.burst,
        min_interval_s=tools.request_interval,
        shares=shares,
    )


def reachable_per_minute(per_minute: float, interval_s: float) -> float:
    """Calls a minute that can pass for long: the rate, or fewer if calls must be further apart."""
    if interval_s * per_minute <= 60 * (1 + 1e-9):
        return per_minute
    return 60 / interval_s


def state_path(tools: ToolConfig, mixed: MixedConfig) -> Path:
    """Path of the limiter's state file; with the Ray backend, the path is the actor's name."""
    return Path(tools.rate_limit_file or Path(mixed.run_dir) / "rate_limit.state")


def own_folder(path: Path) -> Path:
    """The folder of the limits that tools have of their own, beside the run's limiter at `path`."""
    return path.with_suffix(".tools")


def make_limiter(tools: ToolConfig, mixed: MixedConfig) -> Limiter:
    """This process's handle of the run's limiter.

    Raises:
        ValueError: another run uses the same limiter with other limits, or the limits contradict
            each other.
        OSError: the state file cannot be used.
        RuntimeError: several nodes share the file, and this node's clock is wrong.
    """
    return limiter_of(rate_of(tools, mixed), state_path(tools, mixed), mixed)


def limiter_of(rate: Rate, path: Path, mixed: MixedConfig) -> Limiter:
    """This process's handle of a limiter, which keeps its state at `path`; see `make_limiter`."""
    settings = mixed.rate_limit
    limits = (rate.per_minute, rate.burst, rate.min_interval_s)
    shares = dict(rate.weights) or None
    if settings.backend == "ray":
        from rate_limit.ray_limiter import RayRateLimiter

        return RayRateLimiter(str(path), *limits, shares=shares, adaptive=settings.adaptive)
    from rate_limit.file_limiter import FileRateLimiter

    return FileRateLimiter(
        path,
        *limits,
        shares=shares,
        adaptive=settings.adaptive,
        on_config_change=settings.on_config_change,
        across_hosts=settings.across_nodes,
    )


def resolve_backend(tools: ToolConfig, mixed: MixedConfig) -> RateLimitConfig:
    """The limiter settings with `backend` decided for the Ray cluster of this process.

    Only the process that starts a run calls this function: it ends the limiter actor that an
    earlier start of the run left behind.

    Raises:
        RuntimeError: `backend` is `file` on several nodes, and locks do not reach all of them.
    """
    settings = mixed.rate_limit
    if not tools.enable_global_rate_limit:
        return settings
    from agent_loop.calls.lock_probe import alive_nodes, lock_problems

    several = len(alive_nodes()) > 1
    if settings.backend == "auto":
        settings = settings.model_copy(update={"backend": "ray" if several else "file"})
    elif settings.backend == "file" and several:
        if problems := lock_problems(state_path(tools, mixed).parent):
            raise RuntimeError(
                "mixed.rate_limit.backend=file does not reach all nodes: " + "; ".join(problems)
            )
        settings = settings.model_copy(update={"across_nodes": True})
    if not tools.rate_limit_file:  # the state is from an earlier start of this run
        settings = settings.model_copy(update={"on_config_change": "adopt"})
    end_earlier(state_path(tools, mixed), settings)
    return settings


def end_earlier(path: Path, settings: RateLimitConfig) -> None:
    """End the limiter actor that an earlier start of the run left behind."""
    if settings.backend == "ray" and settings.on_config_change == "adopt":
        from rate_limit import ray_limiter

        ray_limiter.end(str(path))


_NUMBERS = ("granted", "waiting", "waited_s", "utilisation")
_NUMBERS_OF_RUN = (*_NUMBERS, "penalties", "rate_factor", "abandoned")
_NUMBERS_OF_SOURCE = ("granted", "waited_s", "refused")


def metrics_now(limiter: Limiter, tool: str | None = None) -> dict[str, float]:
    """`limiter_metrics`. An unreadable limiter gives a warning and no metrics, and no run ends."""
    from ray.exceptions import RayError

    try:
        return limiter_metrics(limiter.snapshot(), tool)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        _log.warning("no metrics of the limiter in this step: %s: %s", type(error).__name__, error)
        return {}


def limiter_metrics(snapshot: "Snapshot", tool: str | None = None) -> dict[str, float]:
    """`mixed/limiter/*` and `mixed/<source>/limiter/*`; for a limit that a tool has of its own,
    `mixed/limiter/<tool>/*`.

    `waiting`, `utilisation` and `rate_factor` are of now; the others are sums since the state
    began.
    """
    if tool is not None:
        return {f"mixed/limiter/{tool}/{name}": getattr(snapshot, name) for name in _NUMBERS}
    metrics = {f"mixed/limiter/{name}": getattr(snapshot, name) for name in _NUMBERS_OF_RUN}
    for source, numbers in snapshot.sources.items():
        if source:
            for name in _NUMBERS_OF_SOURCE:
                metrics[f"mixed/{source}/limiter/{name}"] = getattr(numbers, name)
    return metrics
