"""Rollout servers with weights from disk.

verl adapter: `LLMServerManager` (workers/rollout/llm_server.py at 0.9.1). verl starts a worker
beside each server that sends it new weights. A server of `rollout.name=hf` runs without one.
"""

import asyncio
from typing import Any

from verl.workers.rollout.llm_server import LLMServerManager


class EvaluationServers(LLMServerManager):
    async def _initialize_llm_servers(self, start_rank: Any = None) -> None:
        if self.rollout_config.name != "hf":
            await super()._initialize_llm_servers(start_rank)
            return
        count = self.rollout_config.n_gpus_per_node * self.rollout_config.nnodes
        self.rollout_replicas = [
            self.rollout_replica_class(
                replica_rank=rank, config=self.rollout_config, model_config=self.model_config
            )
            for rank in range(count)
        ]
        await asyncio.gather(*[replica.launch_servers() for replica in self.rollout_replicas])
        self.server_handles = [replica.server_handle for replica in self.rollout_replicas]
        self.server_addresses = [replica.server_address for replica in self.rollout_replicas]
