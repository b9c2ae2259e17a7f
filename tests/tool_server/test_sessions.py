"""Interpreters that keep their state: over HTTP, bounded, ended, and in an agent loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, cast

import aiohttp
import pytest

from agent_loop.calls.client import ToolClient
from agent_loop.tool_actions import run_code
from agent_loop.toolbox.own import CodeRunner
from tests.listening import listening
from tool_server.app import app_runner, create_app
from tool_server.interpreters import InterpreterGone, Interpreters, InterpretersFull
from tool_server.sandbox import Limits, Sandbox, SandboxUnavailable, choose_sandbox
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import (
    ToolCall,
    ToolResult,
    ToolUnavailable,
    cell_call,
    end_session_call,
)

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return choose_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox on this machine: {error}")


@pytest.fixture
async def url(sandbox) -> AsyncIterator[str]:
    async with listening(app_runner(create_app(ServerSettings(port=0, max_sessions=2)))) as address:
        yield address


async def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        return await (await session.post(f"{url}{path}", json=body)).json()


async def cell(url: str, code: str, session: str = "one", **more: Any) -> dict[str, Any]:
    return await post(url, "/run_code", code=code, session=session, **more)


async def test_state_is_kept_until_the_session_is_ended(url):
    first = await cell(url, "x = 41")
    assert first["session"] == {"id": "one", "new": True, "ended_by_program": False}
    second = await cell(url, "print('sum')\nx + 1")
    assert second["status"] == "Success" and second["session"]["new"] is False
    assert second["run_result"]["stdout"] == "sum\n42\n"
    assert "NameError" in (await cell(url, "x", "another"))["run_result"]["stderr"]
    assert await post(url, "/end_session", session="one") == {"ended": True}
    assert await post(url, "/end_session", session="one") == {"ended": False}
    assert "NameError" in (await cell(url, "x"))["run_result"]["stderr"]


async def test_a_late_cell_fails_and_keeps_the_state(url):
    await cell(url, "x = 1")
    late = await cell(url, "while True: pass", run_timeout=0.2)
    assert late["run_result"]["status"] == "TimeLimitExceeded"
    assert (await cell(url, "x"))["run_result"]["stdout"] == "1\n"


async def test_a_cell_that_ends_its_interpreter_begins_the_next_one_anew(url):
    await cell(url, "x = 1")
    assert (await cell(url, "import os; os._exit(3)"))["run_result"]["return_code"] == 3
    again = await cell(url, "'x' in dir()")
    assert again["session"] == {"id": "one", "new": True, "ended_by_program": True}
    assert again["run_result"]["stdout"] == "False\n"


async def test_a_session_begins_with_its_files(url):
    given = await cell(url, "open('f').read()", files={"f": "aGk="})
    assert given["run_result"]["stdout"] == "'hi'\n"


async def test_what_a_session_cannot_do_is_said(url):
    assert "a session runs python" in (await cell(url, "ls", language="bash"))["message"]


async def test_a_session_that_has_begun_is_never_begun_anew(url):
    await cell(url, "x = 1")
    await post(url, "/end_session", session="one")
    gone = await cell(url, "open('ran', 'w')", session_began=True)
    assert (gone["status"], gone["session"]) == ("SandboxError", {"id": "one", "gone": True})
    assert (await cell(url, "import os; os.listdir()"))["run_result"]["stdout"] == "[]\n"
    await cell(url, "import os; os._exit(3)", session_began=True)
    again = await cell(url, "1", session_began=True)  # the program's own doing
    assert again["session"] == {"id": "one", "new": True, "ended_by_program": True}


async def test_a_new_session_is_refused_while_all_others_are_in_use(url):
    for name in ("a", "b"):
        await cell(url, "x = 1", name)
    async with aiohttp.ClientSession(url) as session:
        refused = await session.post("/run_code", json={"code": "1", "session": "c"})
        assert refused.status == 429 and "max_sessions=2" in (await refused.json())["error"]
        health = await (await session.get("/health")).json()
        assert (health["sessions"], health["max_sessions"]) == (2, 2)
    for name in ("a", "b"):
        assert (await cell(url, "x", name, session_began=True))["run_result"]["stdout"] == "1\n"
    await post(url, "/end_session", session="b")
    assert (await cell(url, "1", "c"))["session"]["new"]


async def test_a_new_session_ends_the_one_that_is_unused_for_longest(sandbox):
    sessions = Interpreters(sandbox, max_sessions=2, idle_s=60.0, spared_s=0.0)
    for name in ("a", "b", "a", "c"):
        await sessions.run_cell(name, "x = 1", "", {}, Limits())
    assert len(sessions) == 2
    await sessions.run_cell("a", "x", "", {}, Limits(), began=True)
    with pytest.raises(InterpreterGone, match="'b' does not exist any more"):
        await sessions.run_cell("b", "x", "", {}, Limits(), began=True)
    await sessions.close()


async def test_an_interpreter_that_is_ended_for_another_ends_though_the_caller_leaves():
    ends, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class OneCell:
        is_alive = True

        async def run_cell(self, *_: Any) -> None:
            pass

    class Slow:
        @asynccontextmanager
        async def interpreter(self, *_: Any) -> AsyncIterator[OneCell]:
            yield OneCell()
            ends.set()
            await may_end.wait()
            ended.set()

    sessions = Interpreters(cast(Sandbox, Slow()), max_sessions=1, idle_s=100, spared_s=0)
    await sessions.run_cell("one", "", "", {}, Limits())
    other = asyncio.create_task(sessions.run_cell("two", "", "", {}, Limits()))
    await ends.wait()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    may_end.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert ended.is_set() and not len(sessions)


async def test_sessions_that_begin_at_once_are_one_each_and_within_the_limit(sandbox):
    sessions = Interpreters(sandbox, max_sessions=3, idle_s=60.0)
    names = ["a", "a", "b", "c", "d", "e"]
    done = await asyncio.gather(
        *(sessions.run_cell(name, "1", "", {}, Limits()) for name in names),
        return_exceptions=True,
    )
    refused = [isinstance(outcome, InterpretersFull) for outcome in done]
    assert refused == [False, False, False, False, True, True]
    new = [outcome[1]["new"] for outcome in done if isinstance(outcome, tuple)]
    assert new == [True, False, True, True] and len(sessions) == 3
    await sessions.close()


async def test_one_that_nobody_uses_is_ended_and_one_at_work_is_not(sandbox):
    sessions = Interpreters(sandbox, max_sessions=2, idle_s=0.0)
    await sessions.run_cell("idle", "x = 1", "", {}, Limits())
    work = asyncio.create_task(
        sessions.run_cell("busy", "import time; time.sleep(0.3); 7", "", {}, Limits())
    )
    while len(sessions) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await sessions.end_idle()
    result, about = await work
    assert (result.stdout, about["new"], len(sessions)) == ("7\n", True, 1)
    await sessions.close()
    assert len(sessions) == 0


async def test_a_cell_is_never_sent_twice_to_a_server_whose_sandbox_died(url, monkeypatch):
    sent = []

    async def died(own: Interpreters, name: str, code: str, *_: Any, **__: Any) -> Any:
        sent.append(code)
        raise SandboxUnavailable("the zygote is dead")

    monkeypatch.setattr(Interpreters, "run_cell", died)
    async with ToolClient(url, limiter=None) as tools:
        with pytest.raises(ToolUnavailable, match="may have been executed"):
            await tools.call(cell_call("x = 1", "", "s"))
    assert sent == ["x = 1"]


async def test_a_cell_that_found_no_place_is_sent_again(url, monkeypatch):
    real, sent = Interpreters.run_cell, []

    async def full_at_first(own: Interpreters, name: str, code: str, *given: Any, **further: Any):
        sent.append(code)
        if len(sent) == 1:
            raise InterpretersFull("all sessions are at work")
        return await real(own, name, code, *given, **further)

    async def no_pause(seconds: float) -> None:
        pass

    monkeypatch.setattr(Interpreters, "run_cell", full_at_first)
    async with ToolClient(url, limiter=None, sleep=no_pause) as tools:
        assert (await tools.call(cell_call("1", "", "s"))).attempts == 1  # the first was no run
    assert len(sent) == 2


async def test_all_sessions_at_work_is_no_place_for_another(sandbox):
    sessions = Interpreters(sandbox, max_sessions=0, idle_s=60.0)
    with pytest.raises(InterpretersFull):
        await sessions.run_cell("s", "1", "", {}, Limits())


async def test_cells_of_one_session_wait_for_one_another(sandbox):
    sessions = Interpreters(sandbox, max_sessions=2, idle_s=60.0)
    await sessions.run_cell("s", "n = 0", "", {}, Limits())
    count = "k = n\nimport time; time.sleep(0.01)\nn = k + 1\nn"
    done = await asyncio.gather(
        *(sessions.run_cell("s", count, "", {}, Limits()) for _ in range(5))
    )
    assert sorted(cell.stdout for cell, _ in done if cell.stdout) == [f"{n}\n" for n in range(1, 6)]
    await sessions.close()


async def test_a_cell_that_nobody_waits_for_any_more_ends_its_session(sandbox):
    sessions = Interpreters(sandbox, max_sessions=2, idle_s=60.0)
    work = asyncio.create_task(sessions.run_cell("s", "while True: pass", "", {}, Limits()))
    while not len(sessions):  # noqa: ASYNC110
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled() and len(sessions) == 0


# --- the client and the agent loops ---------------------------------------------------------------


async def test_a_loop_that_is_told_to_keeps_one_interpreter_a_trajectory(url):
    pytest.importorskip("verl.trainer.ppo.v1")
    from agent_loop.code_execution_agent_loop import CodeExecutionAgentLoop
    from agent_loop.turns.tags import Action, ActionKind

    def loop(*, persistent: bool) -> CodeExecutionAgentLoop:
        made: Any = object.__new__(CodeExecutionAgentLoop)
        made.client, made.interpreter = tools, CodeRunner(persistent=persistent)
        return made

    async def says(own: CodeExecutionAgentLoop, code: str) -> str:
        return (await own.act(Action(kind=ActionKind.CODE, content=code), {})).text

    async with ToolClient(url, limiter=None) as tools:
        one, other, plain = (loop(persistent=kept) for kept in (True, True, False))
        assert await says(one, "x = 20") == "no output"
        assert await says(one, "x + 1") == "21"
        assert "NameError" in await says(other, "x")
        assert await says(plain, "print(2)\n3") == "2"
        assert await says(one, "x = x + 1; x") == await says(one, "x")  # never answered by a cache
        await one.end()
        with pytest.raises(ToolUnavailable, match="its state is lost"):
            await says(one, "x")


@pytest.mark.parametrize("how", ["ended", "restarted"])
async def test_a_session_that_is_gone_in_mid_trajectory_is_a_fault_of_the_infrastructure(
    how: str, url: str
):
    async with ToolClient(url, limiter=None) as tools:
        await run_code(tools, "x = 1", "", "t1")
        assert (await run_code(tools, "x", "", "t1", session_began=True)).text == "1"
        if how == "ended":
            await tools.call(end_session_call("t1"))
        other = app_runner(create_app(ServerSettings(port=0)))
        async with listening(other) as fresh, ToolClient(fresh, limiter=None) as restarted:
            with pytest.raises(ToolUnavailable, match="its state is lost"):
                await run_code(
                    tools if how == "ended" else restarted, "x", "", "t1", session_began=True
                )
            assert (await post(fresh, "/end_session", session="t1")) == {"ended": False}


async def test_a_server_without_sessions_is_found_out_at_the_first_cell():
    class Stock:
        async def call(self, call: ToolCall) -> ToolResult:
            return ToolResult(body={"status": "Success", "run_result": {"stdout": ""}})

    assert (await run_code(Stock(), "1", "")).text == "no output"
    with pytest.raises(ToolUnavailable, match="the tool server keeps no sessions"):
        await run_code(Stock(), "1", "", "t1")


@pytest.mark.parametrize(
    ("session_began", "by_program", "is_lost"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
async def test_an_interpreter_that_the_server_ended_is_its_fault(
    session_began: bool, by_program: bool, is_lost: bool
):
    class Restarting:
        async def call(self, call: ToolCall) -> ToolResult:
            about = {"id": "t1", "new": True, "ended_by_program": by_program}
            return ToolResult(
                body={"status": "Success", "run_result": {"stdout": ""}, "session": about}
            )

    with pytest.raises(ToolUnavailable, match="its state is lost") if is_lost else nullcontext():
        await run_code(Restarting(), "x", "", "t1", session_began=session_began)
