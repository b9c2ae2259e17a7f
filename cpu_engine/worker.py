"""verl's training workers on a CPU, with a gloo process group.

verl adapter: `ActorRolloutRefWorker` and `TrainingWorker` (workers/engine_workers.py at 0.9.1) and,
for separate_async, `DetachActorWorker` (experimental/separation/engine_workers.py) and
`CheckpointEngineWorker` (checkpoint_engine/base.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from cpu_engine.process_group import GlooProcessGroup


class CPUActorRolloutRefWorker(GlooProcessGroup, ActorRolloutRefWorker):
    """Training and rollout in one process."""


class CPUCriticWorker(GlooProcessGroup, TrainingWorker):
    """The critic."""


class CPUCheckpointEngineWorker(GlooProcessGroup, CheckpointEngineWorker):
    """Takes new weights to a rollout server that has devices of its own."""


class CPUDetachActorWorker(GlooProcessGroup, DetachActorWorker):
    """Training without rollout.

    verl saves the weights at the beginning of a step by `.cpu()` (utils/fsdp_utils.py:1180). On a
    CPU that copies nothing: the saved weights would change with the training, and the old log-probs
    with them. So they are copied here.
    """

    def _get_strategy_handlers(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        save, restore = super()._get_strategy_handlers()

        def save_copies(model: torch.nn.Module) -> Any:
            state: Any
            state, spec = save(model)
            return {name: (local.clone(), own) for name, (local, own) in state.items()}, spec

        return save_copies, restore
