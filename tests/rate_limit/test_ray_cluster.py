"""A cluster of several network namespaces, a Ray node in each: what holds on one holds on all.

The namespaces share the kernel's clock, so instants of all nodes are on one. A call's slot is taken
between its ask and its return, so calls that lie whole in a window may not be more than the law
allows, whoever is told or woken late.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rate_limit.gcra import SECOND_NS, Rate
from rate_limit.state_file import boottime_ns

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
RESULT = "result of the driver: "

RATE = Rate(per_minute=18_000, burst=30)
CALLS = 100
"""Of each thread; two threads in each of two workers on each node."""

HEAD = "10.77.0.1:6379"

PATIENCE_S = 600
"""How long a driver may take on a machine that runs other tests too."""


class Cluster:
    """Namespaces on one bridge; the first has the head of a Ray cluster."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.common = folder / "common"
        """The same on all nodes."""

        self.torn = folder / "torn"
        """On the last node, another folder."""

        self.common.mkdir()
        self.torn.mkdir()
        self._bridge = f"rl{os.getpid()}"
        self._namespaces: list[str] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}  # that were not killed
        self._env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        }
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")

    @property
    def addresses(self) -> list[str]:
        return [f"10.77.0.{number}" for number in self._nodes]

    def add_node(self, first: str = "true") -> int:
        """Start a node, after a command in its mount namespace; returns its number."""
        number = len(self._namespaces) + 1
        name, address = f"{self._bridge}-{number}", f"10.77.0.{number}"
        ip("netns", "add", name)
        self._namespaces.append(name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", self._bridge, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        role = f"--address={HEAD}" if number > 1 else "--head --port=6379 --include-dashboard=false"
        start = (
            f"{first} && exec ray start {role} --node-ip-address={address} --num-cpus=1 "
            f"--object-store-memory=80000000 --temp-dir={self.folder}/{number} "
            "--disable-usage-stats --block"
        )
        with (self.folder / f"{number}.log").open("wb") as log:
            self._nodes[number] = subprocess.Popen(
                ["ip", "netns", "exec", name, "sh", "-c", start],
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return number

    def driver(self, function: str, *args: object) -> "subprocess.Popen[str]":
        """A function of this file in a process on the head; its result is a line of its own."""
        program = (
            f"import json, ray; from {__name__} import connect, {function}; "
            f"connect({len(self._nodes)}); print({RESULT!r} + json.dumps({function}(*{args!r})))"
        )
        return subprocess.Popen(
            ["ip", "netns", "exec", self._namespaces[0], sys.executable, "-c", program],
            env=self._env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, function: str, *args: object) -> Any:
        """What a function of this file returns on the head."""
        with self.driver(function, *args) as process:
            return result_of(process)

    def kill_node(self, number: int) -> None:
        """Kill whatever runs in its namespace, at once."""
        for pid in ip("netns", "pids", self._namespaces[number - 1]).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._nodes.pop(number).wait()

    def close(self) -> None:
        for number in list(self._nodes):
            self.kill_node(number)
        for name in self._namespaces:
            ip("netns", "delete", name)
        ip("link", "delete", self._bridge)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def result_of(process: "subprocess.Popen[str]") -> Any:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    (result,) = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(result.removeprefix(RESULT))  # Ray prints of lost nodes after it too


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    """Three nodes; one folder is not the same on the last."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip`, to make network namespaces")
    folder = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))  # Ray's sockets need a short path
    try:
        made = Cluster(folder)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder)
        pytest.skip(f"cannot make a bridge here: {error.stderr.strip()}")
    try:
        try:
            made.add_node()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        made.run("addresses")  # the head is there
        made.add_node()
        made.add_node(f"mount -t tmpfs tmpfs {made.torn}")
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


def connect(nodes: int) -> None:
    """Join the cluster when it is there, and has noticed who came and who died."""
    import ray

    while True:
        try:
            ray.init(address=HEAD, log_to_driver=False, logging_level=logging.ERROR)
            break
        except ConnectionError:
            time.sleep(0.1)
    while len(addresses()) != nodes:
        time.sleep(0.1)  # leave the processor to those who start


def addresses() -> list[str]:
    from agent_loop.calls.lock_probe import alive_nodes

    return sorted(alive_nodes().values())


def problems_of(folder: str) -> list[str]:
    from agent_loop.calls.lock_probe import lock_problems

    return lock_problems(Path(folder))


def settled_with(backend: str, folder: str) -> dict[str, Any] | str:
    """What a run with its folder there settles for, or the error."""
    from agent_loop.calls.limiter import resolve_backend
    from config.schema import MixedConfig, RateLimitConfig, SourceConfig, ToolConfig

    mixed = MixedConfig(
        sources={"math": SourceConfig(ratio=1)},
        experiment="here",
        run_dir=folder,
        rate_limit=RateLimitConfig.model_validate({"backend": backend}),
    )
    try:
        return resolve_backend(ToolConfig(server_url="http://127.0.0.1:9"), mixed).model_dump()
    except RuntimeError as error:
        return str(error)


def hammer(name: str, folder: str) -> dict[str, list[str]]:
    """Two workers on each node call; how each ended, by the node's address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from agent_loop.calls.lock_probe import alive_nodes
    from rate_limit.ray_limiter import RayRateLimiter

    limiter = RayRateLimiter(name, RATE.per_minute, RATE.burst)
    work: Any = ray.remote(call_often)
    running = {
        address: [
            work.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(limiter, f"{folder}/{address}-{worker}")
            for worker in range(2)
        ]
        for node, address in alive_nodes().items()
    }
    return {address: [ending(task) for task in tasks] for address, tasks in running.items()}


def ending(task: Any) -> str:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(task)
    except RayError as error:
        return type(error).__name__


def call_often(limiter: Any, path: str) -> str:
    """Call in two threads; when each call asked and returned is in the file before the next."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def call(_: int) -> None:
        for _ in range(CALLS):
            asked_ns = boottime_ns()
            limiter.acquire()
            os.write(out, b"%d %d\n" % (asked_ns, boottime_ns()))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(call, range(2)))
    limiter.close()
    return "done"


def calls_in(folder: Path) -> list[tuple[int, int]]:
    """When each call asked and returned."""
    lines = [line.split() for path in folder.iterdir() for line in path.read_text().splitlines()]
    return [(int(asked_ns), int(passed_ns)) for asked_ns, passed_ns in lines]


def most_beyond(calls: list[tuple[int, int]]) -> Fraction:
    """Calls whole in a window less rate * its length, the most over all windows."""
    minute_ns, per_minute = 60 * SECOND_NS, int(RATE.per_minute)
    most = 0  # in parts of a call, to stay whole
    by_return = sorted(calls, key=lambda call: call[1])
    for start_ns, _ in calls:
        passed = 0
        for asked_ns, passed_ns in by_return:
            if asked_ns >= start_ns:
                passed += minute_ns
                most = max(most, passed - per_minute * (passed_ns - start_ns))
    return Fraction(most, minute_ns)


def test_all_nodes_together_keep_one_rate(cluster: Cluster, tmp_path: Path):
    ended = cluster.run("hammer", "together", str(tmp_path))
    assert ended == {address: ["done", "done"] for address in cluster.addresses}
    calls = calls_in(tmp_path)
    assert len(calls) == 4 * CALLS * len(ended)
    assert most_beyond(calls) <= RATE.burst


def test_when_a_node_is_killed_the_others_go_on_within_the_rate(cluster: Cluster, tmp_path: Path):
    doomed = cluster.add_node()
    with cluster.driver("hammer", "killed", str(tmp_path)) as process:
        while len(calls_in(tmp_path)) < CALLS:  # each of them has twice as many
            assert process.poll() is None
            time.sleep(0.05)
        cluster.kill_node(doomed)
        ended = result_of(process)
    others = {address: ["done", "done"] for address in cluster.addresses}
    assert {address: ended.pop(address) for address in others} == others
    (lost,) = ended.values()
    assert "done" not in lost
    calls = calls_in(tmp_path)
    assert 4 * CALLS * len(others) <= len(calls) < 4 * CALLS * (len(others) + 1)
    assert most_beyond(calls) <= RATE.burst


def test_a_folder_that_all_nodes_see_has_no_lock_problems(cluster: Cluster):
    assert cluster.run("problems_of", str(cluster.common)) == []
    assert list(cluster.common.iterdir()) == []


def test_a_folder_that_is_another_on_one_node_names_both_nodes(cluster: Cluster):
    problems = cluster.run("problems_of", str(cluster.torn))
    *others, odd = cluster.addresses
    assert problems
    for problem in problems:  # one for each of the others where the odd one was tried first
        assert odd in problem and any(other in problem for other in others)
        assert f"both nodes hold the lock at once on {cluster.torn}" in problem
        assert "backend=ray, or a folder whose locks reach all nodes" in problem


def test_a_run_on_several_nodes_settles_for_the_actor(cluster: Cluster):
    assert cluster.run("settled_with", "auto", str(cluster.torn))["backend"] == "ray"


def test_a_file_on_several_nodes_is_taken_where_its_locks_reach_them(cluster: Cluster):
    settings = cluster.run("settled_with", "file", str(cluster.common))
    assert (settings["backend"], settings["across_nodes"]) == ("file", True)


def test_a_file_on_several_nodes_is_refused_where_its_locks_do_not(cluster: Cluster):
    error = cluster.run("settled_with", "file", str(cluster.torn))
    assert "mixed.rate_limit.backend=file does not reach all nodes" in error
    assert str(cluster.torn) in error
