"""Rows of a trained batch, read from TransferQueue.

verl adapter: `KVBatchMeta` at 0.9.1.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from agent_loop.records.token_metrics import TokenSums, token_sums
from agent_loop.records.trajectory_record import (
    TokenValues,
    TrajectoryRecord,
    add_texts,
    from_columns,
)
from agent_loop.training.session_loss import SESSION_SHARE
from samplers.faults import SessionOutcome
from samplers.uid import group_of, prompt_of, session_of

TOKENS_AT_ONCE = 1 << 22
"""Tokens whose values are read from TransferQueue together; some 100 MB with all columns."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BatchCopy:
    """What is read of a batch. A `KVBatchMeta` copies its tags deeply, in 0.1 s for 16,384 rows."""

    partition_id: str
    keys: list[str]  # (B,)
    tags: list[dict[str, Any]]  # (B,)


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


def is_padding(tag: Mapping[str, Any]) -> bool:
    return bool(tag.get("is_padding", False))


def real_keys(batch: KVBatchMeta | BatchCopy) -> list[str]:
    """Keys of the rows that are not padding."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)]


def copy_of(batch: KVBatchMeta) -> BatchCopy:
    """The batch as it is now, for another thread: verl reorders its own."""
    return BatchCopy(str(batch.partition_id), list(batch.keys), list(batch.tags))


def fetch(batch: KVBatchMeta | BatchCopy, keys: Sequence[str], fields: Sequence[str]) -> Any:
    """Columns of some rows of a batch: a TensorDict."""
    return tq.kv_batch_get(
        keys=list(keys), partition_id=str(batch.partition_id), select_fields=list(fields)
    )


def values(data: Any, name: str) -> list[Any]:
    return data.get(name).tolist()


def write_temperatures(
    batch: KVBatchMeta,
    of_sources: Mapping[str, float],
    common: float,
    of_rows: Mapping[str, float | None] = MappingProxyType({}),
) -> None:
    """Write the sampling temperature of each row, which the log-prob passes divide by; for padding
    rows, which have no loss, the common one.

    Args:
        of_rows: key -> temperature of a row that has its own, because its agent chose it.
    """
    temperatures = [
        common if is_padding(tag) else of_rows.get(key) or of_sources[prompt_of(group_of(key))[0]]
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    write_column(batch, "temperature", temperatures)


def write_column(batch: KVBatchMeta, name: str, numbers: Sequence[float]) -> KVBatchMeta:
    """Write a number for each row. Returns the rows, with the names of all their columns."""
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=str(batch.partition_id),
        fields=TensorDict({name: torch.tensor(numbers)}, batch_size=len(batch)),
    )


def fill_with_zeros(batch: KVBatchMeta, rows: Set[str], fields: Sequence[str]) -> KVBatchMeta:
    """Write zeros, one for each token of the response, into some columns of the rows.

    Returns:
        The rows, with the names of all their columns.
    """
    lengths = {
        key: tag["response_len"]
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if key in rows
    }
    zeros = torch.nested.as_nested_tensor(
        [torch.zeros(length) for length in lengths.values()], layout=torch.jagged
    )
    return tq.kv_batch_put(
        keys=list(lengths),
        partition_id=str(batch.partition_id),
        fields=TensorDict(dict.fromkeys(fields, zeros), batch_size=len(lengths)),
    )


def read_baselines(batch: KVBatchMeta) -> dict[str, float | None]:
    """uid -> reward of the group's greedy trajectory; None if that trajectory was lost."""
    extra = values(fetch(batch, batch.keys, ["extra_fields"]), "extra_fields")
    return {
        group_of(key): fields["reward_baseline"]
        for key, fields in zip(batch.keys, extra, strict=True)
    }


def read_trajectories(batch: KVBatchMeta | BatchCopy) -> list[TrajectoryRecord]:
    """The records of the rows of a batch, without padding, texts and tokens.

    TransferQueue takes 15 microseconds for each value that is not a tensor, so what is the same in
    a group is read of one row.
    """
    tags = {
        key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)
    }
    first_key: dict[str, str] = {}
    for key in tags:
        first_key.setdefault(group_of(key), key)
    data = fetch(batch, list(first_key.values()), ["data_source", "row_id"])
    sources, row_ids = (
        dict(zip(first_key, values(data, name), strict=True)) for name in ("data_source", "row_id")
    )
    records = read_records(str(batch.partition_id), list(tags))
    for key, (record, info) in records.items():
        uid = group_of(key)
        record.key, record.source, record.row_id = key, sources[uid], row_ids[uid]
        record.draw = prompt_of(uid)[1]
        record.reward = float(record.reward_parts["score"])
        record.acc = float(info.get("acc", 0.0))
        record.prompt_tokens = tags[key]["prompt_len"]
        record.response_tokens = tags[key]["response_len"]
    return [record for record, _ in records.values()]


def read_records(
    partition_id: str, keys: list[str]
) -> dict[str, tuple[TrajectoryRecord, Mapping[str, Any]]]:
    """Key -> what the agent loop recorded, without texts, and verl's parts of the reward."""
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
    found = {
        key: (from_columns(extra["mixed"]), extra["reward_extra_info"])
        for key, extra in zip(keys, values(data, "extra_fields"), strict=True)
    }
    # Release 1.0.0 did not count them, and its rows may be in a checkpoint.
    if older := [key for key, (record, _) in found.items() if record.trained_tokens is None]:
        masks = tq.kv_batch_get(
            keys=older, partition_id=partition_id, select_fields=["response_mask"]
        )["response_mask"]
        for key, mask in zip(older, masks.unbind(0), strict=True):
            found[key][0].trained_tokens = int(mask.sum())
    return found


def read_outcomes(partition_id: str, keys: list[str]) -> dict[str, SessionOutcome]:
    """Session -> how it ended, for a replay buffer; see `Mixture.outcomes`."""
    trained = Counter[str]()
    last: dict[str, tuple[TrajectoryRecord, Mapping[str, Any]]] = {}
    for key, (record, info) in read_records(partition_id, keys).items():
        trained[session_of(key)] += record.trained_tokens or 0
        last[session_of(key)] = record, info
    return {
        session: SessionOutcome(
            is_trained=trained[session] > 0,
            is_judged=record.is_judged,
            is_solved=float(info.get("acc", 0.0)) >= 1,
            fault=record.lost_to if record.is_lost else None,
            reward=float(record.reward_parts["score"]),
            info=info,
        )
        for session, (record, info) in last.items()
    }


_TOKENS = ("prompts", "responses", "response_mask", "rollout_log_probs")
_OF_OPTIMIZER = ("old_log_probs", "rollout_is_weights", SESSION_SHARE)
"""Columns that verl or this project may have written, and that are not fetched if absent."""


def read_whole(
    records: Iterable[TrajectoryRecord], *, token_values: bool | None = None
) -> dict[str, TrajectoryRecord]:
    """Key -> a copy of a record of the current step, with its texts and tokens.

    Args:
        token_values: adds what the optimizer saw, see `TokenValues.values`; None leaves it out.
    """
    # A column that a batch of the step does not have cannot be read together with another batch.
    of_updates: dict[int | None, list[TrajectoryRecord]] = {}
    for record in records:
        of_updates.setdefault(record.update, []).append(record)
    return {
        record.key: record
        for own in of_updates.values()
        for part in parts(own, [record.response_tokens or 0 for record in own])
        for record in _read_whole(part, token_values)
    }


def _read_whole(
    records: Sequence[TrajectoryRecord], token_values: bool | None
) -> Iterator[TrajectoryRecord]:
    keys = [record.key for record in records]
    names = _TOKENS if token_values is None else _TOKENS + _OF_OPTIMIZER
    data: Any = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=list(names))
    texts: dict[str, bytes] = {}
    # Release 1.0.0 had the texts in the record.
    if packed := [record.key for record in records if not record.segments]:
        column = tq.kv_batch_get(keys=packed, partition_id="train", select_fields=["mixed_texts"])
        texts = dict(zip(packed, values(column, "mixed_texts"), strict=True))
    columns = {name: data[name].unbind(0) for name in names if name in data}
    for at, record in enumerate(map(msgspec.structs.replace, records)):
        if record.key in texts:
            add_texts(record, texts[record.key])
        row = {name: column[at] for name, column in columns.items()}
        record.prompt_ids = row["prompts"].int().numpy()
        record.response_ids = row["responses"].int().numpy()
        record.response_mask = row["response_mask"].to(torch.int8).numpy()
        record.log_probs = row["rollout_log_probs"].numpy()
        mask = row["response_mask"].bool()
        if (old := row.get("old_log_probs")) is not None:
            record.old_log_probs = TokenValues.of(old[mask], whole=bool(token_values))
        # A row that is in no advantage was filled with zeros; the weight of a token is above 0.
        if (weights := row.get("rollout_is_weights")) is not None and weights[mask].any():
            record.importance = TokenValues.of(weights[mask], whole=bool(token_values))
        if (share := row.get(SESSION_SHARE)) is not None:
            record.session_share = float(share)
        yield record


def parts(rows: Sequence[Item], lengths: Sequence[int]) -> Iterator[list[Item]]:
    """The rows in their order, in parts of one row or at most `TOKENS_AT_ONCE` tokens.

    Args:
        rows: (B,) keys or records.
        lengths: (B,) tokens of each response.
    """
    part, tokens = list[Item](), 0
    for row, length in zip(rows, lengths, strict=True):
        if part and tokens + length > TOKENS_AT_ONCE:
            yield part
            part, tokens = [], 0
        part.append(row)
        tokens += length
    if part:
        yield part


def chunks(batch: KVBatchMeta | BatchCopy) -> Iterator[list[str]]:
    """The keys of a batch without padding, in `parts`."""
    tags = [tag for tag in batch.tags if not is_padding(tag)]
    return parts(real_keys(batch), [tag["response_len"] for tag in tags])


def read_token_sums(batch: KVBatchMeta | BatchCopy) -> list[TokenSums]:
    """What the optimizer got for each row, added up over its tokens; without padding."""
    return [row for keys in chunks(batch) for row in _token_sums(batch, keys)]


def _token_sums(batch: KVBatchMeta | BatchCopy, keys: list[str]) -> list[TokenSums]:
    # not fetched if absent
    optional = ["entropy", "old_log_probs", "ref_log_prob", "rollout_is_weights"]
    data = fetch(batch, keys, ["response_mask", "advantages", *optional])
    masks = data["response_mask"].unbind(0)
    return token_sums(
        keys,
        [prompt_of(group_of(key))[0] for key in keys],
        [len(mask) for mask in masks],
        torch.cat(masks).bool().numpy(),
        {
            name: torch.cat(data[name].unbind(0)).float().numpy()
            for name in ["advantages", *optional]
            if name in data
        },
    )
