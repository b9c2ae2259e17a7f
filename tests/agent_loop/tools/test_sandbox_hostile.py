"""Hostile programs on each rung, judged from outside; and the judge himself, who can find fault."""

import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from agent_loop.tools.sandbox import Sandbox, SandboxUnavailable, choose_sandbox
from agent_loop.tools.sandbox.landlock import LandlockSandbox
from agent_loop.tools.sandbox.zygote import Launch
from tests.agent_loop.tools.hostile import PROGRAMS, Hostile
from tests.agent_loop.tools.hostile.judge import Host, Judge
from tests.agent_loop.tools.hostile.program import LIMITS

pytestmark = pytest.mark.sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A judge, and what he judges by."""

    sandbox: Sandbox
    host: Host
    judge: Judge


@pytest.fixture(scope="module")
def sandbox_and_host(request: pytest.FixtureRequest) -> Iterator[tuple[Sandbox, Host]]:
    with Host() as host:
        try:
            sandbox = choose_sandbox(request.param)
        except SandboxUnavailable as error:
            if "got out" in str(error):
                raise
            pytest.skip(f"not on this machine: {error}")
        yield sandbox, host
        sandbox.close()


_JUDGES: dict[int, Judge] = {}


@pytest_asyncio.fixture
async def bench(sandbox_and_host: tuple[Sandbox, Host]) -> Bench:
    sandbox, host = sandbox_and_host
    if id(host) not in _JUDGES:
        _JUDGES[id(host)] = await Judge(sandbox, host).begin()
    return Bench(sandbox=sandbox, host=host, judge=_JUDGES[id(host)])


@pytest.mark.parametrize(
    ("sandbox_and_host", "hostile"),
    [
        pytest.param(rung, hostile, id=f"{rung}-{hostile.name}")
        for rung in ("bubblewrap", "landlock")
        for hostile in PROGRAMS
        if rung in hostile.rungs
    ],
    indirect=["sandbox_and_host"],
)
async def test_is_contained(bench: Bench, hostile: Hostile):
    verdict = await bench.judge.judge(hostile)
    assert verdict.findings == []


def test_the_suite_is_broad():
    assert len({hostile.name for hostile in PROGRAMS}) == len(PROGRAMS) >= 45


class OpenSandbox(LandlockSandbox):
    """One that isolates nothing."""

    def launch(self, open_fds: ExitStack) -> Launch:
        launch = super().launch(open_fds)
        return replace(
            launch,
            plan={**launch.plan, "landlock": False, "filter": ""},
            env={**launch.env, "HOSTILE_SECRET": os.environ["HOSTILE_SECRET"]},
        )


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Bench]:
    with Host() as host:
        sandbox = OpenSandbox()
        try:
            judge = await Judge(sandbox, host).begin()
            yield Bench(sandbox=sandbox, host=host, judge=judge)
        finally:
            sandbox.close()


GENTLE = {
    "absolute paths": "REACHED /etc/passwd",
    "the host's file by a link": "REACHED by a link",
    "another program reads for it": "REACHED by a shell",
    "environment of the server": "REACHED the secret",
    "tcp": "contact over tcp",
    "udp": "contact over udp",
    "unix and abstract sockets": "contact over abstract",
    "messages of the host": "REACHED a message",
    "priorities of others": "the host's process has changed",
}
"""What harms no host that lies open, and what is seen of it there."""


@pytest.mark.parametrize("name", GENTLE)
async def test_without_isolation_it_is_flagged(opened: Bench, name: str):
    hostile = next(each for each in PROGRAMS if each.name == name)
    findings = (await opened.judge.judge(hostile)).findings
    assert any(GENTLE[name] in finding for finding in findings), findings


def _write(host: Host) -> None:
    host.file.write_text("changed")


def _stop(host: Host) -> None:
    os.kill(host.canary.pid, signal.SIGSTOP)


def _kill(host: Host) -> None:
    os.kill(host.canary.pid, signal.SIGKILL)
    host.canary.wait()


def _connect(host: Host) -> None:
    socket.create_connection(("127.0.0.1", host.port)).close()


def _litter(host: Host) -> None:
    tempfile.mkdtemp()


def _mark(host: Host) -> None:
    (host.folder / host.mark).touch()


def _hold(host: Host) -> None:
    os.dup(0)


def _leave(host: Host) -> None:
    os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "600"])


@pytest.mark.parametrize(
    ("harm", "finding"),
    [
        (_write, "the host's file has changed"),
        (_stop, "the host's process has changed"),
        (_kill, "the host's process has changed"),
        (_connect, "contact over tcp"),
        (_litter, "left "),
        (_mark, "left "),
        (_hold, "left 1 descriptors"),
        (_leave, "stray processes: 4 processes where 3 were"),
    ],
)
async def test_harm_to_the_host_is_found(opened: Bench, harm: Callable[[Host], None], finding: str):
    harm(opened.host)
    harmless = Hostile(name="nothing", category="none", code="", limits=LIMITS)
    findings = (await opened.judge.judge(harmless)).findings
    assert any(each.startswith(finding) for each in findings), findings
