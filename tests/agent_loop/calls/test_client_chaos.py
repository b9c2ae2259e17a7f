"""The tool client, a proxy that does to its bytes what networks do, and a real tool server."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.calls.client import ToolClient
from tests.agent_loop.calls.test_client_servers import servers_away
from tests.fakes.chaos_proxy import TcpChaosProxy
from tool_server.wire.protocol import (
    ToolCall,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)

pytestmark = pytest.mark.sandbox  # the servers have one

SERVER = """
import asyncio, json, os, sys
from aiohttp import web
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings

executed = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@web.middleware
async def record(request, handler):
    if request.method == "POST":
        os.write(executed, json.dumps(await request.json()).encode() + b"\\n")
    return await handler(request)

async def serve():
    app = create_app(ServerSettings())
    app.middlewares.append(record)
    runner = app_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
"""The project's tool server, with a note of all that it executes."""


class RealServer:
    """The tool server as a process that can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._executed = folder / "executed"
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, str(self.port), str(self._executed)]
        root = Path(__file__).parents[3]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def executions(self) -> Counter[str]:
        """Request -> how often it was executed."""
        return Counter(self._executed.read_text().splitlines() if self._executed.exists() else ())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RealServer]:
    server = RealServer(tmp_path)
    server.start()
    yield server
    server.kill()


class Clock:
    """Jumps while somebody waits, so a pause costs nothing."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Limiter:
    """Lets all pass and notes what it is told."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        return 0.0

    async def penalise_async(self, retry_after_s: float = 0.0) -> None:
        self.pauses.append(retry_after_s)


def client(*urls: str, **settings: Any) -> ToolClient:
    clock = Clock()
    given = {"sleep": clock.sleep, "clock": clock, "timeout_s": 1e6, "rng": random.Random(0)}
    return ToolClient(urls, **{"limiter": None, "max_retries": 15} | given | settings)


REAL = {"sleep": asyncio.sleep, "clock": time.monotonic}


@asynccontextmanager
async def proxy(server: RealServer, fault_of: Callable[[], str]) -> AsyncIterator[TcpChaosProxy]:
    async with TcpChaosProxy(server.port, fault_of).serving() as serving:
        yield serving


def some_of(*faults: str, share: float = 0.4, seed: int = 0) -> Callable[[], str]:
    chance = random.Random(seed)
    return lambda: chance.choice(faults) if chance.random() < share else "pass"


def sum_of(number: int, idempotent: bool) -> ToolCall:
    payload = {"expression": f"{number}+{int(idempotent)}"}
    return ToolCall(tool="calculate", payload=payload, idempotent=idempotent)


CALLS = [sum_of(number, idempotent) for number in range(60) for idempotent in (True, False)]


async def outcomes_of(tools: ToolClient, calls: list[ToolCall] = CALLS) -> list[ToolResult | None]:
    """What came of each, None for a fault of the infrastructure; a call without is an error."""

    async def outcome_of(call: ToolCall) -> ToolResult | None:
        try:
            result = await tools.call(call)
        except ToolUnavailable:
            return None
        assert result.body == {"result": str(eval(call.payload["expression"]))}
        return result

    return await asyncio.gather(*map(outcome_of, calls))


def check_executions(
    server: RealServer, results: list[ToolResult | None], calls: list[ToolCall] = CALLS
) -> None:
    """Whoever has a result was executed, and nobody twice who must not be."""
    executions = server.executions()
    for call, result in zip(calls, results, strict=True):
        times = executions[f'{{"expression": "{call.payload["expression"]}"}}']
        assert times >= (result is not None)
        if not call.idempotent:
            assert times <= 1


BEFORE_IT_IS_HEARD = ["refused 429", "refused 429 0", "refused 503", "refused 503 0"]
MAYBE_EXECUTED = [
    "reset at once",
    "reset mid-body",
    "cut json",
    "html",
    "status 429",
    "status 503",
    "status 500",
    "status 502",
    "status 500 0",
]


@pytest.mark.parametrize("fault", BEFORE_IT_IS_HEARD + MAYBE_EXECUTED + ["plain"])
async def test_every_call_has_an_outcome_and_none_is_executed_twice_that_must_not_be(server, fault):
    async with proxy(server, some_of(fault)) as between, client(between.url) as tools:
        results = await outcomes_of(tools)
    assert between.did[fault] > 10
    check_executions(server, results)
    idempotent, once = results[::2], results[1::2]
    assert None not in idempotent  # sixteen attempts at 40 % of faults
    assert (None in once) == (fault in MAYBE_EXECUTED)


@pytest.mark.parametrize("fault", ["no first byte", "half a body"])
async def test_an_answer_that_does_not_come_costs_the_deadline(server, fault):
    async with (
        proxy(server, some_of(fault, share=1.0)) as between,
        client(between.url, timeout_s=3.0, **REAL) as tools,
    ):
        calls = [tools.call(call) for call in CALLS[:12]]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ToolTimeout}
    assert between.did[fault] == 12
    assert all(times == 1 for times in server.executions().values())


async def test_all_faults_together(server):
    faults = [*BEFORE_IT_IS_HEARD, *MAYBE_EXECUTED, "plain", "no first byte", "half a body"]
    async with (
        proxy(server, some_of(*faults, share=0.7)) as between,
        client(between.url, timeout_s=2.0, **REAL) as tools,
    ):
        results = await outcomes_of(tools)
    assert set(faults) < set(between.did)
    assert len(results) > results.count(None) > 0
    check_executions(server, results)


@pytest.mark.parametrize(
    ("fault", "pause_s"),
    [
        ("status 429", 0.0),
        ("status 503", 0.0),
        ("status 429 3", 3.0),
        ("status 503 3", 3.0),
        ("status 502 3", 3.0),
    ],
)
async def test_the_limiter_hears_a_storm_and_calls_pass_after_it(server, fault, pause_s):
    storm = [fault] * 3
    limiter = Limiter()
    async with (
        proxy(server, lambda: storm.pop() if storm else "pass") as between,
        client(between.url, limiter=limiter) as tools,
    ):
        assert None not in await outcomes_of(tools, CALLS[::2])
    said = fault != "status 502"
    assert limiter.pauses == ([pause_s] * 3 if said or pause_s else [])


@asynccontextmanager
async def silent(port: int) -> AsyncIterator[asyncio.Event]:
    """Takes connections at a port and never answers; the event is set at the first one."""
    taken, over = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.set()
        await over.wait()  # also of a connection that was taken while the port is closed
        writer.transport.abort()

    async with await asyncio.start_server(hold, "127.0.0.1", port):
        yield taken
        over.set()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - counts set no event
        await asyncio.sleep(0)


@pytest.mark.parametrize("away", ["closed", "silent", "502"])
async def test_the_restart_of_a_server_under_a_hundred_callers_loses_no_call(server, away):
    faults = ["pass"]
    calls = [sum_of(number, idempotent=True) for number in range(2000)]
    left = iter(calls)

    async def caller() -> list[ToolResult | None]:
        return [result for call in left for result in await outcomes_of(tools, [call])]

    async with (
        proxy(server, lambda: faults[0]) as between,
        client(between.url if away == "502" else server.url, timeout_s=120.0, **REAL) as tools,
    ):
        load = [asyncio.ensure_future(caller()) for _ in range(100)]
        await until(lambda: server.executions().total() > 300)
        faults[0] = "status 502"
        server.kill()
        if away == "silent":
            async with silent(server.port) as taken:
                await taken.wait()
        await until(lambda: servers_away(tools) == 1)
        await asyncio.to_thread(server.start)
        faults[0] = "pass"
        results = [result for each in await asyncio.gather(*load) for result in each]
    assert len(results) == len(calls) and None not in results


async def test_a_server_that_never_comes_back_ends_each_call_once_at_its_deadline(server):
    async with client(server.url, timeout_s=1.0, **REAL) as tools:
        server.kill()
        outcomes = await asyncio.gather(*map(tools.call, CALLS), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ToolTimeout}
    assert all(str(outcome).count("Connect call failed") == 1 for outcome in outcomes)


async def test_of_two_servers_one_may_be_killed_and_no_call_is_lost(server, tmp_path):
    (tmp_path / "other").mkdir()
    other = RealServer(tmp_path / "other")
    other.start()
    calls = [sum_of(number, idempotent=True) for number in range(300)]
    try:
        async with client(server.url, other.url) as tools:
            load = asyncio.ensure_future(outcomes_of(tools, calls))
            await until(lambda: server.executions().total() > 50)
            server.kill()
            assert None not in await load
            before = server.executions().total()
            server.start()
            used, first = before, 300
            while used <= before + 20:  # it is used again; the faster server gets the more calls
                more = [sum_of(number, idempotent=True) for number in range(first, first + 200)]
                assert None not in await outcomes_of(tools, more)
                used, first = server.executions().total(), first + 200
                tools.clock.now += 1.0  # pyright: ignore[reportFunctionMemberAccess]
            assert servers_away(tools) == 0
    finally:
        other.kill()
