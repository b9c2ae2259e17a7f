"""What Ray itself says about the nodes of the cluster; run on the head, in its environment.

    python -c "$(cat ray_nodes.py)" table
    python -c "$(cat ray_nodes.py)" wait TIMEOUT_S NAME...

Each line is one JSON object. `table`: the nodes that are alive, then the jobs that run. `wait`: a
line per node as it joins; exit 1 when one has not joined in time.
"""

import json
import os
import sys
import time

import ray

# compiled modules: a type checker cannot look into them
from ray._raylet import GcsClientOptions, GlobalStateAccessor  # pyright: ignore
from ray.core.generated.gcs_pb2 import AvailableResources, JobTableData  # pyright: ignore


def connect() -> GlobalStateAccessor | None:
    """The head's Global Control Store, or None while it does not answer."""
    options = GcsClientOptions.create(
        os.environ["RAY_ADDRESS"], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    accessor = GlobalStateAccessor(options)
    return accessor if accessor.connect() else None


def alive(accessor: GlobalStateAccessor) -> dict[str, dict]:
    """Name -> node, of the nodes that are alive."""
    return {node["NodeName"]: node for node in accessor.get_node_table() if node["Alive"]}


def used_of(total: float, available: float) -> list[float]:
    return [total - available, total]


def table(accessor: GlobalStateAccessor) -> list[dict]:
    """A record per node that is alive, and one per job that runs."""
    available = {}
    for message in accessor.get_all_available_resources():
        resources = AvailableResources.FromString(message)
        available[resources.node_id.hex()] = dict(resources.resources_available)
    records = []
    for name, node in alive(accessor).items():
        total, free = node["Resources"], available.get(node["NodeID"], {})
        used = {
            key: used_of(total.get(key, 0.0), free.get(key, 0.0))
            for key in ("CPU", "GPU", "object_store_memory")
        }
        who = {"node": name, "ip": node["NodeManagerAddress"], "version": ray.__version__}
        records.append(who | used)
    for message in accessor.get_job_table():
        job = JobTableData.FromString(message)
        if not job.is_dead and not job.config.ray_namespace.startswith("_ray_internal"):
            records.append(
                {
                    "job": job.job_id.hex(),
                    "entrypoint": job.entrypoint,
                    "host": job.driver_address.ip_address,
                    "pid": job.driver_pid,
                }
            )
    return records


def wait(timeout_s: float, names: list[str]) -> int:
    """Print each node as it joins; 1 when the time is over before all have."""
    began, missing, accessor = time.monotonic(), set(names), None
    while True:
        accessor = accessor or connect()
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
    accessor = connect()
    if accessor is None:
        print(f"no answer from {os.environ['RAY_ADDRESS']}", file=sys.stderr)
        return 1
    for record in table(accessor):
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
