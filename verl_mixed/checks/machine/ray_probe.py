"""What a Ray cluster says of itself, asked by a process that may be killed.

`python -m verl_mixed.checks.machine.ray_probe` takes a JSON object on stdin and prints one a stage,
so that what was learnt before a deadline is not lost. It joins the cluster for tasks of 0 CPUs, one
a node.

Ray adapter: `GcsClient` at 2.60, which refuses a wrong token at once, where `ray.init` retries.
"""

import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CONNECT_S = 3.0
ANSWER_S = 5.0
NODES_S = 12.0
"""For all nodes together: a worker process has to start on each."""

PACKAGES = ("torch", "verl", "ray", "transformers", "TransferQueue", "tensordict", "vllm")


def main() -> int:
    """Answer the question on stdin."""
    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)

    def say(stage: str, **values: Any) -> None:
        print(json.dumps({"stage": stage, **values}), flush=True)

    try:
        address = _resolved(asked["address"])
        say("address", address=address)
        _reach(address, say)
    except _Refused as error:
        say("refused", why=error.why, words=str(error))
        return 0
    _ask_nodes(address, asked, say)
    return 0


class _Refused(RuntimeError):
    """The cluster cannot be asked; `why` is one word for it."""

    def __init__(self, why: str, words: str) -> None:
        super().__init__(words)
        self.why = why


def _resolved(address: str) -> str:
    """`ip:port`; `auto` is the Ray that runs here."""
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return canonicalize_bootstrap_address_or_die("auto")
    except ConnectionError as error:
        raise _Refused("none", " ".join(str(error).split())) from error


def _reach(address: str, say: Callable[..., None]) -> None:
    """Socket, token, versions, then the table of nodes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _Refused("socket", str(error)) from error
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.exceptions import AuthenticationError

    try:
        client = GcsClient(address=address)
        raw = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=ANSWER_S)
    except AuthenticationError as error:
        raise _Refused("token", str(error).partition(". ")[0]) from error
    except Exception as error:  # Ray names a dozen kinds; the words are for the user
        raise _Refused("answer", f"{type(error).__name__}: {error}") from error
    say("metadata", **json.loads(raw or b"{}"))
    nodes = [_node(key.hex(), raw) for key, raw in client.get_all_node_info().items()]
    nodes.sort(key=lambda node: (not node["is_head"], node["ip"]))
    jobs = [
        job.entrypoint or job.job_id.hex()
        for job in client.get_all_job_info().values()
        if not job.is_dead and not job.config.ray_namespace.startswith("_ray_internal")
    ]
    say("nodes", nodes=nodes, jobs=jobs)


def _node(node_id: str, raw: Any) -> dict[str, Any]:
    resources = dict(raw.resources_total)
    return {
        "node_id": node_id,
        "ip": raw.node_manager_address,
        "hostname": raw.node_manager_hostname,
        "alive": raw.state == 0,
        "is_head": raw.is_head_node,
        "why_dead": raw.death_info.reason_message,
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
    }


def _ask_nodes(address: str, asked: Mapping[str, Any], say: Callable[..., None]) -> None:
    """Facts of each node, by a task there; then locks between them, where they are asked for."""
    import ray
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        say("not joined", words=" ".join(str(error).split()))
        return
    try:
        say("free", nodes=available_resources_per_node())
        _facts_of_nodes(asked, say)
        if asked.get("locks"):
            from agent_loop.tools.lock_probe import alive_nodes, lock_problems

            folder = Path(asked["locks"])
            say("locks", problems=lock_problems(folder), nodes=len(alive_nodes()))
    finally:
        ray.shutdown()


def _facts_of_nodes(asked: Mapping[str, Any], say: Callable[..., None]) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def task_on(node: str, function: Callable[..., Any]) -> Any:
        task: Any = ray.remote(function)
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        return task.options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    end_s = time.monotonic() + NODES_S
    asking = {
        node: task_on(node, _facts).remote(asked["files"], asked["folders"], PACKAGES)
        for node in nodes
    }
    for node, reference in asking.items():
        try:
            facts: Any = ray.get(reference, timeout=max(0.0, end_s - time.monotonic()))
            before_s = time.time()  # its worker is up now, so the answer is quick
            its_s: Any = ray.get(task_on(node, _now).remote(), timeout=ANSWER_S)
        except GetTimeoutError:
            say("silent", ip=nodes[node], words=f"no answer within {NODES_S:g} s")
        except RayError as error:
            words = " ".join(str(error).partition("lease_id=")[0].split())
            words = f"{type(error).__name__}: {words}"[:300]
            say("silent", ip=nodes[node], words=words)
        else:
            # the least difference of the clocks that explains what it says
            skew_s = max(0.0, before_s - its_s, its_s - time.time())
            say("facts", ip=nodes[node], skew_s=skew_s, **facts)


def _now() -> float:
    return time.time()


def _facts(files: Sequence[str], folders: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """What a node sees; runs there, with the standard library only."""
    import importlib.metadata
    import importlib.util
    import os
    import platform
    import shutil
    import sys

    def number(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def nearest(folder: str) -> str:
        while not os.path.exists(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        return folder

    places = {folder: nearest(folder) for folder in folders}
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: number(name) for name in packages},
        "ours": importlib.util.find_spec("agent_loop") is not None,
        "unseen": [file for file in files if not os.access(file, os.R_OK)],
        "unwritable": [folder for folder in folders if not os.access(places[folder], os.W_OK)],
        "free_bytes": {folder: shutil.disk_usage(place).free for folder, place in places.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
