"""The tool server over real HTTP, with the real sandbox and a real index."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from agent_loop.calls.client import ToolClient
from rate_limit.file_limiter import FileRateLimiter
from rate_limit.slots import FileSlots
from tests.listening import listening
from tests.rate_limit.slots_seen import in_use
from tool_server.app import ENDPOINTS, app_runner, create_app
from tool_server.run_code import RunCode
from tool_server.sandbox import (
    Limits,
    Program,
    RunResult,
    SandboxUnavailable,
    choose_sandbox,
)
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import run_code_call

pytestmark = pytest.mark.sandbox  # the servers have one

CORPUS = [
    {"id": "0", "contents": '"Sapphire Bridge"\nA book by Lukas Barrow.'},
    {"id": "1", "contents": '"Sapphire Tower"\nA film by Ann Lee.'},
    {"id": "2", "contents": '"Iron Bridge"\nA song by Bo Ray.'},
]


@pytest.fixture(scope="module")
def app_settings(tmp_path_factory) -> ServerSettings:
    corpus: Path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in CORPUS))
    return ServerSettings(port=0, corpus_path=corpus)


def code_of(app: web.Application) -> RunCode:
    (endpoint,) = (endpoint for endpoint in app[ENDPOINTS] if isinstance(endpoint, RunCode))
    return endpoint


def serve(app: web.Application) -> AbstractAsyncContextManager[str]:
    return listening(app_runner(app))


@pytest.fixture
async def url(app_settings) -> AsyncIterator[str]:
    async with serve(create_app(app_settings)) as address:
        yield address


async def post(url: str, body: object) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else {"text": text}


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        choose_sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox on this machine: {error}")


async def test_a_program_runs_and_answers_as_sandbox_fusion_does(url):
    status, body = await post(
        f"{url}/run_code", {"code": "print(int(input())+54)", "language": "python", "stdin": "5\n"}
    )
    assert (status, body["status"]) == (200, "Success")
    assert body["run_result"]["stdout"] == "59\n"
    assert body["run_result"]["status"] == "Finished"
    assert body["run_result"]["return_code"] == 0
    assert set(body) == {
        "status",
        "message",
        "compile_result",
        "run_result",
        "executor_pod_name",
        "files",
    }


def is_at_work(process: psutil.Process) -> bool:
    """Whether it has run for longer than an interpreter needs to start."""
    try:
        return process.cpu_times().user > 0.3
    except psutil.NoSuchProcess:
        return False


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_call_that_is_cancelled_kills_its_program_and_frees_all_places(
    app_settings, tmp_path
):
    slots = FileSlots(tmp_path / "slots", 1)
    app = create_app(app_settings.model_copy(update={"sandbox_workers": 1}))
    before = list(filter(is_at_work, psutil.Process().children(recursive=True)))
    for_ever = run_code_call("while True: pass", "")
    for_ever.payload["run_timeout"] = 60
    async with serve(app) as address:
        held = slots.hold_async
        async with ToolClient(address, limiter=None, slots=held, timeout_s=1000.0) as tools:
            call = asyncio.create_task(tools.call(for_ever))
            program: list[psutil.Process] = []
            while not program:
                await asyncio.sleep(0)
                children = psutil.Process().children(recursive=True)
                program = [one for one in children if one not in before and is_at_work(one)]
            assert in_use(slots) == 1
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled() and in_use(slots) == 0
            while any(map(lives, program)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            again = await tools.call(run_code_call("print(1)", ""))
            assert again.body["run_result"]["stdout"] == "1\n"
            async with aiohttp.ClientSession() as session:
                metrics = await (await session.get(f"{address}/metrics")).text()
        assert 'tool_requests_total{status="499",tool="run_code"} 1.0' in metrics


async def test_more_memory_than_the_server_gives_is_refused(url):
    status, body = await post(f"{url}/run_code", {"code": "1", "memory_limit_MB": 10**9})
    assert status == 400
    assert "memory_limit_MB" in body["error"]


async def test_too_little_memory_for_an_interpreter_is_raised_to_enough(url):
    _, body = await post(f"{url}/run_code", {"code": "print(1)", "memory_limit_MB": 1})
    assert body["status"] == "Success"


@pytest.mark.parametrize(
    ("code", "cacheable"),
    [("print(1)", "yes"), ("1 / 0", "yes"), ("import nothing", "no"), ("while True: pass", "no")],
)
async def test_a_run_says_whether_it_depends_on_the_state_of_the_server(url, code, cacheable):
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{url}/run_code", json={"code": code, "run_timeout": 0.2})
    assert answer.headers["X-Cacheable"] == cacheable


async def test_a_sandbox_that_breaks_later_is_a_fault_of_the_server(app_settings, monkeypatch):
    class Broken:
        async def run(self, program: Program, limits: Limits) -> RunResult:
            raise SandboxUnavailable("out of namespaces")

        def close(self) -> None:
            pass

    app = create_app(app_settings)
    code_of(app).sandbox.close()
    monkeypatch.setattr(code_of(app), "_sandbox", Broken())
    async with serve(app) as address:
        status, body = await post(f"{address}/run_code", {"code": "1"})
        assert (status, body["status"]) == (500, "SandboxError")
        assert body["message"] == "out of namespaces"
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{address}/run_code", json={"code": "1"})
        assert answer.headers["X-Executed"] == "maybe"


async def test_health_says_which_sandbox_and_metrics_count_requests(url):
    await post(f"{url}/calculate", {"expression": "1"})
    async with aiohttp.ClientSession() as session:
        health = await (await session.get(f"{url}/health")).json()
        metrics = await (await session.get(f"{url}/metrics")).text()
    assert health["status"] == "ok"
    assert health["passages"] == len(CORPUS)
    assert health["sandbox"] in ("bubblewrap", "landlock")
    assert 'tool_requests_total{status="200",tool="calculate"} 1.0' in metrics


async def test_metrics_tell_what_the_limiter_of_those_who_call_does(app_settings, tmp_path):
    path = tmp_path / "rate_limit.state"
    async with serve(create_app(app_settings.model_copy(update={"limiter_path": path}))) as address:
        FileRateLimiter(path, per_minute=60, burst=5).acquire(2, source="nq")
        async with aiohttp.ClientSession() as session:
            metrics = await (await session.get(f"{address}/metrics")).text()
        assert 'limiter_calls_total{source="nq"} 2.0' in metrics


async def test_without_isolation_no_program_runs_and_the_rest_works(app_settings, monkeypatch):
    def denied(kind, **_):
        raise SandboxUnavailable("no isolation here")

    monkeypatch.setattr("tool_server.run_code.choose_sandbox", denied)
    app = create_app(app_settings)
    async with serve(app) as address:
        assert await post(f"{address}/run_code", {"code": "print(1)"}) == (
            503,
            {"error": "no isolation here"},
        )
        assert (await post(f"{address}/calculate", {"expression": "1"}))[0] == 200
        assert await post(f"{address}/calculate", {"expression": "x=1"}) == (
            200,
            {"error": "only arithmetic is calculated here: there is no sandbox for algebra"},
        )
