"""The port of the dashboard of a run's own Ray: two runs that want one port both start."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from omegaconf import OmegaConf
from ray._private import services

from agent_loop.training.main import let_ray_choose_a_port
from config.environment import DASHBOARD_PORT

HOST = "127.0.0.1"


def started(port: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The options with which Ray starts its dashboard for a run that wants the port."""
    ray_init = OmegaConf.create({"include_dashboard": True, "dashboard_port": port})
    let_ray_choose_a_port(ray_init)
    found: list[str] = []

    def start(command: list[str], *_: Any, **__: Any) -> Any:
        found.extend(command)
        raise InterruptedError

    python = "_build_python_executable_command_memory_profileable"
    monkeypatch.setattr(services, "start_ray_process", start)
    monkeypatch.setattr(services, python, lambda *_, **__: [])
    with pytest.raises(InterruptedError):
        services.start_api_server(
            True, True, HOST, "", "", HOST, "", "", "", port=ray_init.get("dashboard_port"),
            max_bytes=0, backup_count=0,
        )  # fmt: skip
    return dict(each[2:].split("=", 1) for each in found if each.startswith("--"))


def test_of_two_starts_that_want_one_port_the_second_has_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for port in (DASHBOARD_PORT, DASHBOARD_PORT):  # Ray binds the next if the first has this one
        options = started(port, monkeypatch)
        assert options["port"] == str(DASHBOARD_PORT) and int(options["port-retries"]) > 0
    with socket.create_server((HOST, 0)) as first:
        named = first.getsockname()[1]
        options = started(named, monkeypatch)
        assert options["port"] != str(named) and int(options["port-retries"]) > 0
        assert f"dashboard_port={named} was taken" in capsys.readouterr().out
    options = started(named, monkeypatch)
    assert (options["port"], options["port-retries"]) == (str(named), "0")
    assert started(0, monkeypatch)["port"] == "0"


PROGRAM = """
import sys, ray
from omegaconf import OmegaConf
from agent_loop.training.main import let_ray_choose_a_port

settings = OmegaConf.create({"include_dashboard": True, "dashboard_port": 8265})
print("ready", flush=True)
sys.stdin.readline()
let_ray_choose_a_port(settings)
ray_of_this = ray.init("local", num_cpus=1, logging_level="ERROR", log_to_driver=False, **settings)
print(ray_of_this.dashboard_url, flush=True)
sys.stdin.readline()
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_that_start_at_once_have_a_dashboard_each() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    pipes = [SimpleNamespace(ask=run.stdin, hear=run.stdout) for run in runs]

    def next_lines() -> list[str]:
        said = [pipe.hear.readline().strip() for pipe in pipes]
        for pipe in pipes:
            pipe.ask.write("\n")
            pipe.ask.flush()
        return said

    assert next_lines() == ["ready", "ready"]
    urls = next_lines()
    for run in runs:
        run.communicate(timeout=120)
    assert len(set(urls)) == 2 and all(urls)
