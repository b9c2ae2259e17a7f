"""Checkpoint engine `tcp_store`: weights from the trainer to rollout servers without a GPU.

verl adapter: `CheckpointEngine` (checkpoint_engine/base.py at 0.9.1), for `mixed_separate_async` on
a CPU; verl's own engines need NCCL, NIXL, Mooncake or HCCL. During a synchronisation the first
training process has a `torch.distributed.TCPStore`, from which every rollout process reads the
weights, bucket by bucket. All weights pass through one process, which is fast enough for models
that a CPU can train.
"""

# Overrides take what this engine needs; verl's `register` lacks its @staticmethod.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

import asyncio
import io
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

TIMEOUT = timedelta(seconds=600)


@CheckpointEngineRegistry.register("tcp_store")
class TCPStoreCheckpointEngine(CheckpointEngine):
    """One sender, which is master, and any number of receivers. A bucket has `bucket_size` bytes at
    most; a larger tensor is a bucket of its own."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._store: TCPStore | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store, if this process sends, and return its host and port."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[tuple[str, int] | None],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The sender's address for every process; see the base class."""
        address = next(one for one in metadata if one is not None)
        return (
            {"address": [address] * actor_wg_world_size},
            {"address": [address] * rollout_world_size},
        )

    def init_process_group(self, address: tuple[str, int]) -> None:
        """Connect to the store, if this process does not send."""
        if not self.is_master:
            self._store = TCPStore(
                *address, is_master=False, timeout=TIMEOUT, wait_for_workers=False
            )

    def finalize(self) -> None:
        self._store = None

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Put all weights into the store. All training processes must call this, because they
        gather the weights together."""
        bucket: dict[str, torch.Tensor] = {}
        number = size_bytes = 0
        async for name, weight in ensure_async_iterator(weights):
            if not self.is_master:
                continue
            tensor = weight.detach().cpu()
            if bucket and size_bytes + tensor.nbytes > self.bucket_size:
                self._put(number, bucket)
                bucket, size_bytes, number = {}, 0, number + 1
            bucket[name] = tensor
            size_bytes += tensor.nbytes
        if self.is_master:
            self._put(number, bucket)
            self._put(number + 1, {})  # the end
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) in the order of the sender."""
        store = self._store
        assert store is not None, "init_process_group comes first"
        number = 0
        while True:
            raw = await asyncio.to_thread(store.get, f"bucket{number}")
            bucket = torch.load(io.BytesIO(raw), weights_only=True)
            if not bucket:
                return
            for name, tensor in bucket.items():
                yield name, tensor
            number += 1

    def _put(self, number: int, bucket: dict[str, torch.Tensor]) -> None:
        assert self._store is not None, "prepare comes first"
        buffer = io.BytesIO()
        torch.save({name: tensor.clone() for name, tensor in bucket.items()}, buffer)
        self._store.set(f"bucket{number}", buffer.getvalue())
