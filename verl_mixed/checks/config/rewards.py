"""Keys of verl's reward workers, which are never asked: agent loops judge trajectories themselves.

verl asks them for trajectories without a `reward_score` (experimental/agent_loop/agent_loop.py at
0.9.1), and every trajectory of a run here has one. A reward model on the actor's GPUs would be
asked after that, and would replace the rewards (trainer/ppo/v1/trainer_base.py:577).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from config.lookup import at, flatten
from verl_mixed.run.compose import verl_folder

_REWARD = "mixed.sources.<name>.reward"
_LEGACY = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""Sections of earlier releases of verl, which its V1 trainer never reads; their values are null."""

_REMEDIES = {
    "reward.reward_model": "serve the model in a process of its own and ask it by "
    f"{_REWARD}=judge (docs/judges.md), or in a function ({_REWARD}=path/to/file.py:function)",
    "reward.custom_reward_function": f"name it as {_REWARD}=path/to/file.py:function, with its "
    "arguments in reward_options",
    "reward.sandbox_fusion": f"{_REWARD}=code runs hidden tests at tool_config.server_url",
}


def reward_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Each key of verl's rewards that has another value than verl's own, but `reward.num_workers`,
    the number of processes that verl starts anyway."""
    text = (verl_folder() / "trainer" / "config" / "reward" / "reward.yaml").read_text()
    default = flatten(yaml.safe_load(text), "reward")
    given = flatten({name: at(config, name) or {} for name in ("reward", *_LEGACY)})
    for key, value in given.items():
        if value != default.get(key) and key != "reward.num_workers":
            section = key if key.startswith("reward.") else f"reward.{key}"
            remedies = (words for start, words in _REMEDIES.items() if section.startswith(start))
            yield (
                f"{key}={value!r}: it is never read, because agent loops judge by {_REWARD}; "
                f"{next(remedies, 'set that instead')}, and leave this key out"
            )
