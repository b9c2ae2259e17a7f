"""Keys and blocks that neither verl nor this project knows, and that would be ignored.

verl builds classes of actor, rollout, reference model and critic, which refuse an unknown key. It
reads the other sections key by key: a misspelt key there would be ignored. So would a whole block
at the top of the config.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from config.lookup import at, flatten
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig
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

BLOCKS = (
    "model_engine",
    "actor_rollout_ref",
    "data",
    "critic",
    "custom_reward_function",
    "reward_model",
    "sandbox_fusion",
    "reward",
    "algorithm",
    "distillation",
    "transfer_queue",
    "trainer",
    "global_profiler",
    "skip",
    "ray_kwargs",
    "agent_loops",
    "mixed",
)
"""Keys at the top of the config. They are listed here, because a user may edit the files of
`config/`, and the composed config would then have the wrong block on both sides of a comparison."""

_GROUPS = ("mixture", "prompts")
"""Groups of files whose content belongs below `mixed`."""


def block_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Blocks at the top of the config that nothing reads.

    `given` are plain containers, interpolations not resolved. A block that an interpolation names
    is a variable of the user's.
    """
    texts = [value for value in flatten(given).values() if isinstance(value, str)]
    places = {name: f"mixed.{name}" for name in MixedConfig.model_fields}
    places |= {name: f"{TOOL_CONFIG}.{name}" for name in ToolConfig.model_fields}
    places |= {name: name for name in BLOCKS}
    for name in (name for name in given if name not in BLOCKS):
        if any(re.search(rf"\$\{{{re.escape(str(name))}[.\[}}]", text) for text in texts):
            continue
        near = get_close_matches(str(name), places, n=1)
        remedy = f"did you mean {places[near[0]]}?" if near else "remove it"
        if name in _GROUPS:
            remedy = f"begin the file of config/{name} with the line `# @package mixed`"
        yield f"{name}: neither verl 0.9.1 nor this project has such a block; {remedy}"


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
