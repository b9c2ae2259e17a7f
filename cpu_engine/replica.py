"""Base class of rollout replicas on a CPU.

verl adapter: `RolloutReplica` (workers/rollout/replica.py at 0.9.1).
"""

# `super()` is called in a class mixed into verl's.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import ray


class GlooReplica:
    """Base class of a rollout replica: where its servers have devices of their own, the worker that
    takes new weights to them has such a process group too."""

    def get_ray_class_with_init_args(self) -> Any:
        from cpu_engine.worker import CPUCheckpointEngineWorker  # imports verl's engines

        worker = super().get_ray_class_with_init_args()
        worker.cls = ray.remote(CPUCheckpointEngineWorker)
        return worker
