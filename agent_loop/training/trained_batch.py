"""Rows of a trained batch: read from TransferQueue, and ordered for the optimizer updates.

verl adapter: `KVBatchMeta` and the padding of trainer/ppo/padding_utils.py at 0.9.1.
`samplers.balance` decides which group goes into which update.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
)

from agent_loop.metrics.source_metrics import TrainedTrajectory
from agent_loop.metrics.token_metrics import TrainedTokens
from samplers.balance import deal_groups, imbalance, rows_per_update, spread_rows
from samplers.uid import prompt_of

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


class FixedInfo(dict[str, Any]):
    """`extra_info` of a batch, in which verl cannot set the keys `fixed`: they keep their value, or
    stay absent. Workers get a plain dict."""

    def __init__(self, info: Mapping[str, Any], fixed: Set[str]) -> None:
        super().__init__(info)
        self._fixed = frozenset(fixed)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._fixed:
            super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def group_of(key: str) -> str:
    """uid of the group that a row belongs to; verl's keys are `<uid>_<session>_<index>`."""
    return key.split("_", 1)[0]


def place_of(key: str) -> tuple[str, int, int, int]:
    """Place of a row in the plan: source, draw, session, index."""
    uid, session, index = key.rsplit("_", 2)
    return *prompt_of(uid), int(session), int(index)


def is_padding(tag: Mapping[str, Any]) -> bool:
    return bool(tag.get("is_padding", False))


def real_keys(batch: KVBatchMeta) -> list[str]:
    """Keys of the rows that are not padding."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)]


def fetch(batch: KVBatchMeta, keys: Sequence[str], fields: Sequence[str]) -> Any:
    """Columns of some rows of a batch: a TensorDict."""
    return tq.kv_batch_get(
        keys=list(keys), partition_id=str(batch.partition_id), select_fields=list(fields)
    )


def values(data: Any, name: str) -> list[Any]:
    return data.get(name).tolist()


def lay_out(
    batch: KVBatchMeta, quotas: Sequence[Mapping[str, int]], sizes: Sizes, eos_token_id: int
) -> tuple[KVBatchMeta, int, dict[str, float]]:
    """Order a batch so that each update holds its quotas, and all ranks have equal work.

    Args:
        batch: whole groups, without padding.
        quotas: groups of each source in each update.
        eos_token_id: token of padding rows, which are added to make the rows divisible.

    Returns:
        The ordered batch; rows of one update over all ranks; metrics.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(batch.keys):
        rows_of.setdefault(group_of(key), []).append(row)
    uids = list(rows_of)
    weights = _workloads(batch)
    dealt = deal_groups(
        [prompt_of(uid)[0] for uid in uids],
        [sum(weights[row] for row in rows_of[uid]) for uid in uids],
        quotas,
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
    return batch, size, metrics


def _workloads(batch: KVBatchMeta) -> list[int]:
    """(B,) verl's estimate of the work of each row."""
    return calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags])).tolist()


def write_temperatures(batch: KVBatchMeta, of_sources: Mapping[str, float], common: float) -> None:
    """Write the sampling temperature of each row, which the log-prob passes divide by; for padding
    rows, which have no loss, the common one."""
    temperatures = [
        common if is_padding(tag) else of_sources[prompt_of(group_of(key))[0]]
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id=str(batch.partition_id),
        fields=TensorDict({"temperature": torch.tensor(temperatures)}, batch_size=len(batch)),
    )


def fill_with_zeros(batch: KVBatchMeta, rows: Set[str], fields: Sequence[str]) -> KVBatchMeta:
    """Write zeros, one for each token of the response, into some columns of the rows.

    Returns:
        The rows, with the names of all their columns.
    """
    keys = [key for key in batch.keys if key in rows]
    masks = fetch(batch, keys, ["response_mask"])["response_mask"].unbind(0)
    zeros = torch.nested.as_nested_tensor(
        [torch.zeros(len(mask)) for mask in masks], layout=torch.jagged
    )
    return tq.kv_batch_put(
        keys=keys,
        partition_id=str(batch.partition_id),
        fields=TensorDict(dict.fromkeys(fields, zeros), batch_size=len(keys)),
    )


def read_baselines(batch: KVBatchMeta) -> dict[str, float | None]:
    """uid -> reward of the group's greedy trajectory; None if that trajectory was lost."""
    extra = values(fetch(batch, batch.keys, ["extra_fields"]), "extra_fields")
    return {
        group_of(key): fields["reward_baseline"]
        for key, fields in zip(batch.keys, extra, strict=True)
    }


def read_trajectories(batch: KVBatchMeta) -> list[TrainedTrajectory]:
    """The rows of a trained batch, without padding."""
    keys = real_keys(batch)
    tokens = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
    facts = ["uid", "data_source", "row_id", "extra_fields"]
    data = fetch(batch, keys, tokens + facts)
    column: dict[str, list[Any]] = {
        name: [row.tolist() for row in data[name].unbind(0)] for name in tokens
    }
    column |= {name: values(data, name) for name in facts}
    return [
        TrainedTrajectory(
            key=key,
            uid=column["uid"][i],
            draw=prompt_of(column["uid"][i])[1],
            source=column["data_source"][i],
            row_id=column["row_id"][i],
            reward=sum(column["rm_scores"][i]),
            acc=float(column["extra_fields"][i]["reward_extra_info"].get("acc", 0.0)),
            prompt_ids=column["prompts"][i],
            response_ids=column["responses"][i],
            response_mask=column["response_mask"][i],
            log_probs=column["rollout_log_probs"][i],
            record=column["extra_fields"][i]["mixed"],
        )
        for i, key in enumerate(keys)
    ]


def read_tokens(batch: KVBatchMeta) -> list[TrainedTokens]:
    """What the optimizer got for each row, read after the update; without padding."""
    keys = real_keys(batch)
    # not fetched if absent
    optional = ["entropy", "old_log_probs", "ref_log_prob", "rollout_is_weights"]
    data = fetch(batch, keys, ["response_mask", "advantages", *optional])
    column = {
        name: [row.numpy() for row in data[name].float().unbind(0)]
        for name in ["advantages", *optional]
        if name in data
    }
    absent = [None] * len(keys)
    # A row that is in no advantage was filled with zeros; the weight of a token is above 0.
    importance = [
        weights if weights is not None and weights.any() else None
        for weights in column.get("rollout_is_weights", absent)
    ]
    return [
        TrainedTokens(
            key=key,
            source=prompt_of(group_of(key))[0],
            mask=mask.bool().numpy(),
            advantages=column["advantages"][i],
            entropy=column.get("entropy", absent)[i],
            old_log_probs=column.get("old_log_probs", absent)[i],
            ref_log_probs=column.get("ref_log_prob", absent)[i],
            importance=importance[i],
        )
        for i, (key, mask) in enumerate(zip(keys, data["response_mask"].unbind(0), strict=True))
    ]
