"""verl's training workers on a CPU, with a gloo process group.

verl adapter: `ActorRolloutRefWorker` and `TrainingWorker` (workers/engine_workers.py at 0.9.1) and,
for separate_async, `DetachActorWorker` (experimental/separation/engine_workers.py).
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


class _GlooProcessGroup:
    """Makes the process group before verl does.

    verl would ask for "cpu:gloo,cpu:gloo" (utils/distributed.py:89), which torch refuses. If there
    is a group already, verl keeps it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "cpu:gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=timedelta(seconds=600),
            )
        super().__init__(*args, **kwargs)


class CPUActorRolloutRefWorker(_GlooProcessGroup, ActorRolloutRefWorker):
    """Training and rollout in one process."""


class CPUCriticWorker(_GlooProcessGroup, TrainingWorker):
    """The critic."""


class CPUDetachActorWorker(_GlooProcessGroup, DetachActorWorker):
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
