"""The tool server as a process: readiness, signals, and the end of its launcher."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tool_server.sandbox import PackageUnusable
from tool_server.wire.tokens import token_for
from verl_mixed.cli import main

pytestmark = pytest.mark.sandbox  # the servers have one

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60

SERVE = """
import sys
from pathlib import Path
from tool_server.app import serve
from tool_server.settings import ServerSettings
serve(ServerSettings(port=0), ready_file=Path(sys.argv[1]))
"""

LAUNCH = """
import os, subprocess, sys
from pathlib import Path
from verl_mixed.launch.processes import start
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
        cwd=ROOT,
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


JSON = {"Content-Type": "application/json"}
SLOW = {"code": "while True: pass", "run_timeout": 100}


@contextlib.contextmanager
def serve_tools(*options: str, **environ: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """`verl-mixed serve-tools` on a free port, and its URL; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "verl_mixed", "serve-tools", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environ,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "listening" in line, process.communicate()
            yield process, line.split("url=")[1].split()[0]
        finally:
            process.kill()


async def until(true: Callable[[], Any]) -> None:
    """Ask again and again, at once: the test's own time limit ends it."""
    while not await true():
        pass


async def in_flight(session: aiohttp.ClientSession, tool: str) -> int:
    text = await (await session.get("/metrics")).text()
    lines = [line for line in text.splitlines() if line.startswith("tool_in_flight{")]
    return sum(int(float(line.split()[1])) for line in lines if f'"{tool}"' in line)


async def drains(session: aiohttp.ClientSession) -> bool:
    answer = await session.get("/health")
    return answer.status == 503 and (await answer.json())["draining"]


def session_of(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))


async def ask(session: aiohttp.ClientSession, expression: str) -> tuple[int, dict[str, Any]]:
    async with session.post("/calculate", json={"expression": expression}) as answer:
        return answer.status, await answer.json()


async def run_slow(session: aiohttp.ClientSession) -> "asyncio.Task[tuple[int, Any]]":
    """A program that runs."""

    async def post() -> tuple[int, Any]:
        async with session.post("/run_code", json=SLOW) as answer:
            return answer.status, await answer.json()

    call = asyncio.create_task(post())
    await until(lambda: in_flight(session, "run_code"))
    return call


async def test_at_sigterm_all_who_were_accepted_are_answered_and_who_comes_late_is_503():
    release = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"expression": '
        await release.wait()
        yield b'"6*7"}'

    with serve_tools("--no-token", "--sandbox-workers", "1") as (process, url):
        async with session_of(url) as session:
            held = asyncio.ensure_future(session.post("/calculate", data=slow_body(), headers=JSON))
            calls = [asyncio.ensure_future(ask(session, f"2x={2 * n}")) for n in range(100)]

            async def all_accepted() -> bool:
                done = sum(call.done() for call in calls)
                return await in_flight(session, "calculate") + done >= len(calls) + 1

            await until(all_accepted)
            process.send_signal(signal.SIGTERM)
            await until(lambda: drains(session))
            late = await session.post("/calculate", json={"expression": "1"})
            assert late.status == 503 and int(late.headers["Retry-After"]) > 0
            assert "stops" in (await late.json())["error"]
            async with session_of(url) as stranger:
                assert (await ask(stranger, "1"))[0] == 503
            release.set()
            assert await (await held).json() == {"result": "42"}
            answers = await asyncio.gather(*calls)
            assert answers == [(200, {"result": f"x = {n}"}) for n in range(100)]
        assert process.wait(TIMEOUT_S) == 0


async def test_a_second_sigterm_does_not_wait():
    with serve_tools("--no-token") as (process, url):
        async with session_of(url) as session:
            call = await run_slow(session)
            process.send_signal(signal.SIGTERM)
            await until(lambda: drains(session))
            assert not call.done()
            process.send_signal(signal.SIGTERM)
            assert (await call)[0] == 503
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("options", "environ", "token", "stranger"),
    [
        ([], {}, None, 401),  # the user's own
        ([], {"TOOL_SERVER_TOKEN": "secret"}, "secret", 401),
        (["--token-file", "TOKEN"], {}, "from-file", 401),
        (["--no-token"], {"TOOL_SERVER_TOKEN": "secret"}, "", 200),
        (["--host", "0.0.0.0"], {}, None, 401),
    ],
)
async def test_a_stranger_is_served_only_by_a_server_without_token(
    options: list[str],
    environ: dict[str, str],
    token: str | None,
    stranger: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("TOOL_SERVER_TOKEN", raising=False)
    (tmp_path / "token").write_text("from-file\n")
    words = [str(tmp_path / "token") if word == "TOKEN" else word for word in options]
    home = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    with serve_tools(*words, **environ, **home) as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        async with session_of(url) as session:
            assert (await ask(session, "1"))[0] == stranger
            given = token_for(url, home) if token is None else token
            session.headers["Authorization"] = f"Bearer {given}"
            assert (await ask(session, "1"))[0] == 200
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert ("everybody who reaches" in stderr) == (stranger == 200)
    assert not given or given not in stderr


def test_a_package_that_programs_cannot_import_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def choose(*_: Any, packages: Sequence[str], **__: Any) -> None:
        raise PackageUnusable(f"packages={packages[0]!r}: ImportError: no module named 'six'")

    monkeypatch.setattr("tool_server.run_code.choose_sandbox", choose)
    assert main(["serve-tools", "--no-token", "--port", "0", "--sandbox-packages", "pandas"]) == 2
    said = capsys.readouterr()
    assert "pandas" in said.err and "ImportError" in said.err and "listening" not in said.out


def test_a_token_file_that_is_not_there_is_a_usage_error():
    command = [sys.executable, "-m", "verl_mixed", "serve-tools", "--token-file", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "--token-file /nowhere" in done.stderr
