"""Rewards by name. A reward sees the model's text, the number of tool calls and the ground truth,
and no tool output.

Every reward returns `score`, which is trained; `acc`, which is 1 if the prompt counts as solved;
`format`, which is 1 if an answer was given; and its own parts, each of which becomes a metric.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from agent_loop.rewards.attempt import Attempt as Attempt
from agent_loop.rewards.attempt import Reward
from agent_loop.rewards.code import CodeOptions, CodeReward
from agent_loop.rewards.custom import LoopReward, custom_reward, split_path
from agent_loop.rewards.exact import ExactReward
from agent_loop.rewards.judge import judge_reward
from agent_loop.rewards.math import MathReward
from agent_loop.rewards.qa import QAReward
from agent_loop.rewards.reasoning_gym import ReasoningReward
from config.schema import LOOPS_OWN, load_section
from config.schema import default_reward as default_reward
from samplers.rows.made_records import installed_version
from samplers.rows.sources.reasoning_gym import KIND


def _code(name: str, options: Mapping[str, Any]) -> Reward:
    section = load_section(CodeOptions, dict(options), "reward_options")
    return CodeReward(name=name, options=section)


def _reasoning(name: str) -> Reward:
    try:
        installed_version(KIND)
    except ValueError as error:
        raise ValueError(f"reward={name!r}: {error}") from error
    return ReasoningReward(name=name)


_WITH_OPTIONS: dict[str, Callable[[str, Mapping[str, Any]], Reward]] = {
    "code": _code,
    "judge": judge_reward,
    "code_reward": _code,  # AgentFly's name
}
_PLAIN: dict[str, Callable[..., Reward]] = {
    LOOPS_OWN: LoopReward,
    "qa": QAReward,
    "qa_f1": partial(QAReward, by_f1=True),
    "math": MathReward,
    "exact_match": ExactReward,
    "reasoning_gym": _reasoning,
    # AgentFly's names
    "qa_em_reward": QAReward,
    "qa_f1_reward": partial(QAReward, by_f1=True),
    "math_reward": MathReward,
    "math_reward_format": partial(MathReward, format_weight=0.1),
    "math_reward_tool": partial(MathReward, format_weight=0.1, asks_for_call=True),
    "math_reward_string_equal": partial(MathReward, by_text=True),
    "exact_match_reward": ExactReward,
}

REWARDS: tuple[str, ...] = tuple(sorted({*_WITH_OPTIONS, *_PLAIN} - {LOOPS_OWN}))
"""Rewards that judge answers, by name; `path/to/file.py:function` names a user's own."""


def reward_for(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward with this name and these `reward_options`; the process has one instance.

    Raises:
        ValueError: there is no such reward or file, it cannot be loaded, or an option is wrong.
    """
    return _reward_for(name, json.dumps(options or {}, sort_keys=True))


@lru_cache(256)
def _reward_for(name: str, options_json: str) -> Reward:
    options = json.loads(options_json)
    if split_path(name) is not None:
        return custom_reward(name, options)
    if name in _WITH_OPTIONS:
        return _WITH_OPTIONS[name](name, options)
    if name not in _PLAIN:
        raise ValueError(
            f"unknown reward={name!r}: choose one of {', '.join(REWARDS)}, name a function as "
            f"path/to/file.py:function, or {LOOPS_OWN} if the agent loop computes the reward; set "
            "mixed.sources.<source>.reward"
        )
    if options:
        raise ValueError(
            f"reward_options={sorted(options)} of reward={name!r}: it has no options; remove them"
        )
    return _PLAIN[name](name=name)


def runs_programs(name: str) -> bool:
    """Whether a reward makes tool calls, one for each hidden test."""
    return _WITH_OPTIONS.get(name) is _code
