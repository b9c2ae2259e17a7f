"""Sizes of batches that verl must be able to split evenly over processes and mini-batches.

verl 0.9.1 (`workers/engine/utils.py`, `trainer/ppo/v1`) pads uneven sizes, or stops at the first
step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from config.lookup import at
from verl_mixed.checks.config.algorithm import is_count
from verl_mixed.run.sections import sound_sources

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"


def batch_problems(config: Mapping[str, Any]) -> list[str]:
    """Batch sizes that verl cannot split evenly; it would pad or raise."""
    batch, n = at(config, "data.train_batch_size"), at(config, f"{_ROLLOUT}.n")
    mini = at(config, f"{_ACTOR}.ppo_mini_batch_size")
    per_node, nodes = at(config, "trainer.n_gpus_per_node"), at(config, "trainer.nnodes")
    if not all(map(is_count, (batch, n, mini, per_node, nodes))):
        return []  # the check of numbers reports it
    processes = per_node * nodes
    problems = []
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    if separate:
        problems += _separate_problems(config, batch, mini)
    elif batch % mini:
        problems.append(
            f"data.train_batch_size={batch} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: "
            "the last mini-batch would be filled with padding; choose a divisor"
        )
    sources = sound_sources(config).values()
    groups = {source.rollout_n or n for source in sources if source.takes_part}
    if len(groups) > 1:  # the trainer pads each update to a number that can be split evenly
        return problems
    n = groups.pop() if groups else n
    key = f"{_ACTOR}.ppo_mini_batch_size" if separate else "data.train_batch_size"
    at_once = mini if separate else batch
    if (at_once * n) % processes:
        problems.append(
            f"{key}={at_once} times {n} trajectories a prompt ({_ROLLOUT}.n or a source's "
            f"rollout_n) is no multiple of the {processes} training processes "
            "(trainer.n_gpus_per_node * trainer.nnodes): each trains an equal part; change one "
            "of them"
        )
    if problems:
        return problems
    if not at(config, f"{_ACTOR}.use_dynamic_bsz"):
        key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), mini * n, processes)
    has_reference = at(config, "algorithm.use_kl_in_reward") or at(config, f"{_ACTOR}.use_kl_loss")
    for part in (_ROLLOUT, _REF) if has_reference else (_ROLLOUT,):
        if not at(config, f"{part}.log_prob_use_dynamic_bsz"):
            key = f"{part}.log_prob_micro_batch_size_per_gpu"
            problems += _micro_problems(key, at(config, key), at_once * n, processes)
    return problems


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


def _micro_problems(key: str, micro: Any, trajectories: int, processes: int) -> list[str]:
    if not isinstance(micro, int) or micro < 1:
        return [f"{key}={micro!r}: want a whole number >= 1"]
    share = trajectories / processes
    if share % micro == 0:
        return []
    return [
        f"{key}={micro} does not divide the {share:g} trajectories of one process "
        f"({trajectories} over {processes}): verl stops at the first step; choose a divisor"
    ]
