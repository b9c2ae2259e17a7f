"""What a run asks of a Ray cluster that is up, without joining it: its nodes and its jobs.

The question is asked by `cluster.ray_nodes` in a process of its own: Ray itself retries for minutes
where a head does not answer or refuses a token.
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

ASK_S = 20.0
"""Deadline of one question; an answer takes a second or two, most of it `import ray`."""

KNOCK_S = 5.0

_PORT = 6379

_QUESTION = Path(__file__).with_name("ray_nodes.py")


class ClusterUnreachable(RuntimeError):
    """The head does not answer, or not to us; the message says which address and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node that is alive."""

    name: str
    """What `ray start --node-name` said; its address without that."""

    ip: str
    cpus: float
    cpus_used: float
    gpus: float
    """Logical ones too."""

    gpus_used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The answer of a head."""

    nodes: tuple[RayNode, ...]
    """Alive, by address."""

    jobs: tuple[str, ...]
    """Entry points of the jobs that run now."""


def address_of(environ: Mapping[str, str]) -> str | None:
    """Where the cluster of these settings answers, `ip:port`; None where they name none."""
    head = environ.get("MASTER_IP", "").strip()
    return f"{head}:{environ.get('RAY_PORT', '').strip() or _PORT}" if head else None


def ask(
    address: str, *, environ: Mapping[str, str] | None = None, timeout_s: float = ASK_S
) -> RayCluster:
    """Ask the head.

    Args:
        address: `ip:port` of the head.
        environ: with RAY_AUTH_MODE and the token's place; None takes this process's.
        timeout_s: longest wait.

    Raises:
        ClusterUnreachable: no answer in time, or a refusal.
    """
    environ = os.environ if environ is None else environ
    _knock(address)
    try:
        done = subprocess.run(
            [sys.executable, str(_QUESTION), "table"],
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
    nodes, jobs = [], []
    for record in records:
        if "job" in record:
            jobs.append(str(record["entrypoint"] or record["job"]))
            continue
        (cpus_used, cpus), (gpus_used, gpus) = record["CPU"], record["GPU"]
        nodes.append(
            RayNode(
                name=record["node"],
                ip=record["ip"],
                cpus=cpus,
                cpus_used=cpus_used,
                gpus=gpus,
                gpus_used=gpus_used,
            )
        )
    return RayCluster(nodes=tuple(sorted(nodes, key=lambda node: node.ip)), jobs=tuple(jobs))


def _knock(address: str) -> None:
    """Tell an address where nobody is from a head that refuses; Ray says the same, and late."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise ClusterUnreachable(
            f"no answer from Ray's head at {address}: nothing listens there ({error}); see "
            "`./setup_cluster.sh status`"
        ) from error


def _refusal(environ: Mapping[str, str]) -> str:
    return (
        f"it listens and does not take us: RAY_AUTH_MODE={environ.get('RAY_AUTH_MODE', '')!r} or "
        "this shell's token is not the cluster's, or its Ray is another version; source "
        "~/.verl_mixed/<cluster>/env first"
    )
