"""verl's training worker with a process group that a CPU accepts.

verl adapter: `ActorRolloutRefWorker` (workers/engine_workers.py at 0.9.1).
"""

import os
from datetime import timedelta
from typing import Any

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker


class CPUActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker with its process group made first.

    verl would ask for "cpu:gloo,cpu:gloo" (utils/distributed.py:89), which torch refuses; it leaves
    an existing group alone.
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
