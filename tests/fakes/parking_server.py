"""A rollout server, a Ray actor, between an abort of its requests and `resume_generation`."""

import asyncio
from types import SimpleNamespace
from typing import Any

import ray


class ParkingServer:
    """Requests wait inside and keep their slots, as in verl's `_park_until_admitted`
    (workers/rollout/vllm_rollout/vllm_async_server.py at 0.9.1)."""

    def __init__(self) -> None:
        self._resumed, self._parked = asyncio.Event(), 0

    async def generate(self, **_: Any) -> Any:
        self._parked += 1
        await self._resumed.wait()
        return SimpleNamespace(
            **{"token_ids": [7], "log_probs": [-1.0], "routed_experts": None, "num_preempted": 0},
            **{"stop_reason": "completed", "extra_fields": {}},
        )

    async def resume_generation(self) -> None:
        self._resumed.set()

    @ray.method(concurrency_group="outside")
    async def parked(self) -> int:
        """Requests so far; the answer takes no slot."""
        return self._parked


def parking_server(slots: int) -> Any:
    """Start one; its handle."""
    settings: dict[str, Any] = {"concurrency_groups": {"outside": 1}, "max_concurrency": slots}
    return ray.remote(num_cpus=0, **settings)(ParkingServer).remote()
