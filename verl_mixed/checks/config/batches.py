"""Sizes of batches: what verl must be able to split evenly, and what TransferQueue must hold.

verl 0.9.1 (`workers/engine/utils.py`, `trainer/ppo/v1`) pads uneven sizes, or stops at the first
step. It clears the rows of a step at its end, after all updates and the validation.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.placement import storage_units
from config.lookup import at, files_at
from verl_mixed.checks.config.algorithm import has_reference, is_count
from verl_mixed.checks.config.engines import layout_of
from verl_mixed.run.sections import sound_sources

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_STORE = "transfer_queue.backend.SimpleStorage"

_PROMPT_BYTES = 24
"""Bytes of a prompt's token in a row: three int64 columns (prompts, input_ids, position_ids)."""

_RESPONSE_BYTES = 72
"""Bytes of a response's token in a row: five int64 columns (responses, input_ids, position_ids, two
masks), and eight float32 columns from the rollout's log-probs to the returns."""


def batch_problems(config: Mapping[str, Any]) -> list[str]:
    """Batch sizes that verl cannot split evenly; it would pad or raise."""
    batch, n = at(config, "data.train_batch_size"), at(config, f"{_ROLLOUT}.n")
    mini = at(config, f"{_ACTOR}.ppo_mini_batch_size")
    per_node, nodes = at(config, "trainer.n_gpus_per_node"), at(config, "trainer.nnodes")
    if not all(map(is_count, (batch, n, mini, per_node, nodes))):
        return []  # the check of numbers reports it
    layout = layout_of(config)
    if layout is None:
        return []  # the check of engines reports it
    problems = []
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    if separate:
        problems += _separate_problems(config, batch, mini)
    elif batch % mini:
        problems.append(
            f"data.train_batch_size={batch} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: "
            "the last mini-batch would be filled with padding; choose a divisor"
        )
    problems += _verls_problems(config, batch * n, nodes * per_node, layout.ranks)
    sources = sound_sources(config).values()
    groups = {source.rollout_n or n for source in sources if source.takes_part}
    if len(groups) > 1:  # the trainer pads each update to a number that can be split evenly
        return problems
    n = groups.pop() if groups else n
    key = f"{_ACTOR}.ppo_mini_batch_size" if separate else "data.train_batch_size"
    at_once = mini if separate else batch
    if (at_once * n) % layout.ranks:
        problems.append(
            f"{key}={at_once} times {n} trajectories a prompt ({_ROLLOUT}.n or a source's "
            f"rollout_n) is no multiple of the {layout.ranks} data-parallel ranks "
            f"({per_node * nodes} training GPUs, model_engine={at(config, 'model_engine')!r} and "
            "its parallel sizes): each trains an equal part; change one of them"
        )
    if problems:
        return problems
    if not at(config, f"{_ACTOR}.use_dynamic_bsz"):
        key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), mini * n, layout.ranks)
    for part in (_ROLLOUT, _REF) if has_reference(config) else (_ROLLOUT,):
        if not at(config, f"{part}.log_prob_use_dynamic_bsz"):
            key = f"{part}.log_prob_micro_batch_size_per_gpu"
            problems += _micro_problems(key, at(config, key), at_once * n, layout.ranks)
    return problems


def _verls_problems(
    config: Mapping[str, Any], trajectories: int, gpus: int, ranks: int
) -> Iterator[str]:
    """What verl asserts of micro-batches, whatever the sources' own `rollout_n`."""
    fixed = not at(config, f"{_ACTOR}.use_dynamic_bsz")
    key = f"{_ROLLOUT}.log_prob_use_dynamic_bsz"
    if at(config, key) is not at(config, f"{_ACTOR}.use_dynamic_bsz"):
        yield (
            f"{key}={at(config, key)!r} with {_ACTOR}.use_dynamic_bsz={not fixed}: one engine "
            "computes both, and verl stops its workers unless they are equal; set one of them"
        )
    micro = at(config, f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    is_megatron = at(config, "model_engine") == "megatron"
    least = ranks * micro if is_megatron and is_count(micro) else gpus
    if fixed and trajectories % least:
        yield (
            f"data.train_batch_size times {_ROLLOUT}.n is {trajectories}, no multiple of {least}: "
            f"with {_ACTOR}.use_dynamic_bsz=false verl wants a multiple of "
            f"{'ranks x ppo_micro_batch_size_per_gpu' if is_megatron else 'all training GPUs'}; "
            "change one of them, or set it to true"
        )


def _separate_problems(config: Mapping[str, Any], batch: int, mini: int) -> Iterator[str]:
    """Rules of verl for a trainer whose rollout has separate GPUs."""
    key = "trainer.v1.separate_async.parameter_sync_step"
    updates = at(config, key)
    if not is_count(updates) or batch != updates * mini:
        yield (
            f"data.train_batch_size={batch} is not {key}={updates!r} times "
            f"{_ACTOR}.ppo_mini_batch_size={mini}: mixed_separate_async trains one mini-batch at a "
            "time and sends weights after so many; make it their product"
        )
    for key in (f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node"):
        value = at(config, key)
        if not is_count(value):
            yield (
                f"{key}={value!r}: mixed_separate_async generates on GPUs of its own; want a whole "
                "number >= 1"
            )
    if at(config, f"{_ROLLOUT}.checkpoint_engine.backend") == "naive":
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend='naive': it cannot send weights to GPUs of "
            "another process, as mixed_separate_async must; choose nccl or another of verl's, on a "
            "CPU tcp_store"
        )


def _micro_problems(key: str, micro: Any, trajectories: int, ranks: int) -> list[str]:
    if not isinstance(micro, int) or micro < 1:
        return [f"{key}={micro!r}: want a whole number >= 1"]
    share = trajectories / ranks
    if share % micro == 0:
        return []
    return [
        f"{key}={micro} does not divide the {share:g} trajectories of one data-parallel rank "
        f"({trajectories} over {ranks}): verl stops at the first step; choose a divisor"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The most that TransferQueue holds at once. A row is a trajectory, or a prompt under way."""

    prompts: int
    """Prompts of a step, over all its updates."""

    per_prompt: int
    """Trajectories of a prompt; the largest number of all sources."""

    keeps_prompts: bool
    """Whether each prompt has a row of its own, as in asynchronous modes, which resume from it."""

    ahead: float
    """Batches of prompts that are generated beside the step's own."""

    validation: int
    """Rows of a validation."""

    units: int
    """Storage units that share the rows."""

    @property
    def rows(self) -> int:
        prompts = self.prompts + math.floor(self.prompts * self.ahead)
        return prompts * (self.per_prompt + self.keeps_prompts) + self.validation

    @property
    def trajectories(self) -> int:
        """Trajectories that may be under way at once, in training or in a validation."""
        prompts = self.prompts + math.floor(self.prompts * self.ahead)
        return max(prompts * self.per_prompt, self.validation)

    def __str__(self) -> str:
        own = " and a row of its own" if self.keeps_prompts else ""
        return (
            f"TransferQueue holds up to {self.rows:,} rows: {self.prompts:,} prompts a step x "
            f"{self.per_prompt} trajectories{own}, {self.ahead:g} batches ahead, and "
            f"{self.validation:,} of validation; in {self.units} storage units"
        )

    @staticmethod
    def bytes_of(prompt_length: float, response_length: float) -> float:
        """Bytes of a row with so many tokens, without images, text and routes of experts."""
        return prompt_length * _PROMPT_BYTES + response_length * _RESPONSE_BYTES


def stored_rows(config: Mapping[str, Any]) -> StoredRows | None:
    """What TransferQueue must hold; None for another store, or if a number is wrong."""
    batch, n = at(config, "data.train_batch_size"), at(config, f"{_ROLLOUT}.n")
    mode = str(at(config, "trainer.v1.trainer_mode")).removeprefix("mixed_")
    ahead = at(config, f"trainer.v1.{mode}.num_warmup_batches", 0)
    if mode == "sync" and at(config, "algorithm.filter_groups.enable"):
        ahead = at(config, "algorithm.filter_groups.max_inflight_gen_batches", 1)
    units = storage_units(config)
    if not all(map(is_count, (batch, n, units))):
        return None  # the check of numbers reports it
    if mode != "sync" and isinstance(lead := at(config, "mixed.lead"), int):
        ahead = lead * sum(own.takes_part for own in sound_sources(config).values()) / batch
    if not isinstance(ahead, int | float) or not math.isfinite(ahead):
        return None
    assert units is not None
    own = [source.rollout_n or n for source in sound_sources(config).values() if source.takes_part]
    return StoredRows(
        prompts=batch,
        per_prompt=max(own, default=n),
        keeps_prompts=mode != "sync",
        ahead=max(0, ahead),
        validation=_validation_rows(config),
        units=units,
    )


def _validation_rows(config: Mapping[str, Any]) -> int:
    """Trajectories that one validation stores; files that cannot be read count as empty."""
    n = at(config, f"{_ROLLOUT}.val_kwargs.n", 1)
    validates = at(config, "trainer.val_before_train") or is_count(at(config, "trainer.test_freq"))
    if not validates or not is_count(n):
        return 0
    rows = 0
    for file in files_at(config, "data.val_files"):
        with suppress(OSError, pa.ArrowException):
            rows += pq.read_metadata(file).num_rows
    return rows * n


def storage_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A limit of TransferQueue that is below what it must hold."""
    key = f"{_STORE}.total_storage_size"
    limit, need = at(config, key), stored_rows(config)
    if need is not None and is_count(limit) and limit < need.rows:
        yield (
            f"{key}={limit}: {need}; trajectories above the limit would be lost and their prompts "
            "replaced until a source starves; set it to null, which is no limit"
        )
