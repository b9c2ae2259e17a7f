"""The tool server as a process: readiness, signals, and the end of its launcher."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil

TIMEOUT_S = 30

SERVE = """
import sys
from pathlib import Path
from agent_loop.tools.server import ServerSettings, serve
serve(ServerSettings(port=0), ready_file=Path(sys.argv[1]))
"""

LAUNCH = """
import os, subprocess, sys
from pathlib import Path
from cluster.processes import start
log = Path(sys.argv[2]).with_name("log")
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
child = start(command, log=log, environ=os.environ, run_dir=log.parent)
while "listening" not in log.read_text():
    assert child.poll() is None, log.read_text()
print("listening", flush=True)
child.wait()
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    """A Python process, returned once a server in it or under it says that it listens."""
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert "listening" in process.stdout.readline()
    return process


def test_a_server_says_where_it_listens_and_ends_at_sigterm(tmp_path):
    ready = tmp_path / "ready.json"
    with start(SERVE, str(ready)) as process:
        told = json.loads(ready.read_text())
        with urllib.request.urlopen(f"{told['url']}/health", timeout=TIMEOUT_S) as answer:
            assert json.load(answer)["status"] == "ok"
        assert told["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_killed_launcher_leaves_no_server(tmp_path):
    ready = tmp_path / "ready.json"
    with start(LAUNCH, SERVE, str(ready)) as launcher:
        server = psutil.Process(json.loads(ready.read_text())["pid"])
        assert server.pid != launcher.pid
        launcher.kill()
        try:
            server.wait(TIMEOUT_S)
        finally:
            if server.is_running():
                server.kill()
