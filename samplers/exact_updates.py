"""Optimizer updates that each hold the quotas of the mixture, on ranks of equal work.

verl adapter: `_balance_batch`, `_update_actor` and `_update_critic` of
trainer/ppo/v1/trainer_base.py and the padding of trainer/ppo/padding_utils.py at 0.9.1. verl orders
a batch by length and cuts it into updates, so one update may hold any mixture. `samplers.balance`
decides which group goes into which update.
"""

# verl's methods are matched by name; their parameters are untyped or wider than those used here.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
)

from samplers.balance import deal_groups, imbalance, rows_per_update, spread_rows
from samplers.mixture_plan import MixturePlan
from samplers.uid import group_of, prompt_of

COMPARED_ROWS = 4096
"""Up to this many rows, verl's own layout is computed too, for `mixed/balance/stock_imbalance`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers by which the rows of an update must be divisible."""

    ranks: int
    """Data-parallel ranks of the actor."""

    update_micro: int
    """Rows of one rank in one forward and backward pass; 1 if passes may differ in size."""

    log_prob_micro: int
    """Rows of one rank in one pass for log-probs; 1 if passes may differ in size."""


class ExactUpdates:
    """Comes before a trainer of verl's among the base classes of a trainer."""

    # verl's
    config: Any
    global_steps: int
    local_trigger_step: int
    parameter_sync_step: int
    tokenizer: Any
    actor_rollout_wg: Any
    use_reference_policy: bool

    plan: MixturePlan
    has_exact_updates = True

    _rows_per_update: int
    """Rows of one optimizer update, padding included, over all ranks."""

    _update_of_rows: dict[str, int]
    """Key of each row of the current batch -> number of its update in the step, from 1."""

    def _quota(self, groups: int, update: int) -> dict[str, int]:
        """Source -> its groups in an update of this step, of updates of `groups` groups."""
        first = (self.global_steps - 1) * self.plan.batch_size + update * groups
        return self.plan.counts_between(first, first + groups)

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        # Order by source and draw: the order in which groups finished must not matter.
        batch.reorder(sorted(range(len(batch)), key=lambda row: place_of(batch.keys[row])))
        self._note_batch(batch)
        groups = self.plan.batch_size // self.parameter_sync_step
        per_update = min(self.config.actor_rollout_ref.actor.ppo_mini_batch_size, groups)
        start = self.local_trigger_step * groups // per_update
        quotas = [
            self._quota(per_update, update) for update in range(start, start + groups // per_update)
        ]
        batch, updates, balance = lay_out(batch, quotas, self._sizes(), self.tokenizer.eos_token_id)
        self._rows_per_update = len(updates[0])
        self._update_of_rows = {
            key: number for number, keys in enumerate(updates, start + 1) for key in keys
        }
        metrics.update(balance)
        return batch

    def _note_batch(self, batch: KVBatchMeta) -> None:
        """Called with each batch in the order of the plan, before it is laid out."""

    def _sizes(self) -> Sizes:
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        config = self.config.actor_rollout_ref
        of_log_probs = [config.rollout]
        if self.use_reference_policy:
            of_log_probs.append(config.ref)
        log_prob_micros = [
            section.log_prob_micro_batch_size_per_gpu
            for section in of_log_probs
            if not section.log_prob_use_dynamic_bsz
        ]
        actor = config.actor
        return Sizes(
            ranks=max(workers._dispatch_info["actor"]) + 1,
            update_micro=1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            log_prob_micro=math.lcm(*log_prob_micros),
        )

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._verl_reads_rows_per_update():
            return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._verl_reads_rows_per_update():
            return super()._update_actor(batch, metrics)

    @contextmanager
    def _verl_reads_rows_per_update(self) -> Generator[None]:
        """Make `ppo_mini_batch_size * rollout.n` the rows of one update, while verl reads both.

        verl multiplies the two, which is wrong where groups differ in size.
        """
        critic = self.config.critic
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        sizes = actor.ppo_mini_batch_size, critic.ppo_mini_batch_size, rollout.n
        with open_dict(self.config):
            actor.ppo_mini_batch_size = critic.ppo_mini_batch_size = self._rows_per_update
            rollout.n = 1
            try:
                yield
            finally:
                actor.ppo_mini_batch_size, critic.ppo_mini_batch_size, rollout.n = sizes


def place_of(key: str) -> tuple[str, int, int, int]:
    """Place of a row in the plan: source, draw, session, index."""
    uid, session, index = key.rsplit("_", 2)
    return *prompt_of(uid), int(session), int(index)


def lay_out(
    batch: Any, quotas: Sequence[Mapping[str, int]], sizes: Sizes, eos_token_id: int
) -> tuple[Any, list[list[str]], dict[str, float]]:
    """Order a batch so that each update holds its quotas, and all ranks have equal work.

    Args:
        batch: a `KVBatchMeta` of whole groups, without padding.
        quotas: groups of each source in each update.
        eos_token_id: token of padding rows, which are added to make the rows divisible.

    Returns:
        The ordered batch; the keys of each update, over all ranks and equally many; metrics.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(batch.keys):
        rows_of.setdefault(group_of(key), []).append(row)
    uids = list(rows_of)
    sources = [prompt_of(uid)[0] for uid in uids]
    weights = _workloads(batch)
    dealt = deal_groups(
        sources,
        [sum(weights[row] for row in rows_of[uid]) for uid in uids],
        _present(quotas, Counter(sources)),
    )
    updates = [[row for group in groups for row in rows_of[uids[group]]] for groups in dealt]
    size = rows_per_update(
        [len(rows) for rows in updates], sizes.ranks, sizes.update_micro, sizes.log_prob_micro
    )
    real = len(batch)
    if size * len(updates) > real:
        batch = upsample_batch_to_divisible_size(batch, size * len(updates), eos_token_id)
        weights = _workloads(batch)
        padding = iter(range(real, len(batch)))
        for rows in updates:
            rows += [next(padding) for _ in range(size - len(rows))]
    keys = [[batch.keys[row] for row in rows] for rows in updates]
    of_ranks = spread_rows(updates, weights, sizes.ranks)
    lengths = [tag["seq_len"] for tag in batch.tags]
    metrics = log_seqlen_unbalance(lengths, of_ranks, prefix="global_seqlen")
    metrics["mixed/balance/imbalance"] = imbalance(of_ranks, weights)
    if len(batch) <= COMPARED_ROWS:
        stock: Any = get_seqlen_balanced_partitions(
            weights, k_partitions=sizes.ranks, equal_size=True
        )
        metrics["mixed/balance/stock_imbalance"] = imbalance(stock, weights)
    batch.reorder([row for rows in of_ranks for row in rows])
    return batch, keys, metrics


def _workloads(batch: KVBatchMeta) -> list[int]:
    """(B,) verl's estimate of the work of each row."""
    return calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags])).tolist()


def _present(quotas: Sequence[Mapping[str, int]], have: Mapping[str, int]) -> list[dict[str, int]]:
    """The quotas without the places that failed groups left empty, first of the largest updates."""
    fitted = [dict(quota) for quota in quotas]
    for source in sorted(set().union(*quotas)):
        empty = sum(quota.get(source, 0) for quota in quotas) - have.get(source, 0)
        for _ in range(empty):
            among = [quota for quota in fitted if quota.get(source)]
            max(among, key=lambda quota: sum(quota.values()))[source] -= 1
    return fitted
