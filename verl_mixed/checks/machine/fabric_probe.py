"""Measures the network between the nodes of a Ray cluster, in a process that can be killed.

`python -m verl_mixed.checks.machine.fabric_probe ADDRESS` starts one actor of 0 CPUs on each node
and prints one JSON object per measurement, so that those before a deadline are kept. `fabric`
judges them.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl_mixed.checks.machine.fabric import ANY_PORT, Link, Reduce, needs_pairs, rounds

START_S = 60.0
"""For the actors of all nodes together."""

CONNECT_S = 3.0
SEND_S = 0.4
ANSWER_S = 30.0
"""For one measurement; what was sent has to arrive over a slow link too."""

REDUCE_S = 60.0
GLOO_BYTES, NCCL_BYTES = 16 << 20, 256 << 20

Say = Callable[..., None]


def main() -> int:
    """Measure the cluster at the address of the command line."""
    logging.disable(logging.CRITICAL)
    import ray
    from ray.exceptions import RayError

    from agent_loop.ray_path import keep_folder_off_workers

    keep_folder_off_workers()

    def say(stage: str, **values: Any) -> None:
        print(json.dumps({"stage": stage, **values}), flush=True)

    try:
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        say("refused", words=" ".join(str(error).split()))
        return 0
    try:
        _measure(say)
    finally:
        ray.shutdown()
    return 0


def _measure(say: Say) -> None:
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    say("nodes", count=len(nodes))
    if len(nodes) == 1:
        return
    ends = _started({node: _actor(_End, node) for node in nodes}, nodes, say)
    links = _links(ends, nodes, say)
    if len(ends) < len(nodes) or any(link.fault for link in links):
        say("note", words="not tried, because nodes cannot reach each other")
        return
    backend, note = _backend(ends, nodes)
    if note:
        say("note", words=note)
    gpus = 1 if backend == "nccl" else 0
    reducers = _started({node: _actor(_Reducer, node, gpus) for node in ends}, nodes, say)
    if len(reducers) < len(ends):
        return
    whole = _reduced([*reducers], reducers, nodes, backend, say)
    if not whole.fault and needs_pairs(whole, links):
        for pairs in rounds([*reducers]):
            for pair in pairs:  # in turn: pairs at the same time would share processors
                _reduced(list(pair), reducers, nodes, backend, say)


def _actor(kind: type, node: str, gpus: int = 0) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    make: Any = ray.remote(kind)
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return make.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=pinned).remote()


def _started(
    actors: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], say: Say
) -> dict[str, Any]:
    """The actors that answer; those that do not are said."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    asked = {node: actor.ready.remote() for node, actor in actors.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=START_S)
    found = {}
    for node, reference in asked.items():
        try:
            ray.get(reference, timeout=0.1)
            found[node] = actors[node]
        except GetTimeoutError:
            words = (
                f"no answer within {START_S:g} s: the head reaches the node, and not the worker "
                "that Ray starts there (its ports: RAY_WORKER_PORTS), or the node is busy"
            )
            say("silent", ip=_ip(nodes[node]), words=words)
        except RayError as error:
            say("silent", ip=_ip(nodes[node]), words=_first_line(error))
    return found


def _links(ends: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], say: Say) -> list[Link]:
    """Measure each pair in both directions; pairs that share no node at the same time."""
    import ray
    from ray.exceptions import RayError

    ports = {}
    for node, actor in ends.items():
        own: Any = ray.get(actor.ports.remote(_ip(nodes[node])), timeout=ANSWER_S)
        services = {
            nodes[node]["NodeManagerPort"]: "Ray's node manager",
            nodes[node]["ObjectManagerPort"]: "Ray's object manager",
        }
        ports[node] = {
            **services,
            **dict.fromkeys(own["worker"], "a worker of Ray"),
            own["any"]: ANY_PORT,
        }
    found = []
    for pairs in rounds([*ends]):
        for turn in (pairs, [(other, one) for one, other in pairs]):
            asked = {
                (one, other): ends[one].measure.remote(
                    _ip(nodes[other]), ports[other], CONNECT_S, SEND_S
                )
                for one, other in turn
            }
            for (one, other), reference in asked.items():
                place = {"source": _ip(nodes[one]), "target": _ip(nodes[other])}
                try:
                    values: Any = ray.get(reference, timeout=ANSWER_S)
                except RayError as error:
                    values = {"fault": _first_line(error), "what": ANY_PORT}
                say("link", **place, **values)
                found.append(Link(**place, **values))
    return found


def _backend(ends: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """(NCCL where every node has a GPU that nobody uses, else gloo; what to say about it)."""
    import ray

    from cluster.ray_nodes import available_resources, connect

    answers: Any = ray.get([actor.gpus.remote() for actor in ends.values()], timeout=ANSWER_S)
    if not all(answers):
        return "gloo", ""
    accessor = connect(ray.get_runtime_context().gcs_address)
    free = available_resources(accessor) if accessor else {}
    if all(free.get(node, {}).get("GPU", 0) >= 1 for node in nodes):
        return "nccl", ""
    return "gloo", "with gloo, because the GPUs are in use: NCCL was not tried"


def _reduced(
    names: list[str],
    reducers: Mapping[str, Any],
    nodes: Mapping[str, Mapping[str, Any]],
    backend: str,
    say: Say,
) -> Reduce:
    """One all-reduce over these nodes; the first is the rendezvous."""
    import ray
    from ray.exceptions import RayError

    ips = [_ip(nodes[name]) for name in names]
    size = NCCL_BYTES if backend == "nccl" else GLOO_BYTES
    seconds, fault = 0.0, ""
    try:
        port: Any = ray.get(reducers[names[0]].free_port.remote(ips[0]), timeout=ANSWER_S)
        place = f"tcp://{'[' + ips[0] + ']' if ':' in ips[0] else ips[0]}:{port}"
        asked = [
            reducers[name].reduce.remote(place, rank, len(names), backend, size, REDUCE_S / 2)
            for rank, name in enumerate(names)
        ]
        times: Any = ray.get(asked, timeout=REDUCE_S)
        seconds, size = max(seconds for seconds, _ in times), times[0][1]
    except RayError as error:
        fault = _first_line(error) or f"no end within {REDUCE_S:g} s"
    values = {"nodes": ips, "backend": backend, "size_bytes": size}
    say("reduce", **values, seconds=seconds, fault=fault)
    return Reduce(nodes=tuple(ips), backend=backend, size_bytes=size, seconds=seconds, fault=fault)


def _ip(node: Mapping[str, Any]) -> str:
    return node["NodeManagerAddress"]


def _first_line(error: Exception) -> str:
    """The cause of an error of Ray, in one line."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]


class _End:
    """The actor of one node: it answers on ports and measures to others."""

    def ready(self) -> bool:
        return True

    def gpus(self) -> int:
        """GPUs of the machine, whatever Ray has given to this actor."""
        import subprocess

        try:
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return done.stdout.count("GPU ")

    def ports(self, ip: str) -> dict[str, Any]:
        """The ports that this process listens on for Ray, and a new one that echoes and counts."""
        import os
        import socket
        import threading

        import psutil

        listening = [
            connection.laddr.port
            for connection in psutil.Process(os.getpid()).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        server = socket.create_server((ip, 0), family=family)

        def serve(connection: socket.socket) -> None:
            """`p`: send each byte back. `b`: read to the end, then say how much it was."""
            with connection:
                kind, total = connection.recv(1), 0
                while data := connection.recv(1 << 20):
                    total += len(data)
                    if kind == b"p":
                        connection.sendall(data)
                if kind == b"b":
                    connection.sendall(str(total).encode())

        def accept() -> None:
            while True:
                connection, _ = server.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return {"worker": listening, "any": server.getsockname()[1]}

    def measure(
        self, ip: str, ports: dict[int, str], connect_s: float, send_s: float
    ) -> dict[str, Any]:
        """Connect to each port of a node; then latency and bandwidth to its last."""
        import socket
        import time

        port = 0
        try:
            for port in ports:
                socket.create_connection((ip, port), timeout=connect_s).close()
            with socket.create_connection((ip, port), timeout=connect_s) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(b"p")
                trips = []
                for _ in range(20):
                    began = time.monotonic()
                    connection.sendall(b"x")
                    connection.recv(1)
                    trips.append(time.monotonic() - began)
            with socket.create_connection((ip, port), timeout=connect_s) as connection:
                connection.settimeout(20.0)
                data, sent = b"\0" * (1 << 18), 0
                connection.sendall(b"b")
                began = time.monotonic()
                while time.monotonic() - began < send_s:
                    sent += connection.send(data)
                connection.shutdown(socket.SHUT_WR)
                arrived = int(connection.recv(64) or b"0")
                seconds = time.monotonic() - began
        except OSError as error:
            return {"fault": str(error), "port": port, "what": ports[port]}
        return {"latency_s": min(trips) / 2, "bytes_per_s": arrived / seconds}


class _Reducer:
    """The actor of one node for all-reduces; a hanging one is killed with its process."""

    def ready(self) -> bool:
        import torch.distributed

        return torch.distributed.is_available()

    def free_port(self, ip: str) -> int:
        import socket

        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.create_server((ip, 0), family=family) as server:
            return server.getsockname()[1]

    def reduce(
        self, place: str, rank: int, world: int, backend: str, size_bytes: int, timeout_s: float
    ) -> tuple[float, int]:
        """(seconds of the fastest of three all-reduces, bytes of the tensor).

        The first two, of a sixteenth, make the connections and show how long the whole would take.
        On a link so slow that it is more than 5 s, a sixteenth is all that is measured.
        """
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        dist.init_process_group(
            backend,
            init_method=place,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend == "nccl" else None,  # else NCCL guesses it by the rank
        )
        try:

            def timed(size: int) -> float:
                tensor = torch.ones(size // 4, device=device)
                dist.barrier()
                began = time.monotonic()
                dist.all_reduce(tensor)
                if backend == "nccl":
                    torch.cuda.synchronize()
                return time.monotonic() - began

            part = size_bytes // 16
            timed(part)
            slowest = torch.tensor([timed(part)], device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # every rank decides the same
            if slowest.item() * 16 > 5.0:
                return slowest.item(), part
            return min(timed(size_bytes) for _ in range(3)), size_bytes
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
