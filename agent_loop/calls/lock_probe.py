"""A probe that shows whether a rate-limit file works across nodes: locks, contents and clocks.

A Ray actor on each node opens one file of the shared folder. Each node is compared with the first
node: their locks must exclude each other, each must see what the other wrote under the lock, and
their clocks must agree.

Ray adapter: one actor per node, placed by `NodeAffinitySchedulingStrategy`.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MOST_SKEW_S = 0.05
"""Largest difference of two clocks. A larger one lets more calls pass than the limit allows."""

TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0
"""How long all nodes together may take to remove the file; a dead node never answers."""


def alive_nodes() -> dict[str, str]:
    """Node id -> address, of the Ray cluster this process is connected to."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def lock_problems(folder: Path) -> list[str]:
    """A sentence for each pair of nodes of the Ray cluster on which the folder does not work."""
    path = folder / f".lock-probe-{uuid4().hex}"
    nodes = alive_nodes()
    make_probe: Any = ray.remote(_Probe)
    probes: list[Any] = [
        make_probe.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(str(path))
        for node in nodes
    ]
    try:
        addresses = list(nodes.values())
        opened = [_opened(probe) for probe in probes]
        problems = [
            f"node {address}: cannot use {folder}: {fault}; mount one folder at this path on all "
            "nodes, and try again when `ray status` shows no dead node"
            for address, fault in zip(addresses, opened, strict=True)
            if fault
        ]
        if problems:
            return problems
        for probe, address in zip(probes[1:], addresses[1:], strict=True):
            pairs = [(probes[0], probe), (probe, probes[0])]
            fault = next(filter(None, (_fault_between(*pair) for pair in pairs)), None)
            if fault is not None:
                problems.append(
                    f"nodes {addresses[0]} and {address}: {fault} on {folder}; use "
                    "mixed.rate_limit.backend=ray, or a folder whose locks reach all nodes"
                )
            skew_s = _skew_s(probe)
            if skew_s > MOST_SKEW_S:
                problems.append(
                    f"nodes {addresses[0]} and {address}: clocks are {skew_s:.3f} s apart: at most "
                    f"{MOST_SKEW_S} s is allowed; synchronise them (chrony, ntpd), or use "
                    "mixed.rate_limit.backend=ray"
                )
        return problems
    finally:
        left = [probe.leave.remote() for probe in probes]
        ray.wait(left, num_returns=len(left), timeout=LEAVE_TIMEOUT_S)
        for probe in probes:
            ray.kill(probe)


def _opened(probe: Any) -> str:
    """Why a node could not open the file; empty if it could."""
    try:
        return _get(probe.open.remote())
    except RayError as error:
        return f"no answer from the node ({type(error).__name__})"


def _fault_between(holder: Any, other: Any) -> str | None:
    """What goes wrong when one node holds the lock and the other asks for it; None if nothing."""
    token = uuid4().hex
    if not _get(holder.lock.remote()):
        return "a free lock cannot be taken"
    try:
        if _get(other.lock.remote()):
            _get(other.unlock.remote())
            return "both nodes hold the lock at once"
        _get(holder.write.remote(token))
    finally:
        _get(holder.unlock.remote())
    if not _get(other.lock.remote()):
        return "a released lock cannot be taken"
    try:
        if _get(other.read.remote()) != token:
            return "one node does not see what the other wrote under the lock"
    finally:
        _get(other.unlock.remote())
    return None


def _skew_s(probe: Any) -> float:
    """Smallest difference of the two clocks that explains the node's time, in seconds."""
    before_s = time.time()
    remote_s = _get(probe.now.remote())
    return max(0.0, before_s - remote_s, remote_s - time.time())


def _get(reference: Any) -> Any:
    return ray.get(reference, timeout=TIMEOUT_S)


class _Probe:
    """The Ray actor of one node, with its handle of the file."""

    def __init__(self, path: str):
        self._path, self._handle = path, -1

    def open(self) -> str:
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            return str(error)
        return ""

    def lock(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def write(self, token: str) -> None:
        os.pwrite(self._handle, token.encode(), 0)

    def read(self) -> str:
        return os.pread(self._handle, 64, 0).decode(errors="replace")

    def now(self) -> float:
        return time.time()

    def leave(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
