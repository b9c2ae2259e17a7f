"""Rewards of trajectories; `registry` has them by name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_loop.rewards.registry import (
        LOOPS_OWN,
        REWARDS,
        Attempt,
        Reward,
        default_reward,
        reward_for,
        runs_programs,
        split_path,
    )

__all__ = [
    "LOOPS_OWN",
    "REWARDS",
    "Attempt",
    "Reward",
    "default_reward",
    "reward_for",
    "runs_programs",
    "split_path",
]


def __getattr__(name: str) -> Any:
    """Import the registry on first use: the trainer asks for the options of a judge only."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_loop.rewards import registry

    return getattr(registry, name)
