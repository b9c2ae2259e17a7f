"""A watch on the nodes of the Ray cluster that a run has joined.

The trainer notices a lost node only when a call to the node fails, and a collective may wait for
many minutes. So the launcher asks the head every few seconds.
"""

import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from typing_extensions import Self

from cluster.ray_cluster import ClusterUnreachable, RayNode, ask

EVERY_S = 10.0
"""Seconds between two questions to the head."""

DECLARED_S = 60.0
"""Time for the head to declare a node dead: Ray 2.60 asks each node every 3 s, 5 times."""

_OF_A_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|actor\w* ?(died|unavailable)|node\w* ?(died|was terminated)"
    r"|nccl|gloo|unavailable"
    r"|^exit -?\d+:",  # a driver whose head is gone ends with a stack trace of C++ and no error
    re.IGNORECASE,
)

UNANSWERED = 3
"""The head counts as lost after this many questions in a row without an answer."""


def own_ip(address: str) -> str:
    """The address of this machine on the network of a head at `ip:port`.

    Raises:
        OSError: there is no route to it.
    """
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]


class ClusterWatch:
    """Asks the head in the background which nodes are lost; a context manager.

    Args:
        address: `ip:port` of the head.
        environ: with RAY_AUTH_MODE and the token's place.
        run: what the command of the run's driver has, and that of no other run of the cluster.
    """

    def __init__(self, address: str, environ: Mapping[str, str], run: str) -> None:
        self._address, self._environ, self._of_run = address, environ, run
        self._ended = threading.Event()
        self._known: dict[str, RayNode] = {}
        self._silent = 0
        self.lost = ""
        """Which node was lost, and why; empty while all nodes are alive."""

        self.lost_actor = ""
        """Which actor of the run died; empty without one. Not every caller of an actor notices."""

        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)

    def explain(self, reason: str) -> str:
        """Which node was lost, if this may be why the trainer failed; otherwise empty.

        A trainer that loses a peer fails at once, but the head declares a node dead only after some
        missed heartbeats. So this method waits up to `DECLARED_S` for the head, if `reason`, the
        trainer's last error, speaks of a lost peer.
        """
        deadline = time.monotonic() + DECLARED_S
        while not self.lost and _OF_A_LOST_PEER.search(reason) and time.monotonic() < deadline:
            self._look()
            self._ended.wait(1.0)
        return self.lost

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
            cluster = ask(self._address, environ=self._environ)
        except ClusterUnreachable as error:
            self._silent += 1
            if self._silent == UNANSWERED:
                self.lost = f"lost the head: {error}"
            return
        self._silent = 0
        nodes = cluster.nodes
        dead = [
            f"{actor.name} ({actor.place})"
            for actor in cluster.dead_actors
            # what started the actor of a tool server starts another one
            if self._of_run in actor.job and actor.name != "NodeToolServer"
        ]
        self.lost_actor = f"the process of an actor died: {', '.join(dead)}" if dead else ""
        self._known |= {node.name: node for node in nodes}
        self.lost = lost_nodes(self._known, nodes)


def lost_nodes(known: Mapping[str, RayNode], nodes: Sequence[RayNode]) -> str:
    """A sentence on the `known` nodes that are not among the alive `nodes`; empty without one."""
    alive = {node.name for node in nodes}
    gone = [node for name, node in known.items() if name not in alive]
    words = [f"{node.ip} ({node.name})" if node.name != node.ip else node.ip for node in gone]
    return f"lost node {', '.join(words)}: Ray's head does not see it any more" if words else ""
