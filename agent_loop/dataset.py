"""verl's dataset with what the mixture says of each row.

verl adapter: `data.custom_cls` (trainer/ppo/utils.py at 0.9.1), and the column `__rollout_n__`
(trainer/ppo/v1/agent_loop_tq.py:115).
"""

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class MixedRLHFDataset(RLHFDataset):
    """`RLHFDataset` whose rows carry their `row_id`, the agent that `mixed.sources.<name>.agent`
    names, if any, and in training the number of trajectories of their source."""

    is_validation = False
    """Set by the trainer; validation samples `rollout.val_kwargs.n` of every source."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        row["row_id"] = row["extra_info"]["row_id"]
        source = self.config.sources.get(row["data_source"])
        if source is not None and source.get("agent") is not None:
            row["agent_name"] = source.agent
        if not self.is_validation:
            own = source.get("rollout_n") if source is not None else None
            row["__rollout_n__"] = own or self.config.rollout_n
        return row
