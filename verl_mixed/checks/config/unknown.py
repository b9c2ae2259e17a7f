"""Keys that neither verl nor this project knows, in the sections that verl reads without a class.

verl builds classes of actor, rollout, reference model and critic, which refuse an unknown key. It
reads the other sections key by key: a misspelt key there would be ignored.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from config.lookup import at
from verl_mixed.checks.config.unread import is_unread

_SECTIONS = ("trainer.", "data.", "algorithm.", "actor_rollout_ref.model.")

_READ_TOO = (
    "data.cache_dir",
    "data.chat_template_func",
    "data.filter_prompts",
    "data.need_tools_kwargs",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "actor_rollout_ref.model.target_parameters",
)
"""Keys that verl reads and its composed config lacks."""

_OPEN = (
    "data.apply_chat_template_kwargs.",
    "data.mm_processor_kwargs.",
    "data.sources.",  # follow `mixed`, which has classes
    "data.prompts.",
    "data.tool_config.",
    "algorithm.state_masked_grpo.",
    "algorithm.pf_ppo.",
    "actor_rollout_ref.model.override_config.",
    "actor_rollout_ref.model.lora.",
    "actor_rollout_ref.model.fused_kernel_options.",
)
"""Sections with keys of other libraries, or with a check of their own."""


def is_unknown(key: str) -> bool:
    """Whether nothing reads a key, if the shipped config has no such key."""
    return key.startswith(_SECTIONS) and not (key.startswith(_OPEN) or key in _READ_TOO)


def unknown_problems(config: Mapping[str, Any], added: Collection[str]) -> Iterator[str]:
    """`added` are the leaves that the shipped config lacks, see `changed_keys`."""
    for key in sorted(filter(is_unknown, added)):
        if not is_unread(key, config):  # else `unread_problems` says more
            yield (
                f"{key}={at(config, key)!r}: neither verl 0.9.1 nor this project has this key; "
                "correct its name, or remove it"
            )
