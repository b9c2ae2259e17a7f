"""The table of `setup_cluster.sh status`. Standard library only: it runs on the jumphost.

`python3 -m cluster.node_table FOLDER NAME...` reads FOLDER/<i>.status of the i-th host (from
node.sh on that host) and FOLDER/ray.jsonl (from cluster/ray_nodes.py on the head); exit 1 if a
node is missing.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.inventory import session
from config.text_table import text_table

_COLUMNS = ["host", "role", "tmux", "ray", "CPU", "GPU", "object store", "version", "up"]


def duration(seconds: float) -> str:
    """A duration in at most two units: `42 s`, `3 min`, `5 h 07 min`, `2 d 05 h`."""
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24:02d} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def used_of(pair: Sequence[float] | None, unit: float = 1.0, name: str = "") -> str:
    """`used / total`, in whole units or with one digit."""
    if not pair or not pair[1]:
        return "-"
    used, total = (value / unit for value in pair)
    return f"{max(used, 0.0):.3g} / {total:.3g}{name}"


def rows(
    statuses: Mapping[str, Mapping[str, str]], records: Sequence[Mapping[str, Any]]
) -> tuple[list[list[str]], bool]:
    """(rows of the table, whether every node is alive); `statuses` has the head first.

    The status of a host that did not answer is empty.
    """
    in_ray = {record["node"]: record for record in records if "node" in record}
    table, complete = [], True
    for index, (host, status) in enumerate(statuses.items()):
        name = session(index)
        record = in_ray.get(name, {})
        complete = complete and bool(record) and status.get("session") == "ours_alive"
        sessions = {"ours_alive": name, "ours_dead": f"{name} (ended)", "foreign": "not ours"}
        uptime = status.get("uptime_s")
        table.append(
            [
                host,
                "head" if index == 0 else "worker",
                sessions.get(status["session"], "-") if status else "no answer",
                "alive" if record else "-",
                used_of(record.get("CPU")),
                used_of(record.get("GPU")),
                used_of(record.get("object_store_memory"), 2**30, " GiB"),
                record.get("version", "-"),
                duration(float(uptime)) if uptime else "-",
            ]
        )
    return table, complete


def main(arguments: Sequence[str]) -> int:
    folder, *names = arguments
    statuses = {}
    for index, name in enumerate(names):
        lines = (Path(folder) / f"{index}.status").read_text(errors="replace").splitlines()
        statuses[name] = dict(line.split("=", 1) for line in lines if "=" in line)
    records = [
        json.loads(line)
        for line in (Path(folder) / "ray.jsonl").read_text().splitlines()
        if line.startswith("{")
    ]
    table, complete = rows(statuses, records)
    print("\n".join(text_table([_COLUMNS, *table])))
    listed = {session(index) for index in range(len(names))}
    for record in records:
        if record.get("node", "head") not in listed:
            print(
                f"warning: {record['node']} ({record['ip']}) is in this cluster's Ray, and not "
                "in the list of hosts: add it to WORKER_NODES, also to end it with cleanup"
            )
    for record in records:
        if "job" in record:
            where = f"{record['host']}, process {record['pid']}"
            print(f"job {record['job']} runs: {record['entrypoint']} ({where})")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
