"""The nodes and jobs of a running Ray cluster, without joining it.

`cluster.ray_nodes` asks the head in a separate process, because Ray itself retries for minutes if a
head does not answer or refuses a token.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.placement import Node

ASK_S = 20.0
"""Deadline of one question in seconds; an answer takes one or two, mostly for `import ray`."""

KNOCK_S = 5.0

THIS_MACHINE = "local"
"""Value of MASTER_IP, and of Ray's own RAY_ADDRESS, for a run that starts its own Ray."""

_PORT = 6379

_QUESTION = Path(__file__).with_name("ray_nodes.py")


class ClusterUnreachable(ConnectionError):
    """The head does not answer, or refuses us; the message names the address and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node that is alive."""

    name: str
    """The name of `ray start --node-name`, or its address without one."""

    ip: str
    cpus: float
    gpus: float
    """Including logical ones."""

    cpus_used: float = 0.0
    gpus_used: float = 0.0
    """What actors and placement groups hold."""

    @property
    def whole(self) -> Node:
        """All of it, used or not."""
        return Node(cpus=self.cpus, gpus=self.gpus, name=self.ip)

    @property
    def free(self) -> Node:
        """What nobody holds."""
        cpus, gpus = self.cpus - self.cpus_used, self.gpus - self.gpus_used
        return Node(cpus=cpus, gpus=gpus, name=self.ip)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadActor:
    """An actor whose process died."""

    name: str
    """Of its class."""

    place: str
    job: str
    """Entry point of its job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The answer of a head."""

    nodes: tuple[RayNode, ...]
    """The nodes that are alive, sorted by address."""

    jobs: tuple[str, ...]
    """Entry points of the running jobs."""

    dead_actors: tuple[DeadActor, ...] = ()
    """Of these jobs."""


def address_of(environ: Mapping[str, str]) -> str | None:
    """The address of the cluster in these settings, `ip:port`; None if they name none.

    MASTER_IP with RAY_PORT, else RAY_ADDRESS as it is given. `local`, for either, names no cluster.
    """
    head = environ.get("MASTER_IP", "").strip()
    if head and head != THIS_MACHINE:
        return f"{head}:{environ.get('RAY_PORT', '').strip() or _PORT}"
    address = environ.get("RAY_ADDRESS", "").strip()
    return address if address and address != THIS_MACHINE else None


def recorded_address(environ: Mapping[str, str], temp_dir: str | None = None) -> str | None:
    """The address that the last `ray start` on this machine recorded; that Ray may be gone.

    Args:
        environ: RAY_TMPDIR or TMPDIR moves the record, as it does in Ray.
        temp_dir: `--temp-dir` of that Ray; None takes Ray's default.

    Source: ray/_private/services.py, get_ray_address_from_environment (2.60).
    """
    folder = Path(temp_dir or Path(environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp")), "ray"))
    try:
        return (folder / "ray_current_cluster").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def listens(address: str, timeout_s: float = KNOCK_S) -> bool:
    """Whether something accepts connections at `ip:port`."""
    try:
        _connect(address, timeout_s)
    except (OSError, ValueError):
        return False
    return True


def _connect(address: str, timeout_s: float = KNOCK_S) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


def ask(
    address: str, *, environ: Mapping[str, str] | None = None, timeout_s: float = ASK_S
) -> RayCluster:
    """Ask the head at `ip:port`.

    Args:
        environ: with RAY_AUTH_MODE and the token's place; None takes this process's.

    Raises:
        ClusterUnreachable: no answer in time, or a refusal.
    """
    environ = os.environ if environ is None else environ
    _knock(address)
    try:
        done = subprocess.run(
            [sys.executable, str(_QUESTION), "table", "actors"],
            env={**environ, "RAY_ADDRESS": address},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterUnreachable(
            f"no answer from Ray's head at {address} within {timeout_s:g} s: {_refusal(environ)}"
        ) from error
    if done.returncode:
        raise ClusterUnreachable(f"no answer from Ray's head at {address}: {_refusal(environ)}")
    return _read(json.loads(line) for line in done.stdout.splitlines())


def _read(records: Iterable[Mapping[str, Any]]) -> RayCluster:
    nodes, jobs, dead = [], [], []
    for record in records:
        if "dead_actor" in record:
            place = f"pid {record['pid']} on {record['host']}"
            dead.append(DeadActor(name=record["dead_actor"], place=place, job=record["job"]))
            continue
        if "job" in record:
            jobs.append(str(record["entrypoint"] or record["job"]))
            continue
        (cpus_used, cpus), (gpus_used, gpus) = record["CPU"], record["GPU"]
        nodes.append(
            RayNode(
                name=record["node"],
                ip=record["ip"],
                cpus=cpus,
                gpus=gpus,
                cpus_used=cpus_used,
                gpus_used=gpus_used,
            )
        )
    nodes.sort(key=lambda node: node.ip)
    return RayCluster(nodes=tuple(nodes), jobs=tuple(jobs), dead_actors=tuple(dead))


def _knock(address: str) -> None:
    """Check that something listens, because Ray reports this late, and as if the head refused."""
    try:
        _connect(address)
    except (OSError, ValueError) as error:
        raise ClusterUnreachable(
            f"no answer from Ray's head at {address}: nothing listens there ({error}); see "
            "`./setup_cluster.sh status`"
        ) from error


def _refusal(environ: Mapping[str, str]) -> str:
    mode = environ.get("RAY_AUTH_MODE", "")
    other = "disabled" if mode == "token" else "token"
    return (
        f"it listens and does not take us: RAY_AUTH_MODE={mode!r} or "
        "this shell's token is not the cluster's, or its Ray is another version; source "
        "~/.verl_mixed/<cluster>/env first, or for a Ray that was started by hand set "
        f"RAY_AUTH_MODE={other}"
    )
