"""The run's own tool server: started again at its address when it ends, up to a limit."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from config.child import command as child_command
from config.lookup import at
from config.schema import TOOL_CONFIG
from tests.verl_mixed.conftest import RunEnviron
from tests.verl_mixed.launch.test_launch import wait_until
from verl_mixed.launch import tool_server
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.plan import make_plan
from verl_mixed.launch.server_process import ServerProcess
from verl_mixed.launch.tool_server import ToolServer

pytestmark = pytest.mark.slow

HEALTH = b'{"sandbox": "bubblewrap", "passages": 0}'

SERVER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "args").open("a") as file:
    file.write(" ".join(sys.argv[2:]) + "\\n")
if not (folder / "silent").exists():
    draft = folder / "draft"
    draft.write_text(json.dumps({"url": "http://127.0.0.1:4711", "pid": os.getpid()}))
    draft.replace(sys.argv[3])
print(f"token={os.environ['TOOL_SERVER_TOKEN']}", flush=True)
time.sleep(600)
"""
"""A stand-in that listens nowhere."""


@pytest.fixture
def own(run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts a `ToolServer` of the stand-in, and returns it, its processes and what it says."""
    children: list[Popen[bytes]] = []

    def start(*overrides: str) -> tuple[ToolServer, list[Popen[bytes]], list[str]]:
        plan = make_plan(list(overrides), run_environ | {"TOOL_SERVER_URL": ""})
        plan.folder.path.mkdir(parents=True)
        command = [sys.executable, "-c", SERVER, str(plan.folder.path)]
        monkeypatch.setattr(tool_server, "_command", lambda plan: command)
        monkeypatch.setattr(tool_server, "read_health", lambda *_, **__: HEALTH)
        said: list[str] = []
        server = ToolServer(plan, {**os.environ, "TOOL_SERVER_TOKEN": "t0"}, children, said.append)
        server.start()
        assert at(plan.config, f"{TOOL_CONFIG}.server_url") == "http://127.0.0.1:4711"
        return server, children, said

    yield start
    for child in children:
        child.kill()
        child.wait()


def kill(child: "Popen[bytes]") -> None:
    child.kill()
    child.wait()


def test_a_server_that_ends_is_started_again_with_its_port_settings_and_token(
    own: Callable[..., Any],
) -> None:
    server, children, said = own()
    folder = Path("runs/trial").absolute()
    (first,) = children
    server.keep_up()
    assert children == [first]

    kill(first)
    server.keep_up()

    (second,) = children
    assert second is not first and second.poll() is None
    wait_until((folder / "tool_server.json").exists)
    server.keep_up()
    assert children == [second]
    before, after = (folder / "args").read_text().splitlines()
    assert after == f"{before} --port 4711"
    words = (
        "the tool server at http://127.0.0.1:4711 ended: killed by SIGKILL (out of memory?); "
        "started again, 1 of 3 times"
    )
    assert said[1:] == [f"WARNING {words}; its log is {folder / 'tool_server.log'}"]
    wait_until(lambda: (folder / "tool_server.log").read_text() == f"token=t0\n{words}\ntoken=t0\n")


@pytest.mark.parametrize(
    ("search", "words"),
    [("index", "7 passages"), ("serper https://x/search", "search by serper https://x/search")],
)
def test_the_start_says_what_answers_searches(
    own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, search: str, words: str
) -> None:
    health = json.dumps({"sandbox": "bubblewrap", "search": search, "passages": 7}).encode()
    monkeypatch.setattr(sys.modules[__name__], "HEALTH", health)
    _, _, said = own()
    assert said == [f"tools        http://127.0.0.1:4711 (sandbox bubblewrap, {words})"]


def test_after_the_last_restart_the_run_ends(own: Callable[..., Any]) -> None:
    server, children, said = own("mixed.tool_server={restarts: 2}")
    for count in (1, 2):
        kill(children[0])
        server.keep_up()
        assert f"{count} of 2 times" in said[-1]
    kill(children[0])

    with pytest.raises(RunFailed) as failed:
        server.keep_up()

    assert "it was started again 2 times (mixed.tool_server.restarts=2); its log is" in str(
        failed.value
    )


def test_a_server_that_does_not_listen_again_counts_as_ended(
    own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, children, said = own("mixed.tool_server={restarts: 2}")
    Path("runs/trial/silent").touch()
    monkeypatch.setattr(ServerProcess, "start_s", 0.0)
    kill(children[0])
    server.keep_up()
    (silent,) = children

    server.keep_up()

    assert "ended: it did not listen within 0 s; started again, 2 of 2 times" in said[-1]
    assert silent.wait() == -signal.SIGKILL and children != [silent]


def test_a_run_on_a_cluster_may_have_a_server_on_each_node(run_environ: RunEnviron) -> None:
    words = ["mixed.tool_server={per_node: true, restarts: 2, sandbox_workers: 7}"]
    environ = run_environ | {"TOOL_SERVER_URL": ""}
    (problem,) = [each for each in make_plan(words, environ).problems() if "per_node" in each]
    assert problem.startswith("mixed.tool_server.per_node=true: the run joins no Ray cluster")

    plan = make_plan(words, environ | {"MASTER_IP": "10.0.0.1", "WORKER_NODES": "10.0.0.2"})

    assert not [each for each in plan.problems(machine=False) if "per_node" in each]
    *program, spec = tool_server._command(plan)
    assert program == child_command("verl_mixed.launch.node_tool_servers")
    asked = json.loads(spec)
    assert (asked["address"], asked["restarts"]) == ("10.0.0.1:6379", 2)
    options = asked["server"]
    settings = json.loads(options[options.index("--settings") + 1])
    assert settings == {"port": 0, "sandbox_workers": 7}
    assert "--host" not in options
