"""A run's view of the Ray cluster that it joins: is it the one the config needs, and who is lost.

The trainer notices a lost node by itself only when something that it waits for fails; a collective
may wait for many minutes. So the launcher asks the head now and then.
"""

import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from cluster.placement import Node, need_of, placement_problems
from cluster.ray_cluster import ClusterUnreachable, RayNode, ask
from config.lookup import at

EVERY_S = 10.0
"""Between two questions to the head."""

DECLARED_S = 60.0
"""For the head to declare a node dead; Ray 2.60 asks each every 3 s and gives up after 5 times."""

_OF_A_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|actor\w* ?(died|unavailable)|node\w* ?(died|was terminated)"
    r"|nccl|gloo|unavailable",
    re.IGNORECASE,
)

UNANSWERED = 3
"""Questions in a row without an answer, after which the head counts as lost."""


def own_ip(address: str) -> str:
    """The address of this machine on the network of a head at `ip:port`.

    Raises:
        OSError: there is no way to it.
    """
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]


def cluster_problems(config: Mapping[str, Any], address: str) -> list[str]:
    """Why a run cannot start on the cluster at an address; asks its head."""
    try:
        cluster = ask(address)
    except ClusterUnreachable as error:
        return [str(error)]
    nodes, wanted = cluster.nodes, at(config, "trainer.nnodes")
    need = need_of(config)
    problems = []
    if isinstance(wanted, int) and len(nodes) < wanted:
        problems.append(
            f"trainer.nnodes={wanted!r}: the cluster at {address} has {len(nodes)} nodes "
            f"({', '.join(node.ip for node in nodes)}); start the others with "
            "`./setup_cluster.sh setup`, or take them out of WORKER_NODES"
        )
    elif need is not None:
        problems += placement_problems(
            need, [Node(cpus=node.cpus, gpus=node.gpus, name=node.ip) for node in nodes]
        )
    if cluster.jobs:
        problems.append(
            f"the cluster at {address} has a job already ({'; '.join(cluster.jobs)}): verl's "
            "TransferQueue is one per cluster; stop it (`./run_mixed_training.sh stop`), or wait"
        )
    return problems


class ClusterWatch:
    """Asks the head in the background which nodes are lost; a context manager.

    Args:
        address: `ip:port` of the head.
        environ: with RAY_AUTH_MODE and the token's place.
    """

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self._address, self._environ = address, environ
        self._ended = threading.Event()
        self._known: dict[str, RayNode] = {}
        self._silent = 0
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)

    @property
    def lost(self) -> str:
        """Which node was lost, and why; empty while all are there."""
        return self._lost

    def explain(self, reason: str) -> str:
        """Which node was lost, where that may be why the trainer failed; empty where it is not.

        A trainer that loses a peer fails at once; the head declares a node dead only when it has
        missed some heartbeats, which is waited for.

        Args:
            reason: the trainer's last error.
        """
        deadline = time.monotonic() + DECLARED_S
        while not self._lost and _OF_A_LOST_PEER.search(reason) and time.monotonic() < deadline:
            self._look()
            self._ended.wait(1.0)
        return self._lost

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            nodes = ask(self._address, environ=self._environ).nodes
        except ClusterUnreachable as error:
            self._silent += 1
            if self._silent == UNANSWERED:
                self._lost = f"lost the head: {error}"
            return
        self._silent = 0
        self._known |= {node.name: node for node in nodes}
        self._lost = lost_words(self._known, nodes)


def lost_words(known: Mapping[str, RayNode], nodes: Sequence[RayNode]) -> str:
    """Words for the nodes that were alive and are not any more; empty without one.

    Args:
        known: name -> node, of all that were seen alive.
        nodes: those that are alive now.
    """
    alive = {node.name for node in nodes}
    gone = [node for name, node in known.items() if name not in alive]
    words = [f"{node.ip} ({node.name})" if node.name != node.ip else node.ip for node in gone]
    return f"lost node {', '.join(words)}: Ray's head does not see it any more" if words else ""
