"""verl's `rollout.multi_turn`, with `multi_turn.tool_config.*` and `multi_turn.max_turn_length`.

verl adapter: `MultiTurnConfig` (workers/config/rollout.py at 0.9.1). verl builds it from its
`_target_`, which config/mixed_dataset_grpo.yaml sets to the class below.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import MultiTurnConfig


@dataclass
class MixedMultiTurnConfig(MultiTurnConfig):
    tool_config: dict[str, Any] = field(default_factory=dict)
    """Values of `config.schema.ToolConfig`."""

    max_turn_length: int | None = None
    """Tokens in one generation; None: no limit but the response budget."""
