"""verl's dataset with the mixture's agent in each row.

verl adapter: `data.custom_cls` (trainer/ppo/utils.py at 0.9.1).
"""

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class MixedRLHFDataset(RLHFDataset):
    """`RLHFDataset` whose rows carry the agent that `mixed.sources.<name>.agent` names, if any."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        source = self.config.sources.get(row["data_source"])
        if source is not None and source.agent is not None:
            row["agent_name"] = source.agent
        return row
