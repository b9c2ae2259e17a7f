"""A cached result serves only callers whose servers would answer the same."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_loop.calls.result_store import ResultStore
from tests.agent_loop.calls.test_client import CALL, client
from tests.fakes.tool_server import running
from tests.listening import listening
from tool_server.app import app_runner, create_app
from tool_server.retrieve import Retrieve
from tool_server.run_code import RunCode
from tool_server.sandbox import SandboxUnavailable, choose_sandbox
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import ToolCall, ToolResult, run_code_call
from tool_server.wire.responses import is_repeatable

OTHER = ToolCall(tool="calculate", payload={"expression": "2"})


def answer(result: str, fingerprint: str | None) -> tuple[dict[str, str], dict[str, str]]:
    return {"result": result}, {"X-Tool-Fingerprint": fingerprint} if fingerprint else {}


@pytest.fixture
def store(tmp_path: Path) -> Callable[[], ResultStore]:
    return lambda: ResultStore(tmp_path / "cache", 2**20, 100.0)


async def test_a_server_that_was_swapped_gets_no_answers_of_the_one_before():
    old, new = answer("old", "1"), answer("new", "2")
    async with running([old, new]) as server, client(server.url) as tools:
        seen = [await tools.call(call) for call in (CALL, CALL, OTHER, CALL, CALL)]
    got = [(one.body["result"], one.cached) for one in seen]
    assert got == [("old", False), ("old", True), ("new", False), ("new", False), ("new", True)]
    assert [one.origin for one in seen] == ["1", "1", "2", "2", "2"]


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [("1", "1", True), ("1", "2", False), (None, None, False), ("1", None, False)],
)
async def test_processes_share_results_of_equal_servers_only(store, first, second, is_shared):
    async with running([answer("a", first)]) as one, running([answer("b", second)]) as two:

        async def ask(url: str) -> ToolResult:
            async with client(url, open_store=store) as tools:
                await tools.call(OTHER)  # its answer names what answers
                return await tools.call(CALL)

        assert (await ask(one.url)).body == {"result": "a"}
        result = await ask(two.url)
        assert result.cached == is_shared
        assert result.body == {"result": "a" if is_shared else "b"}
        assert (await ask(one.url)).cached


async def test_a_result_from_one_of_several_servers_serves_while_that_one_answers_so():
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(running([answer(name, name)])) for name in "ab"]
        tools = await stack.enter_async_context(client([one.url, two.url]))
        first = await tools.call(CALL)
        assert (await tools.call(CALL)).origin == first.origin
    assert len(one.seen) + len(two.seen) == 1


# --- what depends on the state of the server ------------------------------------------------------


def run(stderr: str = "", code: int = 1, status: str = "Finished", stdout: str = "") -> Any:
    command = {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr}
    return {"status": "Failed" if code else "Success", "run_result": command}


COMPILED = {"status": "TimeLimitExceeded", "return_code": 137, "stdout": "", "stderr": ""}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (run("ZeroDivisionError: division by zero"), True),
        (run(code=0, stdout="42\n"), True),
        (run(code=3), True),
        (run("ModuleNotFoundError: No module named 'numpy'"), False),
        (run("ImportError: cannot import name 'x' from 'y'"), False),
        (run(code=0, stdout="No module named 'numpy'"), False),
        (run("BlockingIOError: [Errno 11] Resource temporarily unavailable"), False),
        (run("RuntimeError: can't start new thread"), False),
        (run("bash: fork: retry: Resource temporarily unavailable"), False),
        (run("MemoryError"), False),
        (run("OSError: [Errno 28] No space left on device"), False),
        (run(status="TimeLimitExceeded", code=137), False),
        (run(status="Error", code=137), False),
        (run(code=137), False),
        (run(code=-9), False),
        (run(code=152), False),  # SIGXCPU
        ({"status": "Failed", "run_result": None, "compile_result": COMPILED}, False),
        ({"error": "took too long"}, False),
        ({"result": "2"}, True),
    ],
    ids=str,
)
def test_what_the_state_of_the_server_may_have_caused_is_not_repeatable(body, expected):
    assert is_repeatable(body) == expected


@pytest.mark.parametrize(
    ("mark", "body", "cached"),
    [
        (None, run("ZeroDivisionError"), True),
        (None, run("ModuleNotFoundError: No module named 'numpy'"), False),
        ("yes", run(code=0, stdout="MemoryError is a class"), True),
        ("no", run(code=0, stdout="42"), False),
        ("what", run(code=0, stdout="42"), False),
    ],
)
async def test_the_mark_of_the_server_decides_and_without_one_the_text(mark, body, cached, store):
    call = run_code_call("1", "")
    async with running([(body, {"X-Cacheable": mark} if mark else {})]) as server:
        async with client(server.url) as tools:
            assert [(await tools.call(call)).cached for _ in range(2)] == [False, cached]
            origin = tools.route.servers.origins["run_code"]
        for expected in (False, cached):
            async with client(server.url, open_store=store) as tools:
                tools.route.servers.origins["run_code"] = origin
                assert (await tools.call(call)).cached == expected


# --- our server -----------------------------------------------------------------------------------


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with listening(app_runner(create_app(ServerSettings(port=0)))) as address:
        yield address


async def test_our_server_names_the_same_fingerprint_in_health_and_in_each_answer(url):
    async with client(url) as tools:
        result = await tools.call(CALL)
        async with tools.session.get(f"{url}/health") as response:
            about = (await response.json())["tools"]["calculate"]
    assert about["fingerprint"] == result.origin


def fingerprint(**settings: Any) -> str:
    """Of `/retrieve`."""
    return Retrieve(ServerSettings(**settings)).fingerprint


def test_a_fingerprint_changes_with_what_answers_and_with_nothing_else(tmp_path):
    paths = [tmp_path / name for name in ("one.jsonl", "copy.jsonl", "other.jsonl")]
    for path, text in zip(paths, ("a", "a", "b"), strict=True):
        path.write_text(f'{{"id": "1", "contents": "{text}"}}\n')
    plain = fingerprint()
    assert fingerprint(port=8200) == plain
    one, copy, other = (fingerprint(corpus_path=path) for path in paths)
    assert one == copy and len({one, other, plain}) == 3
    assert fingerprint(search_upstream="http://a/retrieve") not in (one, plain)


@pytest.mark.sandbox
def test_the_packages_of_the_sandbox_are_in_its_fingerprint():
    try:
        choose_sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox on this machine: {error}")
    made = [RunCode(ServerSettings(sandbox_packages=names)) for names in ((), ("packaging",))]
    for each in made:
        each.sandbox.close()
    assert made[0].fingerprint != made[1].fingerprint
