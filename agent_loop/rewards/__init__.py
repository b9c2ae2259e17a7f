"""Rewards of trajectories; `registry` has them by name."""

from importlib import import_module
from typing import Any

_OF_1_1_0 = (
    *("LOOPS_OWN", "REWARDS", "Attempt", "Reward"),
    *("default_reward", "reward_for", "runs_programs", "split_path"),
)


def __getattr__(name: str) -> Any:
    """A name that release 1.1.0 had here. The registry is imported on first use, because the
    trainer needs the options of a judge only."""
    if name not in _OF_1_1_0:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("agent_loop.rewards.registry"), name)
