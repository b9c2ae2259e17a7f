"""A tool server on each node of a Ray cluster: `python -m verl_mixed.launch.node_tool_servers`.

A child of the launcher, which does not join Ray itself. Ray adapter: an actor on each node, placed
by `NodeAffinitySchedulingStrategy`, starts `verl-mixed serve-tools` as its child, on the address of
its node, and starts it again if it ends. The servers end with this process: Ray then ends the
actors, and the kernel ends their children.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.cluster_watch import DECLARED_S
from config import child
from tool_server.wire.tokens import TOKEN_VARIABLE
from verl_mixed.launch.server_process import START_S, ServerProcess, end_words, restart_words
from verl_mixed.run.versions import REPOSITORY

SENT = (TOKEN_VARIABLE, "SERPER_API_KEY")
"""Variables of this process that the servers get; they inherit the others from their node's Ray."""

POLL_S = 0.5


def command_of(server: Sequence[str], address: str, run_dir: Path, restarts: int) -> list[str]:
    """The command of this process; it gets `--ready-file FILE` too.

    Args:
        server: options of `verl-mixed serve-tools` without the host.
        address: `ip:port` of the head.
        run_dir: folder of the run, the same on all nodes.
        restarts: how often each server may be started again.
    """
    spec = {"server": [*server], "address": address, "run_dir": str(run_dir), "restarts": restarts}
    return child.command("verl_mixed.launch.node_tool_servers", json.dumps(spec))


class NodeToolServer:
    """The tool server of one node; an actor there."""

    def __init__(
        self, options: Sequence[str], ip: str, run_dir: str, environ: Mapping[str, str]
    ) -> None:
        command = child.command("verl_mixed", "serve-tools", *options, "--host", ip)
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, **environ, "PYTHONPATH": path}
        self._server = ServerProcess(command, environ, Path(run_dir), f"tool_server.{ip}")
        self._is_started = False

    def begin(self) -> str:
        """Start the server for the first time; its URL."""
        self._server.start()
        self._is_started = True
        return self._server.wait_for_url()

    def run(self, url: str) -> str:
        """Wait until the server ends, and return why; start it first if it is not started.

        It is not started if this actor replaces one that died.
        """
        if not self._is_started:
            self._server.start(url)
        self._is_started = False
        while (reason := self._server.why_ended()) is None:
            time.sleep(POLL_S)
        return reason


def serve(spec: Mapping[str, Any], ready_file: Path) -> str:
    """Start a server on each node and keep them up; returns why no more servers may be started."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from agent_loop.calls.lock_probe import alive_nodes
    from agent_loop.ray_path import keep_folder_off_workers

    keep_folder_off_workers()
    ray.init(address=spec["address"])
    environ = {name: os.environ[name] for name in SENT if name in os.environ}
    make: Any = ray.remote(NodeToolServer)

    def actor_on(node: str) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = make.options(num_cpus=0, scheduling_strategy=pinned)
        return actor.remote(spec["server"], nodes[node], spec["run_dir"], environ)

    nodes, most = alive_nodes(), spec["restarts"]
    actors = {node: actor_on(node) for node in nodes}
    begun = [actor.begin.remote() for actor in actors.values()]
    urls = dict(zip(nodes, ray.get(begun, timeout=2 * START_S), strict=True))
    draft = ready_file.with_suffix(".tmp")
    draft.write_text(json.dumps({"url": ",".join(urls.values()), "pid": os.getpid()}))
    draft.replace(ready_file)
    print(f"tool servers listening url={','.join(urls.values())}", flush=True)
    running = {actor.run.remote(urls[node]): node for node, actor in actors.items()}
    lost: dict[str, float] = {}
    """Node whose actor was lost -> when."""

    restarts: Counter[str] = Counter()
    while True:
        why: dict[str, str] = {}
        ended, _ = ray.wait(list(running), timeout=POLL_S) if running else ([], [])
        for reference in ended:
            node = running.pop(reference)
            try:
                why[node] = ray.get(reference)
            except RayError as error:
                kind, lost[node] = type(error).__name__, time.monotonic()
                print(f"the tool server at {urls[node]} is lost: {kind}", flush=True)
        for node, since in list(lost.items()):
            if time.monotonic() > since + DECLARED_S:
                del lost[node]
                if node in alive_nodes():  # the loss of a node ends the run by itself
                    why[node], actors[node] = "the actor of Ray died", actor_on(node)
        for node, reason in why.items():
            if restarts[node] == most:
                return end_words(urls[node], reason, most)
            restarts[node] += 1
            print(restart_words(urls[node], reason, restarts[node], most), flush=True)
            running[actors[node].run.remote(urls[node])] = node
        if not running:
            time.sleep(POLL_S)


if __name__ == "__main__":
    _, given, _, file = sys.argv
    sys.exit(f"error: {serve(json.loads(given), Path(file))}")
