"""The mixture in a trainer of verl's: prompts by the plan, quotas for the replay buffer, accounts.

verl adapter: `PPOTrainer` (trainer/ppo/v1/trainer_base.py at 0.9.1), as `refill_fn.__self__` of a
custom sampler. One method of that trainer object is replaced, `_next_train_batch`: verl gives each
prompt a fresh uid after the dataset has read it, so a group in flight, or one that failed without a
row, would have no source that anybody could read. Here its uid holds the source and the draw.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from samplers.faults import RecipeError
from samplers.mixture_plan import MixturePlan
from samplers.mixture_rows import MixtureRows
from samplers.replay_buffer import MixedReplayBuffer, MixedReplayBufferAsync, Mixture
from samplers.uid import make_uid

RESUME = (
    "resume from a checkpoint of this recipe in this trainer_mode, with its data.pt, shares, rows, "
    "batch size and seed, or start anew in another trainer.default_local_dir"
)


class Door:
    """What the mixture reads of a trainer and gives to it.

    Args:
        trainer: verl's, before it has its dataset and replay buffer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._step = self._sampled = 0
        """A step, and the batches that were sampled in it."""

        self._miscounted: Counter[str] = Counter()
        self._is_settled = False
        trainer._next_train_batch = self.next_batch

    @property
    def dataset(self) -> MixtureRows:
        return self.trainer.train_dataset

    @property
    def plan(self) -> MixturePlan:
        plan = self.dataset.plan
        assert plan is not None, "the dataset follows a plan"
        return plan

    # --- quotas -------------------------------------------------------------------------------

    def quota(self, groups: int) -> dict[str, int]:
        """Source -> its groups among the next `groups` groups of the plan."""
        first = self._next_group()
        return self.plan.counts_between(first, first + groups)

    def seats(self, later: int) -> dict[str, int]:
        """Source -> its groups from the next batch to the end of the step that is `later` steps
        after this one."""
        last = (self.trainer.global_steps + later) * self.plan.batch_size
        return self.plan.counts_between(self._next_group(), last)

    def _next_group(self) -> int:
        """Groups of the plan before the batch that is sampled next."""
        step, batch_size = self.trainer.global_steps, self.plan.batch_size
        done = self._sampled if step == self._step else 0
        return (step - 1) * batch_size + done * (batch_size // self.trainer.parameter_sync_step)

    def note_sampled(self) -> bool:
        """Count a batch; returns whether it was the last of its step."""
        if self._step != self.trainer.global_steps:
            self._step, self._sampled = self.trainer.global_steps, 0
        self._sampled += 1
        return self._sampled == self.trainer.parameter_sync_step

    def ratio_errors(self, trained: Mapping[str, int]) -> dict[str, float]:
        """Prompts by which a step misses its quotas, and the run so far the prompts due.

        Args:
            trained: source -> prompts trained in this step.
        """
        step, plan = self.trainer.global_steps, self.plan
        planned = plan.counts(step - 1)
        missed = {name: trained.get(name, 0) - planned[name] for name in planned}
        self._miscounted.update(missed)
        ahead = plan.ahead(step * plan.batch_size)
        ahead += [self._miscounted[name] for name in plan.sources]
        foreign = [count for name, count in trained.items() if name not in planned]
        return {
            "mixed/ratio_error/max": float(max(*map(abs, missed.values()), *foreign, 0)),
            "mixed/ratio_error/cumulative_max": float(np.abs(ahead).max()),
        }

    # --- prompts ------------------------------------------------------------------------------

    def next_batch(self, wanted: int | Mapping[str, int] | None = None) -> Any:
        """Prompts as verl's batch (a `TensorDict`), in place of `PPOTrainer._next_train_batch`.

        Args:
            wanted: see `MixtureRows.draw`; None for `data.train_batch_size`.
        """
        trainer = self.trainer
        if not self._is_settled:
            self._settle()
        if wanted is None:
            wanted = int(trainer.config.data.train_batch_size)
        drawn, rows = self.dataset.draw(wanted)
        uids = [make_uid(prompt.source, prompt.draw) for prompt in drawn]
        columns = collate_fn(rows)
        columns["uid"] = np.array(uids, dtype=object)
        trainer.replay_buffer.start(uids, trainer.global_steps)
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", trainer.global_steps)
        return batch

    def _settle(self) -> None:
        """Take over a checkpoint's state; verl's loader hands it to the dataset only when asked for
        an iterator.

        Raises:
            RecipeError: the state is none of this recipe, or not that of the step.
        """
        self._is_settled = True
        loader, plan, mode = self.trainer.train_dataloader, self.plan, self.trainer.trainer_mode
        if loader is self.dataset:  # of a trainer of this project
            return
        try:
            if loader.next_iter_state is not None:
                iter(loader)
        except (AssertionError, KeyError, ValueError) as error:
            raise RecipeError([f"{error}; {RESUME}"]) from error
        wanted = (self.trainer.global_steps - 1) * plan.batch_size
        if plan.position < wanted or (mode == "sync" and plan.position > wanted):
            raise RecipeError(
                [
                    f"the plan is at prompt {plan.position}, and step={self.trainer.global_steps} "
                    f"of trainer_mode={mode} begins at prompt {wanted}; {RESUME}"
                ]
            )


def exact_buffer(
    door: Door, sampled: Callable[[Any], Mapping[str, float]] | None = None, **fields: Any
) -> MixedReplayBuffer | MixedReplayBufferAsync:
    """The replay buffer of a door's trainer.

    verl hands a custom sampler neither the filter of groups nor sizes of batches, so they are read
    from the config here, as verl does for its own (trainer_base.py:160-186 at 0.9.1).

    Args:
        sampled: counts batches by `Door.note_sampled`, and keeps accounts; None only counts.
        fields: further ones of `Mixture`.
    """

    def count(batch: Any) -> dict[str, float]:
        door.note_sampled()
        return {}

    trainer = door.trainer
    config, sampler = trainer.config, trainer.config.trainer.v1.sampler
    is_sync = trainer.trainer_mode == "sync"
    filter_groups = config.algorithm.get("filter_groups") or {}
    return (MixedReplayBuffer if is_sync else MixedReplayBufferAsync)(
        Mixture(
            quota=door.quota,
            draw=trainer._add_prompts_to_generate,
            give_back=lambda drawn: door.plan.give_back(drawn),
            seats=door.seats,
            sampled=sampled or count,
            **fields,
        ),
        trainer_mode=trainer.trainer_mode,
        trainer_config=config.trainer.v1.get(trainer.trainer_mode, {}),
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=sampler.sampler_kwargs,
        filter_groups_metric=trainer._resolve_filter_groups_metric(),
        train_batch_size=config.data.train_batch_size,
        gen_batch_size=1,
        max_inflight_gen_batches=filter_groups.get("max_inflight_gen_batches", 1),
        sync_refill_failed_groups=is_sync and bool(sampler.get("sync_refill_failed_groups", False)),
    )
