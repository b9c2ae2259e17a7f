"""verl's `rollout.multi_turn` with our keys: `multi_turn.tool_config.*` stays where users know it.

verl adapter: `MultiTurnConfig` (workers/config/rollout.py at 0.9.1) is built from its `_target_`,
which config/mixed_dataset_grpo.yaml points here.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import MultiTurnConfig


@dataclass
class MixedMultiTurnConfig(MultiTurnConfig):
    """`MultiTurnConfig` and what our agent loops need besides."""

    tool_config: dict[str, Any] = field(default_factory=dict)
    """Values of `config.schema.ToolConfig`."""

    max_turn_length: int | None = None
    """Tokens in one generation; None leaves only the response budget."""
