"""verl's dataset, with the prompt, agent and group size that the mixture sets for each source.

verl adapter: `data.custom_cls` (trainer/ppo/utils.py at 0.9.1), and the column `__rollout_n__`
(trainer/ppo/v1/agent_loop_tq.py:115).
"""

from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from agent_loop.prompts import prompt_of
from agent_loop.row import Row
from config.schema import (
    TOOL_CONFIG,
    PromptConfig,
    SourceConfig,
    ToolConfig,
    load_section,
    template_of,
)
from samplers.mixture_rows import MixtureRows


class MixedRLHFDataset(MixtureRows, RLHFDataset):
    """Rows of `RLHFDataset` with four changes.

    | column | value |
    | --- | --- |
    | `row_id` | that of `extra_info` |
    | `raw_prompt` | the row's messages in the template of the source, see `agent_loop.prompts` |
    | `agent_name` | `mixed.sources.<name>.agent`, if set |
    | `__rollout_n__` | trajectories of the source's group; in training only |
    """

    is_validation = False
    """The trainer sets it. In validation every source has `rollout.val_kwargs.n` trajectories."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = OmegaConf.to_container(self.config, resolve=True)
        self._sources = {
            name: load_section(SourceConfig, values, f"mixed.sources.{name}")
            for name, values in config["sources"].items()
        }
        self._prompts = {
            name: load_section(PromptConfig, values, f"mixed.prompts.{name}")
            for name, values in config["prompts"].items()
        }
        self._tools = load_section(ToolConfig, config["tool_config"], TOOL_CONFIG)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = Row.from_columns(super().__getitem__(item))
        if not row.row_id:
            raise ValueError(
                f"row {item} has no extra_info.row_id; write it with `verl-mixed prepare`"
            )
        source = self._sources.get(row.source)
        if source is not None:
            row = replace(row, agent=source.agent or row.agent)
            template = template_of(row.source, source, row.agent, self._prompts)
            messages = prompt_of(row.messages, template, self._tools, source.system_prompt)
            row = replace(row, messages=messages)
        if not self.is_validation:
            own = source.rollout_n if source is not None else None
            row = replace(row, rollout_n=own or self.config.rollout_n)
        return row.columns()
