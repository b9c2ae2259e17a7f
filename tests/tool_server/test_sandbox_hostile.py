"""Hostile programs on each rung, judged from outside; and the judge, who finds harm to the host."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import pytest_asyncio

from tests.tool_server.hostile import PROGRAMS, Hostile
from tests.tool_server.hostile.judge import Host, Judge
from tests.tool_server.hostile.program import LIMITS
from tests.tool_server.hostile.rungs import (
    RUNGS,
    JudgedRung,
    RungUnavailable,
    judged,
    missing,
    sandbox_of,
)
from tool_server.sandbox import Sandbox, choose_sandbox
from tool_server.sandbox.landlock import LandlockSandbox
from tool_server.sandbox.zygote import Launch

pytestmark = pytest.mark.sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A judge, and what he judges by."""

    sandbox: Sandbox
    host: Host
    judge: Judge


@pytest.fixture(scope="module")
def judge_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], JudgedRung]]:
    """Rung -> its judge, which starts with the first program of the rung or of its neighbour."""
    names: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_is_contained":
            params = cast("Mapping[str, Any]", item.callspec.params)
            names.setdefault(params["rung"], []).append(params["hostile"].name)
    started: dict[str, JudgedRung] = {}
    with ExitStack() as stack:

        def judge(rung: str) -> JudgedRung:
            for each in next(pair for pair in (RUNGS[:2], RUNGS[2:]) if rung in pair):
                if each in names and each not in started and not missing(each):
                    started[each] = stack.enter_context(judged(each, names[each]))
            return started[rung]

        yield judge


@pytest.mark.parametrize(
    ("rung", "hostile"),
    [
        pytest.param(
            rung,
            hostile,
            id=f"{rung}-{hostile.name}",
            marks=[
                pytest.mark.skipif(bool(missing(rung)), reason=missing(rung)),
                *([pytest.mark.nightly] if rung != RUNGS[0] else []),
            ],
        )
        for rung in RUNGS
        for hostile in PROGRAMS
        if sandbox_of(rung) in hostile.rungs
    ],
)
def test_is_contained(judge_of: Callable[[str], JudgedRung], rung: str, hostile: Hostile):
    try:
        verdict = judge_of(rung).verdict(hostile.name)
    except RungUnavailable as error:
        if os.geteuid() == 0:  # root can set up all four
            raise
        pytest.skip(str(error))
    assert verdict["findings"] == []


def test_the_suite_is_broad():
    assert len({hostile.name for hostile in PROGRAMS}) == len(PROGRAMS) >= 150


def test_two_runs_draw_different_numbers_from_numpy():
    sandbox = choose_sandbox(packages=("numpy", "pandas"))  # pandas imports numpy.random
    code = "import numpy, random\nprint(numpy.random.rand(), random.random())"
    try:
        first, second = (asyncio.run(sandbox.run_python(code)).stdout.split() for _ in range(2))
    finally:
        sandbox.close()
    assert first[0] != second[0] and first[1] != second[1]


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
