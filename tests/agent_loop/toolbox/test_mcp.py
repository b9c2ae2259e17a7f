"""MCP servers over stdio, as tools: real processes, some of which break the rules."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.calls import guarded_process
from agent_loop.calls.client import ToolClient
from agent_loop.calls.guarded_process import KEPT
from agent_loop.row import Row
from agent_loop.toolbox import mcp_servers
from agent_loop.toolbox.mcp_client import stdio
from agent_loop.toolbox.mcp_client.stdio import ServerProcess, id_of
from agent_loop.toolbox.mcp_client.target import ServerTarget
from agent_loop.toolbox.mcp_servers import McpProvider
from config.compat import timeout
from config.tool_entries import ToolEntry
from rate_limit.slots import FileSlots
from tests.agent_loop.toolbox.mcp_rig import (
    LINES,
    CountingLimiter,
    Rig,
    listed,
    opened,
    resident_mb,
    runs,
    until,
)
from tests.fakes import mcp_server
from tests.rate_limit.slots_seen import in_use
from tool_server.wire.protocol import Again, ToolRejected, ToolTimeout, ToolUnavailable

# --- a server of the SDK --------------------------------------------------------------------------


async def test_a_server_of_the_sdk_lists_its_tools_and_answers_many_calls_at_once(tmp_path):
    async with opened(tmp_path, mcp_server.COMMAND) as rig:
        spec = rig.tools["echo"].spec
        assert (spec.description, rig.tools["echo"].idempotent) == ("Says the text again.", True)  # type: ignore[attr-defined]
        assert spec.parameters["required"] == ["text"]
        assert spec.mistake({"text": 5}) is not None and spec.mistake({"text": "a"}) is None
        texts = await asyncio.gather(*(rig.text("echo", text=str(n)) for n in range(50)))
        assert texts == [str(n) for n in range(50)]
        assert await rig.text("echo", text="half \ud800 of a pair") == "half ? of a pair"
        assert await rig.text("add", a=1, b=2) == '{\n  "sum": 3\n}'
        assert await rig.text("nothing") == '{"result": []}'

        wrong = await rig.ask("divide", a=1, b=0)
        assert wrong.rejected and wrong.text == "error: Error executing tool divide"
        with pytest.raises(ToolUnavailable, match=r"'picture' of mcp server.*an image.*`only`"):
            await rig.ask("picture")
        with pytest.raises(ToolUnavailable, match=r"'greet' of .*asks for input during a call"):
            await rig.ask("greet")

        waiting = asyncio.create_task(rig.ask("wait", key="w"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await rig.text("echo", text="goes on") == "goes on"
        assert await rig.text("count", key="w") == "2"  # the server ended the call


# --- which tools ----------------------------------------------------------------------------------


async def test_all_pages_are_listed_and_only_chooses(tmp_path):
    async with opened(tmp_path) as rig:
        assert len(rig.tools) == 21
    async with opened(tmp_path, only=["pid", "echo"]) as rig:
        assert list(rig.tools) == ["pid", "echo"]
    with pytest.raises(ValueError, match=r"only=\['ehco'\]: no such tools; there are ask, big"):
        async with opened(tmp_path, only=["ehco"]):
            pass


async def test_tools_are_listed_for_a_command_and_nothing_is_left():
    specs = await listed(ToolEntry(mcp=LINES, only=["echo"]), 10.0)
    assert [spec.name for spec in specs] == ["echo"]
    assert not _children()


async def test_a_list_without_end_is_refused():
    with pytest.raises(ToolUnavailable, match="more than 512 tools"):
        await listed(ToolEntry(mcp=f"{LINES} --endless-list"), 10.0)


# --- what an entry says ---------------------------------------------------------------------------


async def test_a_server_gets_the_variables_that_the_entry_names_and_no_others(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OTHER_KEY", "other")
    async with opened(tmp_path, env=["MY_KEY"]) as rig:
        assert await rig.text("env", x="MY_KEY") == "secret"
        assert await rig.text("env", x="OTHER_KEY") == "not set"
        assert await rig.text("env", x="PATH") == os.environ["PATH"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mcp": "x", "env": ["NO_SUCH_KEY"]}, "no NO_SUCH_KEY, which `env` names"),
        (
            {"mcp": "HTTP://me:pw@x/mcp?key=pw", "token": "NO_SUCH_KEY"},
            "mcp='http://x/mcp': the environment has no NO_SUCH_KEY, which `token` names",
        ),
        ({"mcp": "x 'y"}, "is no command"),
        ({"mcp": "  "}, "is no command"),
    ],
)
async def test_a_wrong_entry_is_refused_at_once(tmp_path, settings, message):
    async with ToolClient("http://unused", limiter=None) as client:
        with pytest.raises(ValueError, match=message):
            McpProvider(ToolEntry(**settings), client)


async def test_calls_pass_the_limits_of_the_run_and_those_of_the_entry(tmp_path):
    limiter = CountingLimiter()
    async with opened(tmp_path, limiter=limiter, rate="100/s", slots=2) as rig:
        route = rig.tools["echo"].route  # type: ignore[attr-defined]
        assert isinstance(route.slots, FileSlots) and route.slots.slots == 2
        hanging = [asyncio.create_task(rig.ask("hang")) for _ in range(4)]
        await until(lambda: limiter.acquired == 4)
        await asyncio.sleep(0.05)
        assert in_use(route.slots) == 2
        assert route.limiter.snapshot().granted == 4
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert in_use(route.slots) == 0


@pytest.mark.parametrize("cache", [None, True])
async def test_results_are_cached_only_where_the_entry_says_so(tmp_path, cache):
    async with opened(tmp_path, cache=cache) as rig:
        texts = [await rig.text("count", x=x) for x in (1, 1, 2)]
        assert texts == (["1", "1", "2"] if cache else ["1", "2", "3"])
        for _ in range(2):
            with pytest.raises(ToolRejected):
                await rig.ask("refuse", x=1)


async def test_cache_keys_differ_between_tools_and_between_environments(tmp_path, monkeypatch):
    async def keys() -> set[str]:
        async with opened(tmp_path, env=["MY_KEY"], only=["echo", "pid"], cache=True) as rig:
            return {tool.route.key for tool in rig.tools.values()}  # type: ignore[attr-defined]

    monkeypatch.setenv("MY_KEY", "a")
    first = await keys()
    assert len(first) == 2 and first == await keys()
    monkeypatch.setenv("MY_KEY", "b")
    assert not first & await keys()


# --- what results mean ----------------------------------------------------------------------------


async def test_resources_and_errors_have_their_meaning(tmp_path):
    async with opened(tmp_path) as rig:
        assert await rig.text("resources") == "readme: file:///readme\ninside"
        with pytest.raises(ToolUnavailable, match="returned a binary resource"):
            await rig.ask("blob")
        with pytest.raises(ToolRejected, match="refuse: not with x=7"):
            await rig.ask("refuse", x=7)
        with pytest.raises(ToolUnavailable, match=r"1 attempts.*not with x=8 \(error -32603\)"):
            await rig.ask("break", x=8)
        with pytest.raises(ToolUnavailable, match="gave an invalid result"):
            await rig.ask("odd")
        with pytest.raises(ToolUnavailable, match="the answer is no JSON-RPC response"):
            await rig.ask("wild")
        assert await rig.text("echo", x="goes on") == "goes on"


async def test_requests_of_a_server_are_refused_and_it_may_ping(tmp_path):
    async with opened(tmp_path) as rig:
        text = await rig.text("ask")
    assert text.count("Invalid request parameters") == 2  # sampling and elicitation without any
    assert "List roots not supported" in text and text.endswith("'answered']")


# --- floods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", ["id first", "id last"])
async def test_a_result_of_50_mb_fails_its_call_alone(tmp_path, x):
    async with opened(tmp_path) as rig:
        pid = await rig.text("pid")
        before = resident_mb()
        hanging = asyncio.create_task(rig.ask("hang"))
        with pytest.raises(ToolUnavailable, match=r"'big' of mcp server .* more than 4 MiB"):
            await rig.ask("big", x=x)
        assert resident_mb() - before < 20
        assert await rig.text("pid") == pid and not hanging.done()
        hanging.cancel()


async def test_a_result_of_more_than_a_mebibyte_is_refused(tmp_path):
    async with opened(tmp_path) as rig:
        assert len(await rig.text("echo", x="x" * (1 << 20))) == 1 << 20
        with pytest.raises(ToolUnavailable, match="more than 1 MiB of text"):
            await rig.ask("echo", x="ü" * (1 << 19) + "x")


async def test_a_line_without_end_is_not_kept(tmp_path):
    async with opened(tmp_path, timeout=0.5) as rig:
        before = resident_mb()
        with pytest.raises(ToolTimeout):
            await rig.ask("endless")
        assert resident_mb() - before < 20


async def test_endless_notifications_are_dropped(tmp_path):
    async with opened(tmp_path) as rig:
        await rig.ask("notify")
        before, until = resident_mb(), time.monotonic() + 0.5
        while time.monotonic() < until:
            assert await rig.text("echo", x="a") == "a"
        assert resident_mb() - before < 20


async def test_what_a_server_prints_does_no_harm_and_its_last_words_are_known(tmp_path, capfd):
    async with opened(tmp_path) as rig:
        assert await rig.text("print") == "printed"
        assert await rig.text("complain") == "complained"
        server = rig.provider._connection._process  # type: ignore[union-attr]
        assert len(server._process.printed()) <= KEPT["stderr"]  # type: ignore[union-attr]
        with pytest.raises(ToolUnavailable) as caught:
            await rig.ask("die", x=5)
    message = str(caught.value)
    assert "it exited with code 5" in message and "last words" in message
    assert "'hello, I am a server" in message and len(message) < 1500
    assert capfd.readouterr() == ("", "")


async def test_a_call_to_a_server_that_does_not_read_ends_at_its_deadline(tmp_path):
    async with opened(tmp_path, timeout=0.5) as rig:
        for tool, x in (("stuck", ""), ("count", "x" * (3 << 20))):
            with pytest.raises(ToolTimeout):
                await rig.ask(tool, x=x)


@pytest.mark.parametrize("hung", ["stuck", "hang"])  # it reads nothing, or goes on reading
async def test_a_server_that_answers_nothing_is_replaced(hung, tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_servers, "MOST_UNANSWERED", 3)
    monkeypatch.setattr(stdio, "EXIT_S", 0.1)
    async with opened(tmp_path, timeout=0.5) as rig:
        for tool in (hung, hung, hung):
            with pytest.raises(ToolTimeout):
                await rig.ask(tool, x="x" * (1 << 20))
        await until(lambda: rig.provider._connection._task.done())  # type: ignore[union-attr]
        async with timeout(60):
            while True:
                try:  # the start of a server may take longer than a call
                    assert await rig.text("count", x="") == "1"
                    return
                except ToolTimeout:
                    continue


async def test_a_call_that_ends_with_its_trajectory_says_nothing_of_its_server(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(mcp_servers, "MOST_UNANSWERED", 1)
    async with opened(tmp_path) as rig:
        before = await rig.text("pid")
        asking = asyncio.create_task(rig.ask("hang"))
        assert await rig.text("echo", x="a") == "a"  # that call is under way too
        asking.cancel()
        await asyncio.wait([asking])
        assert await rig.text("pid") == before


# --- faults ---------------------------------------------------------------------------------------


async def test_a_program_that_cannot_be_executed_is_not_tried_again(tmp_path):
    script = tmp_path / "server"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    with pytest.raises(ToolUnavailable, match=f"cannot start {script}: No such file") as caught:
        async with opened(tmp_path, str(script)):
            pass
    assert caught.value.again is Again.NEVER and not caught.value.is_away


async def test_a_server_that_dies_is_started_again_and_only_repeatable_calls_are_repeated(tmp_path):
    async with opened(tmp_path) as rig:
        pid = int(await rig.text("pid"))
        with pytest.raises(
            ToolUnavailable, match=r"code 3;.*no more memory.*set `retry` in its entry"
        ):
            await rig.ask("die", x=3)
        assert int(await rig.text("pid")) != pid
        again = await rig.ask("die_once", x=str(tmp_path / "mark"))
        assert again.text == "alive" and again.result is not None and again.result.attempts == 2


async def test_retry_of_the_entry_repeats_every_call(tmp_path):
    async with opened(tmp_path, retry=2) as rig:
        with pytest.raises(ToolUnavailable, match=r"3 attempts.*ended during the call"):
            await rig.ask("die", x=3)


async def test_a_server_that_hangs_is_cut_off_at_the_deadline_and_goes_on(tmp_path):
    async with opened(tmp_path, timeout=1.5) as rig:
        pid = await rig.text("pid")
        with pytest.raises(ToolTimeout, match=r"from mcp server `.*mcp_lines.*for tool='hang'"):
            await rig.ask("hang")
        assert await rig.text("pid") == pid
        assert (await rig.text("seen")).split().count("notifications/cancelled") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program --x", "no program 'no-such-program' on PATH"),
        (f"{LINES} --exits", "exited with code 9; its stderr ends with: no licence\nbuy one"),
        (f"{LINES} --silent", "not list its tools within 2 s; its stderr ends with: thinking"),
        (f"{LINES} --deaf", "not list its tools within 2 s; its stderr ends with: thinking"),
    ],
    ids=["missing", "exits", "silent", "deaf"],
)
async def test_a_server_that_does_not_start_is_named_with_its_last_words(
    command, message, monkeypatch
):
    monkeypatch.setattr(stdio, "EXIT_S", 0.1)
    with pytest.raises(ToolUnavailable) as caught:
        await listed(ToolEntry(mcp=command), 2.0 if "list" in message else 10.0)
    assert message in str(caught.value) and command[:30] in str(caught.value)
    assert "run the command by hand" in str(caught.value)
    assert not _children()


async def test_messages_do_not_show_the_variables_that_a_server_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("LICENCE", "no licence")
    async with opened(tmp_path, env=["LICENCE"]) as rig:
        with pytest.raises(ToolRejected, match=r"not with x=\*\*\*$"):
            await rig.ask("refuse", x="no licence")
    with pytest.raises(ToolUnavailable, match=r"stderr ends with: \*\*\*\nbuy one"):
        await listed(ToolEntry(mcp=f"{LINES} --exits", env=["LICENCE"]), 10.0)


async def test_a_call_starts_a_server_again_that_did_not_start(tmp_path):
    async with opened(tmp_path) as rig:
        provider = rig.provider
        await provider.close()
        mark = tmp_path / "mark"
        provider._target = mcp_servers.target_of(ToolEntry(mcp=f"{LINES} --fails-once {mark}"))
        result = (await rig.ask("count", x=1)).result
        assert result is not None and (result.attempts, result.body["text"]) == (1, "1")


# --- a server for each trajectory -----------------------------------------------------------------


@asynccontextmanager
async def begun(rig: Rig) -> AsyncIterator[dict[str, Any]]:
    state = rig.provider.begin(rig.client, Row(source="shop"))
    assert state is not None
    async with state as tools:
        yield {tool.spec.name: tool for tool in tools}


async def test_each_trajectory_has_its_server_which_ends_with_it(tmp_path):
    async with opened(tmp_path, per="trajectory", slots=2) as rig:
        assert not _children()  # that of the listing has ended
        servers = rig.provider.servers
        assert servers is not None
        async with begun(rig) as one, begun(rig) as two:
            for tools in (one, two):
                counts = [(await tools["count"].call(rig.client, {})).text for _ in range(2)]
                assert counts == ["1", "2"]
            assert in_use(servers) == len(_children()) == 2
        assert in_use(servers) == len(_children()) == 0


async def test_a_trajectory_that_is_cancelled_leaves_no_server(tmp_path):
    async with opened(tmp_path, per="trajectory") as rig:
        began = asyncio.Event()

        async def trajectory() -> None:
            async with begun(rig) as tools:
                began.set()
                await tools["hang"].call(rig.client, {})

        task = asyncio.create_task(trajectory())
        await began.wait()
        [pid] = _children()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not runs(pid))

        starting = asyncio.create_task(trajectory())
        await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not _children()


async def test_a_trajectory_whose_server_died_has_lost_its_state(tmp_path):
    async with opened(tmp_path, per="trajectory") as rig, begun(rig) as tools:
        with pytest.raises(ToolUnavailable, match="ended during the call"):
            await tools["die"].call(rig.client, {"x": 4})
        with pytest.raises(ToolUnavailable, match=r"and the state of the trajectory.*code 4"):
            await tools["echo"].call(rig.client, {"x": "a"})
        assert rig.provider._route.servers.all[0].failures_in_a_row == 0


# --- no process is left ---------------------------------------------------------------------------


def test_the_end_of_the_loop_ends_the_server(tmp_path):
    async def use() -> int:
        async with ToolClient("http://unused", limiter=None) as client:
            provider = McpProvider(ToolEntry(mcp=LINES), client)
            tools = {tool.spec.name: tool for tool in await provider.tools()}
            return int((await tools["pid"].call(client, {})).text)

    pid = asyncio.run(use())
    assert not runs(pid)


@pytest.mark.parametrize("extra", ["", " --deaf"])
def test_a_worker_that_is_killed_leaves_no_server(tmp_path, extra):
    program = (
        "import asyncio, sys\n"
        "from agent_loop.toolbox.mcp_client.stdio import ServerProcess\n"
        "from agent_loop.toolbox.mcp_client.target import ServerTarget\n"
        "async def main():\n"
        "    target = ServerTarget(name='x', limits_name='x', command=tuple(sys.argv[1:]))\n"
        "    server = ServerProcess(target, asyncio.Event())\n"
        "    await server.start()\n"
        "    while '--deaf' in sys.argv and 'thinking' not in server.state():\n"
        "        await asyncio.sleep(0.01)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, *f"{LINES}{extra}".split()]
    worker = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
        children = _children(worker.pid)
        assert len(children) == 1
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    deadline = time.monotonic() + 60
    while any(map(runs, children)):
        assert time.monotonic() < deadline, "the server outlives its worker"
        time.sleep(0.02)


async def started(*command: str) -> ServerProcess:
    server = ServerProcess(
        ServerTarget(name="x", limits_name="x", command=command), asyncio.Event()
    )
    await server.start()
    return server


async def test_a_server_that_ignores_sigterm_ends_with_its_children(monkeypatch):
    monkeypatch.setattr(stdio, "EXIT_S", 0.1)
    monkeypatch.setattr(guarded_process, "TERM_S", 0.1)
    script = "trap '' TERM; setsid sleep 600 & sleep 600 & echo thinking >&2; wait"
    server = await started("bash", "-c", script)
    await until(lambda: "thinking" in server.state())
    assert server._process is not None
    guard = psutil.Process(server._process.process.pid)
    await until(lambda: len(guard.children(recursive=True)) == 3)
    below = guard.children(recursive=True)
    await server.stop()
    assert not any(runs(process.pid) for process in [guard, *below])


async def test_a_server_whose_start_is_cancelled_leaves_no_pipe_open():
    for passes in range(8):
        server = ServerProcess(
            ServerTarget(name="x", limits_name="x", command=("sleep", "600")), asyncio.Event()
        )
        starting = asyncio.create_task(server.start())
        for _ in range(passes):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await server.stop()
        del server
        gc.collect()  # a pipe that is open is a warning, which fails the test


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_event_loop_goes_on_until_the_kernel_has_killed_a_server(
    is_cancelled, monkeypatch
):
    """The guard is told to kill the server only when the event loop goes on."""
    monkeypatch.setattr(stdio, "EXIT_S", 0.0)
    monkeypatch.setattr(guarded_process, "TERM_S", 0.0)
    asked, may_end = asyncio.Event(), asyncio.Event()

    killing: list[asyncio.Task[None]] = []
    server = await started("sleep", "600")
    assert server._process is not None
    end_all = server._process._end

    async def end_later() -> None:
        await may_end.wait()
        end_all()

    def told() -> None:
        killing.append(asyncio.create_task(end_later()))
        asked.set()

    monkeypatch.setattr(server._process, "_end", told)
    stopping = asyncio.create_task(server.stop())
    await asked.wait()
    if is_cancelled:
        stopping.cancel()
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([stopping, *killing])
    assert stopping.cancelled() is is_cancelled
    assert server._process.process.returncode is not None


def test_the_id_of_a_large_response_is_seen_at_both_ends_and_never_in_a_text():
    assert id_of(b'{"jsonrpc": "2.0", "id": 7, "result": {', b"") == 7
    assert id_of(b'{"id":7,"result":', b"") == 7
    assert id_of(b'{"result":{}', b'"x"}]},"jsonrpc":"2.0","id":12}') == 12
    assert id_of(b'{"result":{}', b'"x"}]},"id":12,"jsonrpc":"2.0"}') == 12
    assert id_of(b'{"result":{}', b'\\"id\\":5}"}]}}') is None
    assert id_of(b'{"result":{}', b'"structuredContent":{"a":1,"id":5}}}') is None
    assert id_of(b'{"jsonrpc":"2.0","method":"notifications/x"', b'"params":{"id":5}}') is None


def test_nothing_of_mcp_is_imported_before_a_server_is_started():
    program = (
        "import sys, agent_loop.toolbox.mcp_servers\n"
        "assert not [m for m in sys.modules if m.partition('.')[0] in ('mcp', 'httpx2', 'anyio')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


OTHERS: set[int] = set()
"""Children of this process that earlier tests left, as a pool of processes."""


@pytest.fixture(autouse=True)
def other_children() -> None:
    OTHERS.clear()
    OTHERS.update(_children())


def _children(parent: int | None = None) -> list[int]:
    """The children of a process that still run, but `OTHERS`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(place.name)
        if int(fields[1]) == (parent or os.getpid()) and fields[0] != "Z" and pid not in OTHERS:
            found.append(pid)
    return found
