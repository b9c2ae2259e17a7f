"""Rewards by name. A reward sees the final answer and the ground truth, and nothing a tool wrote.

One file a kind. Every reward gives the same keys: `score` is what is trained, `acc` is 1 when the
prompt counts as solved, `format` is 1 when an answer was given; all in [0, 1].
"""

from collections.abc import Awaitable, Callable
from typing import Any

from agent_loop.rewards import code, math, qa
from agent_loop.tools.protocol import ToolBackend

Reward = Callable[[str | None, dict[str, Any], ToolBackend], Awaitable[dict[str, float]]]

REWARDS: dict[str, Reward] = {
    "code": code.score,
    "qa": qa.score,
    "qa_f1": qa.score_f1,
    "math": math.score,
    "exact_match": qa.score_exact,
    # AgentFly's names
    "code_reward": code.score,
    "qa_em_reward": qa.score,
    "qa_f1_reward": qa.score_f1,
    "math_reward": math.score,
    "math_reward_format": math.score_with_format,
    "math_reward_string_equal": math.score_string_equal,
    "exact_match_reward": qa.score_exact,
}

_BY_SOURCE = {"taco": "code", "nq": "qa", "math": "math"}


def reward_for(name: str) -> Reward:
    """The reward of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in REWARDS:
        raise ValueError(
            f"unknown reward={name!r}: choose one of {', '.join(sorted(REWARDS))}; "
            "set mixed.sources.<source>.reward"
        )
    return REWARDS[name]


def default_reward(source: str) -> str:
    """The reward of a source that names none: its own where it is known, else exact match."""
    return _BY_SOURCE.get(source, "exact_match")
