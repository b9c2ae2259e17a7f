"""Questions to a Ray cluster and its nodes, in a process that can be killed at its deadline.

`python -m verl_mixed.checks.machine.ray_probe` reads a JSON object on stdin and prints one JSON
object per stage, so that the answers before a deadline are kept. It joins the cluster to run one
task of 0 CPUs on each node. Private interfaces of Ray are in `cluster.ray_nodes`.
"""

import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.inventory import EQUAL_ON_NODES

CONNECT_S = 3.0
ANSWER_S = 5.0
NODES_S = 12.0
"""For all nodes together: a worker process has to start on each."""


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
        why, words = error.args
        say("refused", why=why, words=words)
        return 0
    _ask_nodes(address, asked, say)
    return 0


class _Refused(RuntimeError):
    """The cluster cannot be asked: one word for the reason, and what was said."""


def _resolved(address: str) -> str:
    """`ip:port`; `auto` is the Ray that runs here."""
    if address != "auto":
        return address
    from cluster.ray_nodes import bootstrap_address

    try:
        return bootstrap_address()
    except ConnectionError as error:
        raise _Refused("none", " ".join(str(error).split())) from error


def _reach(address: str, say: Callable[..., None]) -> None:
    """Socket, token, versions, then the table of nodes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _Refused("socket", str(error)) from error
    from ray.exceptions import AuthenticationError

    from cluster.ray_nodes import ask_once

    try:
        metadata, nodes, jobs = ask_once(address, ANSWER_S)
    except AuthenticationError as error:
        raise _Refused("token", str(error).partition(". ")[0]) from error
    except Exception as error:  # Ray raises a dozen kinds; the message is for the user
        raise _Refused("answer", f"{type(error).__name__}: {error}") from error
    say("metadata", **metadata)
    say("nodes", nodes=nodes, jobs=jobs)


def _ask_nodes(address: str, asked: Mapping[str, Any], say: Callable[..., None]) -> None:
    """Facts of each node, by a task there; then locks between them, where they are asked for."""
    import ray
    from ray.exceptions import RayError

    from agent_loop.ray_path import keep_folder_off_workers
    from cluster.ray_nodes import available_resources, connect

    keep_folder_off_workers()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        say("not joined", words=" ".join(str(error).split()))
        return
    try:
        accessor = connect(address)
        say("free", nodes=available_resources(accessor) if accessor else {})
        if asked.get("shared"):
            _share(Path(asked["shared"]), say)
        _facts_of_nodes(asked, say)
        if asked.get("locks"):
            from agent_loop.calls.lock_probe import alive_nodes, lock_problems

            folder = Path(asked["locks"])
            say("locks", problems=lock_problems(folder), nodes=len(alive_nodes()))
    finally:
        ray.shutdown()


def _share(folder: Path, say: Callable[..., None]) -> None:
    """Whether a file that is written here into a folder is what each node reads there."""
    import ray
    from ray.exceptions import RayError

    token = uuid4().hex
    path = folder / f".shared-probe-{token}"
    try:
        path.write_text(token)
    except OSError as error:
        say("shared", folder=str(folder), unwritable=str(error), other={}, nodes=0)
        return
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    try:
        asking = {node: _task_on(node, _read).remote(str(path)) for node in nodes}
        end_s, other = time.monotonic() + NODES_S, {}
        for node, reference in asking.items():
            try:
                found: Any = ray.get(reference, timeout=max(0.1, end_s - time.monotonic()))
            except RayError as error:
                found = type(error).__name__
            if found != token:
                other[nodes[node]] = found
        say("shared", folder=str(folder), unwritable="", other=other, nodes=len(nodes))
    finally:
        path.unlink(missing_ok=True)


def _read(path: str) -> str:
    """What a node finds in a file, or why it finds nothing; a file server may be a moment late."""
    import time

    for last in (False, False, False, True):
        try:
            with open(path) as file:
                return file.read()
        except OSError as error:
            if last:
                return str(error.strerror)
        time.sleep(0.7)
    return ""


def _task_on(node: str, function: Callable[..., Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(function)
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)


def _facts_of_nodes(asked: Mapping[str, Any], say: Callable[..., None]) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    end_s = time.monotonic() + NODES_S
    asking = {
        node: _task_on(node, _facts).remote(asked["files"], asked["folders"], EQUAL_ON_NODES)
        for node in nodes
    }
    for node, reference in asking.items():
        try:
            facts: Any = ray.get(reference, timeout=max(0.0, end_s - time.monotonic()))
            before_s = time.time()  # its worker is up now, so the answer is quick
            its_s: Any = ray.get(_task_on(node, _now).remote(), timeout=ANSWER_S)
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
