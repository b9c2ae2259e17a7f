"""Rows of a trained batch, read from TransferQueue.

verl adapter: `KVBatchMeta` at 0.9.1.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from agent_loop.records.source_metrics import TrainedTrajectory, TrajectoryTokens
from agent_loop.records.token_metrics import TokenSums, token_sums
from agent_loop.records.trajectory_record import unpack
from samplers.faults import trained_tokens_of
from samplers.uid import group_of, prompt_of

TOKENS_AT_ONCE = 1 << 22
"""Tokens whose values are read from TransferQueue together; some 100 MB with all columns."""

Row = TypeVar("Row")


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


def read_trajectories(batch: KVBatchMeta | BatchCopy) -> list[TrainedTrajectory]:
    """The facts of the rows of a batch, without padding and without their tokens.

    TransferQueue takes 15 microseconds for each value that is not a tensor, so what is the same in
    a group is read of one row.
    """
    tags = {
        key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)
    }
    keys = list(tags)
    first_key: dict[str, str] = {}
    for key in keys:
        first_key.setdefault(group_of(key), key)
    data = fetch(batch, list(first_key.values()), ["data_source", "row_id"])
    sources, row_ids = (
        dict(zip(first_key, values(data, name), strict=True)) for name in ("data_source", "row_id")
    )
    extra_fields = values(fetch(batch, keys, ["extra_fields"]), "extra_fields")
    trained = trained_tokens_of(
        {key: extra["mixed"] for key, extra in zip(keys, extra_fields, strict=True)},
        lambda older: fetch(batch, older, ["response_mask"])["response_mask"].unbind(0),
    )
    return [
        TrainedTrajectory(
            key=key,
            uid=group_of(key),
            draw=prompt_of(group_of(key))[1],
            source=sources[group_of(key)],
            row_id=row_ids[group_of(key)],
            reward=float(extra["mixed"]["reward_parts"]["score"]),
            acc=float(extra["reward_extra_info"].get("acc", 0.0)),
            prompt_tokens=tags[key]["prompt_len"],
            response_tokens=tags[key]["response_len"],
            trained_tokens=trained[key],
            record=extra["mixed"],
        )
        for key, extra in zip(keys, extra_fields, strict=True)
    ]


def read_tokens(trajectories: Sequence[TrainedTrajectory]) -> dict[str, TrajectoryTokens]:
    """Key -> tokens and texts of some trajectories that are trained in this step."""
    return {
        key: tokens
        for part in parts(trajectories, [t.response_tokens for t in trajectories])
        for key, tokens in _read_tokens(part).items()
    }


def _read_tokens(trajectories: Sequence[TrainedTrajectory]) -> dict[str, TrajectoryTokens]:
    keys = [t.key for t in trajectories]
    names = ["prompts", "responses", "response_mask", "rollout_log_probs"]
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=names)
    # An earlier release had the texts in the record.
    texts: dict[str, Mapping[str, Any]] = {t.key: t.record for t in trajectories}
    if packed := [t.key for t in trajectories if "segments" not in t.record]:
        column = tq.kv_batch_get(keys=packed, partition_id="train", select_fields=["mixed_texts"])
        texts |= dict(zip(packed, map(unpack, values(column, "mixed_texts")), strict=True))
    columns = (data[name].unbind(0) for name in names)
    return {
        key: TrajectoryTokens(
            prompt_ids=prompt.int().numpy(),
            response_ids=response.int().numpy(),
            response_mask=mask.to(torch.int8).numpy(),
            log_probs=log_probs.numpy(),
            texts=texts[key],
        )
        for key, prompt, response, mask, log_probs in zip(keys, *columns, strict=True)
    }


def parts(rows: Sequence[Row], lengths: Sequence[int]) -> Iterator[list[Row]]:
    """The rows in their order, in parts of one row or at most `TOKENS_AT_ONCE` tokens.

    Args:
        rows: (B,) keys or trajectories.
        lengths: (B,) tokens of each response.
    """
    part, tokens = list[Row](), 0
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
