"""Questions to Ray's Global Control Store (GCS): nodes, jobs, resources, versions.

This is the only module that uses private interfaces of Ray (2.60). It can run on the head as a
text, without this repository:

    python -c "$(cat ray_nodes.py)" table
    python -c "$(cat ray_nodes.py)" wait TIMEOUT_S NAME...

Each printed line is one JSON object. `table`: the nodes that are alive, then the jobs that run, and
with the word `actors` behind it the actors of these jobs whose process died.
`wait`: one line per node when it joins; exit 1 if a node has not joined in time.
"""

import json
import os
import sys
import time
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die

# compiled modules: a type checker cannot look into them
from ray._raylet import GcsClient, GcsClientOptions, GlobalStateAccessor  # pyright: ignore
from ray.core.generated.common_pb2 import ActorDiedErrorContext  # pyright: ignore
from ray.core.generated.gcs_pb2 import (
    ActorTableData,  # pyright: ignore
    AvailableResources,  # pyright: ignore
    JobTableData,  # pyright: ignore
)


def connect(address: str) -> GlobalStateAccessor | None:
    """The head's GCS, or None while it does not answer."""
    options = GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    accessor = GlobalStateAccessor(options)
    return accessor if accessor.connect() else None


def alive(accessor: GlobalStateAccessor) -> dict[str, dict]:
    """Name -> node, of the nodes that are alive."""
    return {node["NodeName"]: node for node in accessor.get_node_table() if node["Alive"]}


def available_resources(accessor: GlobalStateAccessor) -> dict[str, dict[str, float]]:
    """Node id -> resource -> amount that nobody uses."""
    messages = map(AvailableResources.FromString, accessor.get_all_available_resources())
    return {node.node_id.hex(): dict(node.resources_available) for node in messages}


def is_running(job: Any) -> bool:
    """The job has not ended, and is not one of Ray's own."""
    return not job.is_dead and not job.config.ray_namespace.startswith("_ray_internal")


def bootstrap_address() -> str:
    """`ip:port` of the Ray that runs on this machine; a ConnectionError if none runs."""
    return canonicalize_bootstrap_address_or_die("auto")


def ask_once(address: str, timeout_s: float) -> tuple[dict, list[dict], list[str]]:
    """Versions, nodes and jobs of the cluster at an address, in one attempt.

    `GcsClient` refuses a wrong token at once; `ray.init` and `GlobalStateAccessor` retry.

    Returns:
        (`ray_version`, `python_version`, ...; every node, the head first; what the jobs run).

    Raises:
        ray.exceptions.AuthenticationError: the token is not the cluster's.
        Exception: no Ray answers; Ray raises a dozen kinds.
    """
    client = GcsClient(address=address)
    metadata = json.loads(
        client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=timeout_s) or b"{}"
    )
    nodes = [_node(key.hex(), raw) for key, raw in client.get_all_node_info().items()]
    nodes.sort(key=lambda node: (not node["is_head"], node["ip"]))
    jobs = client.get_all_job_info().values()
    return metadata, nodes, [job.entrypoint or job.job_id.hex() for job in jobs if is_running(job)]


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


def table(accessor: GlobalStateAccessor) -> list[dict]:
    """One record per node that is alive, and one per job that runs."""
    available, records = available_resources(accessor), []
    for name, node in alive(accessor).items():
        total, free = node["Resources"], available.get(node["NodeID"], {})
        used = {
            key: [total.get(key, 0.0) - free.get(key, 0.0), total.get(key, 0.0)]
            for key in ("CPU", "GPU", "object_store_memory")
        }
        identity = {"node": name, "ip": node["NodeManagerAddress"], "version": ray.__version__}
        records.append(identity | used)
    for message in accessor.get_job_table():
        job = JobTableData.FromString(message)
        if is_running(job):
            records.append(
                {
                    "job": job.job_id.hex(),
                    "entrypoint": job.entrypoint,
                    "host": job.driver_address.ip_address,
                    "pid": job.driver_pid,
                }
            )
    return records


def dead_actors(accessor: GlobalStateAccessor) -> list[dict]:
    """One record per actor of a running job whose process died and was not ended by Ray."""
    jobs = map(JobTableData.FromString, accessor.get_job_table())
    running = {job.job_id: job.entrypoint for job in jobs if is_running(job)}
    records = []
    for message in accessor.get_actor_table(None, None):
        actor = ActorTableData.FromString(message)
        if actor.state == ActorTableData.DEAD and actor.job_id in running and _died(actor):
            name = actor.class_name.rpartition(".")[2]
            where = {"host": actor.address.ip_address, "pid": actor.pid}
            records.append({"dead_actor": name, "job": running[actor.job_id]} | where)
    return records


def _died(actor: Any) -> bool:
    """The actor's process was killed or crashed: no `ray.kill`, no exit that Ray asked for."""
    cause = actor.death_cause
    died = cause.actor_died_error_context
    is_crash = died.reason == ActorDiedErrorContext.WORKER_DIED and "_ERROR" in died.error_message
    return is_crash or cause.WhichOneof("context") == "oom_context"


def wait(timeout_s: float, names: list[str]) -> int:
    """Print each node when it joins; return 1 if not all have joined in time."""
    began, missing, accessor = time.monotonic(), set(names), None
    while True:
        accessor = accessor or connect(os.environ["RAY_ADDRESS"])
        joined = missing & set(alive(accessor)) if accessor else set()
        for name in sorted(joined):
            print(json.dumps({"joined": name}), flush=True)
        missing -= joined
        if not missing:
            return 0
        if time.monotonic() - began > timeout_s:
            return 1
        time.sleep(0.2)


def main() -> int:
    if sys.argv[1] == "wait":
        return wait(float(sys.argv[2]), sys.argv[3:])
    accessor = connect(os.environ["RAY_ADDRESS"])
    if accessor is None:
        print(f"no answer from {os.environ['RAY_ADDRESS']}", file=sys.stderr)
        return 1
    for record in table(accessor) + (dead_actors(accessor) if "actors" in sys.argv[2:] else []):
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
