"""Gloo process groups of verl's workers on a CPU, whose store has a port that nobody can take.

verl adapter: `initialize_global_process_group_ray` (utils/distributed.py at 0.9.1), which all
workers of verl call.
"""

# torch has no list of public names there.
# pyright: reportPrivateImportUsage=false

import os
import time
from datetime import timedelta
from typing import Any

import torch
from ray.experimental import internal_kv
from torch.distributed import TCPStore

TIMEOUT = timedelta(seconds=600)
LOOK_S = 0.05
"""Seconds between two looks for the port of rank 0."""


def initialize(verls: Any, timeout_second: int | None = None, backend: str | None = None) -> None:
    """In place of verl's function on a CPU, for two reasons. All arguments but `verls` are verl's.

    verl asks for "cpu:gloo,cpu:gloo" (utils/distributed.py:89), which torch refuses. And verl
    chooses MASTER_PORT long before rank 0 listens on it (single_controller/ray/base.py:91); another
    process may have the port by then, which ends the run.
    """
    if "WG_PREFIX" not in os.environ or "DIST_INIT_METHOD" in os.environ:
        verls(timeout_second, backend)  # no worker of verl's worker groups
    elif not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "cpu:gloo",
            store=_open_store(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=TIMEOUT,
        )


def _open_store() -> TCPStore:
    """The store of this worker group. Rank 0 listens on a port that the system chooses, and tells
    the other ranks through Ray.

    Raises:
        TimeoutError: rank 0 told no port within `TIMEOUT`.
    """
    host, world_size = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
    # A prefix can come again in another run; with the port that verl chose it does not.
    key = f"mixed-store-{os.environ.get('WG_PREFIX')}-{host}-{os.environ['MASTER_PORT']}".encode()
    if int(os.environ["RANK"]) == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        if world_size > 1:
            internal_kv._internal_kv_put(key, str(store.port).encode())
        return store
    end = time.monotonic() + TIMEOUT.total_seconds()
    while not (port := internal_kv._internal_kv_get(key)):
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank={os.environ['RANK']} of {world_size} waited {TIMEOUT.total_seconds():.0f} s "
                f"for the port of rank 0 on {host}; look for the error of rank 0 in train.log"
            )
        time.sleep(LOOK_S)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
