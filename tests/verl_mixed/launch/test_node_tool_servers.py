"""A tool server on each node of a Ray cluster of two network namespaces."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.rate_limit.test_ray_cluster import HEAD, ROOT, Cluster
from tests.verl_mixed.launch.test_launch import wait_until
from verl_mixed.launch.node_tool_servers import command_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ASK = """
import json, os, sys
from verl_mixed.checks.machine.services import read_health
answers = {}
for url in sys.argv[1].split(","):
    try:
        answers[url] = "tools" in json.loads(read_health(url, os.environ, timeout_s=10))
    except OSError:
        answers[url] = None
print(json.dumps(answers))
"""


class Servers:
    """The process on the head that keeps a tool server on each node."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.folder = cluster, cluster.common
        options = ["--settings", json.dumps({"port": 0, "sandbox": "auto"})]
        self._ready = self.folder / "tool_server.json"
        command = command_of(options, HEAD, self.folder, restarts=1)
        self.environ = cluster._env | {"TOOL_SERVER_TOKEN": "t0"}
        with (self.folder / "tool_server.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*self._on_head(), *command, "--ready-file", str(self._ready)],
                env=self.environ,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: self._ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        self.url = json.loads(self._ready.read_text())["url"]

    def _on_head(self) -> list[str]:
        return ["ip", "netns", "exec", self._cluster._namespaces[0]]

    @property
    def log(self) -> str:
        return (self.folder / "tool_server.log").read_text()

    def pid(self, address: str) -> int:
        ready = self.folder / f"tool_server.{address}.json"
        return json.loads(ready.read_text())["pid"] if ready.exists() else 0

    def ask(self, token: str = "t0") -> dict[str, bool | None]:
        """URL -> whether the server takes the token; None if nothing listens there."""
        asked = subprocess.run(
            [*self._on_head(), sys.executable, "-c", ASK, self.url],
            env=self.environ | {"TOOL_SERVER_TOKEN": token},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(asked.stdout)


@pytest.fixture
def servers() -> Generator[Servers]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip`, to make network namespaces")
    folder = Path(tempfile.mkdtemp(prefix="ts", dir="/tmp"))  # Ray's sockets need a short path
    cluster: Any = None
    try:
        try:
            cluster = Cluster(folder)
            cluster.add_node()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        cluster.run("addresses")  # the head is there
        cluster.add_node()
        cluster.run("addresses")
        started = Servers(cluster)
        yield started
        started.process.kill()
        started.process.wait()
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(folder)


def test_each_node_has_a_server_which_comes_back_and_ends_with_the_run(servers: Servers) -> None:
    first, second = servers.url.split(",")
    assert sorted([first.rpartition(":")[0], second.rpartition(":")[0]]) == [
        "http://10.77.0.1",
        "http://10.77.0.2",
    ]
    assert servers.ask() == {first: True, second: True}
    assert servers.ask("another") == {first: False, second: False}

    killed = servers.pid("10.77.0.2")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: servers.pid("10.77.0.2") not in (0, killed))
    assert servers.ask() == {first: True, second: True}
    assert "ended: killed by SIGKILL (out of memory?); started again, 1 of 1 times" in servers.log
    left = [servers.pid(f"10.77.0.{number}") for number in (1, 2)]

    os.kill(left[1], signal.SIGKILL)
    assert servers.process.wait(60) == 1
    assert "(mixed.tool_server.restarts=1)" in servers.log
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    assert servers.ask() == {first: None, second: None}


def test_a_lost_node_ends_no_other_server_and_sigterm_ends_all(servers: Servers) -> None:
    here = servers.pid("10.77.0.1")
    servers._cluster.kill_node(2)
    wait_until(lambda: "the tool server at http://10.77.0.2:" in servers.log)
    assert " is lost: Actor" in servers.log and "started again" not in servers.log
    assert sorted(servers.ask().values(), key=str) == [None, True]

    servers.process.terminate()

    servers.process.wait(60)
    wait_until(lambda: not Path(f"/proc/{here}").exists())
