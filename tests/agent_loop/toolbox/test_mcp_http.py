"""MCP servers over streamable HTTP, as tools: a server of the SDK on loopback, and bad ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agent_loop.calls.client import ToolClient
from agent_loop.deadline import Deadline
from agent_loop.toolbox.entries import toolbox_of
from agent_loop.toolbox.mcp_client import http
from agent_loop.toolbox.mcp_client.results import HEADER_MISMATCH
from agent_loop.toolbox.mcp_servers import McpProvider
from agent_loop.toolbox.toolbox import Toolbox
from agent_loop.watchdog import Watchdog
from config.compat import timeout
from config.tool_entries import ToolEntry
from tests.agent_loop.toolbox.mcp_rig import listed, opened, resident_mb, until
from tests.fakes.mcp_server import over_http
from tests.ports import free_ports
from tool_server.wire.protocol import Fault, ToolTimeout, ToolUnavailable

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:(uvicorn|websockets).*")


@pytest.mark.parametrize("json_response", [False, True])
async def test_a_server_over_http_answers_many_calls_at_once(tmp_path, json_response):
    async with (
        over_http(json_response=json_response) as server,
        opened(tmp_path, server.url) as rig,
    ):
        assert rig.tools["echo"].idempotent  # type: ignore[attr-defined]
        texts = await asyncio.gather(*(rig.text("echo", text=str(n)) for n in range(30)))
        assert texts == [str(n) for n in range(30)]
        assert await rig.text("echo", text="half \ud800 of a pair") == "half ? of a pair"
        assert (await rig.ask("divide", a=1, b=0)).text == "error: Error executing tool divide"
        with pytest.raises(ToolUnavailable, match="more than 1 MiB of text"):
            await rig.ask("long")
        waiting = asyncio.create_task(rig.ask("wait", key="w"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await rig.text("echo", text="goes on") == "goes on"


async def test_a_large_event_fails_its_call_alone(tmp_path):
    async with over_http() as server, opened(tmp_path, server.url) as rig:
        with pytest.raises(ToolUnavailable, match=r"'large' of mcp server .*more than 4 MiB"):
            await rig.ask("large")
        assert await rig.text("echo", text="goes on") == "goes on"


async def test_the_token_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sesame")
    async with over_http(token="sesame") as server:
        async with opened(tmp_path, server.url, token="MY_TOKEN", only=["echo"]) as rig:
            assert await rig.text("echo", text="in") == "in"
        monkeypatch.setenv("MY_TOKEN", "wrong")
        with pytest.raises(ToolUnavailable, match=r"HTTP 401.*is the token in MY_TOKEN right\?"):
            await listed(ToolEntry(mcp=server.url, token="MY_TOKEN"), 5.0)
        with pytest.raises(ToolUnavailable, match="name its environment variable with `token`"):
            await listed(ToolEntry(mcp=server.url), 5.0)
    assert set(server.tokens) == {"Bearer sesame", "Bearer wrong", ""}


async def test_passing_faults_are_tried_again_and_a_refusal_is_not(tmp_path):
    async with over_http() as server, opened(tmp_path, server.url) as rig:
        server.script[:] = [503, 429]
        result = (await rig.ask("echo", text="a")).result
        assert result is not None and result.attempts == 3
        server.script[:] = [500]
        with pytest.raises(ToolUnavailable, match=r"HTTP 500 scripted; it may have been executed"):
            await rig.ask("divide", a=1, b=1)
        server.script[:] = [403]
        with pytest.raises(ToolUnavailable, match="for tool='echo' answers HTTP 403 scripted"):
            await rig.ask("echo", text="a")
        assert await rig.text("echo", text="goes on") == "goes on"


async def test_a_server_that_is_away_is_named_and_comes_back(tmp_path):
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(ToolUnavailable, match=f"mcp server {url} did not start: no connection"):
        await listed(ToolEntry(mcp=url), 5.0)
    async with over_http(port=port):
        provider = opened(tmp_path, url)
        rig = await provider.__aenter__()
        assert await rig.text("count", key="a") == "1"
    with pytest.raises(ToolUnavailable, match=r"0 attempts, .* for the server, last: no conn"):
        await rig.ask("count", key="a")
    async with over_http(port=port):
        assert await rig.text("count", key="a") == "1"
        await provider.__aexit__(None, None, None)


async def test_trajectories_that_begin_while_the_server_is_away_wait_for_it_together(
    monkeypatch, caplog
):
    [port] = free_ports(1)
    entry, starts = ToolEntry(mcp=f"http://127.0.0.1:{port}/mcp"), []
    connect = McpProvider.connect
    monkeypatch.setattr(McpProvider, "connect", lambda self: starts.append(1) or connect(self))
    dog = Watchdog(60.0)

    async def trajectory(toolbox: Toolbox, limit_s: float) -> None:
        with dog.watch("shop", "shop:1"):
            async with timeout(limit_s):
                await toolbox.open(Deadline.after(limit_s, "trajectory_s"))

    async with ToolClient("http://unused", limiter=None) as client:
        toolbox = toolbox_of([entry], client, topk=1)
        with pytest.raises(ToolUnavailable, match="no connection"):
            await toolbox.open()
        assert len(starts) == 1
        waiting = [asyncio.create_task(trajectory(toolbox, 60.0)) for _ in range(9)]
        await until(lambda: [a.waits_for for a in dog.under_way.values()] == ["server"] * 9)
        assert len(starts) <= 4
        with pytest.raises(TimeoutError):  # its own deadline
            await trajectory(toolbox, 0.1)
        assert len(dog.under_way) == 9
        assert caplog.text.count("trying again until the trajectories' deadline") == 1
        async with over_http(port=port):
            await asyncio.gather(*waiting)
            assert "echo" in toolbox.specs


async def test_a_listing_ends_at_the_last_deadline_with_its_fault_and_a_refusal_ends_it_at_once():
    async def open_in(url: str, limit_s: float) -> None:
        async with ToolClient("http://unused", limiter=None) as client:
            toolbox = toolbox_of([ToolEntry(mcp=url)], client, topk=1)
            await toolbox.open(Deadline.after(limit_s, "trajectory_s"))

    [port] = free_ports(1)
    with pytest.raises(ToolUnavailable, match="no connection"):
        await open_in(f"http://127.0.0.1:{port}/mcp", 0.5)
    async with over_http(token="sesame") as server, timeout(30):
        with pytest.raises(ToolUnavailable, match="HTTP 401"):
            await open_in(server.url, 1000.0)


# --- servers that break the rules -----------------------------------------------------------------

ABOUT = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "bad", "version": "1"},
}
TOOL = {"name": "t", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
Answer = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(
    answer: Answer, sessions: list[str] | None = None, to: str = "tools/call"
) -> AsyncIterator[str]:
    """A server that shakes hands and lists one tool; `answer` answers its calls, or the method
    `to`. With `sessions`, the list of the sessions that it knows, it refuses others."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        method, request_id = message["method"], message.get("id")
        headers = {}
        if sessions is not None and method == "initialize":
            sessions.append(f"s{len(sessions)}")
            headers["mcp-session-id"] = sessions[-1]
        elif sessions is not None and method in ("tools/list", "tools/call"):
            is_known = request.headers.get("mcp-session-id") in sessions
            if not is_known:
                return web.Response(status=404, text="who are you?")
        if method == to:
            return await answer(request, request_id)
        if request_id is None:
            return web.Response(status=202)
        known = {"initialize": ABOUT, "tools/list": {"tools": [TOOL]}}
        if method not in known:
            return web.Response(status=400)
        answered = {"jsonrpc": "2.0", "id": request_id, "result": known[method]}
        return web.json_response(answered, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/mcp", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    finally:
        await runner.cleanup()


async def pleasing(_: web.Request, request_id: Any) -> web.StreamResponse:
    result = {"content": [{"type": "text", "text": "fine"}]}
    return web.json_response({"jsonrpc": "2.0", "id": request_id, "result": result})


async def endless_events(request: web.Request, request_id: Any) -> web.StreamResponse:
    """Many notifications, requests of the server, and then the answer."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    note = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"xxxxxxxx"}}'
    ask = b'{"jsonrpc":"2.0","id":"s","method":"sampling/createMessage","params":{}}'
    for number in range(1000):
        await response.write(b"data: " + (note if number % 100 else ask) + b"\n\n")
    text = b'{"content":[{"type":"text","text":"after all"}]}'
    answer = b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (request_id, text)
    await response.write(b"data: " + answer + b"\n\n")
    return response


async def endless_json(request: web.Request, _: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b"x" * 100_000)


async def compressed(request: web.Request, request_id: Any) -> web.StreamResponse:
    response = web.json_response({"jsonrpc": "2.0", "id": request_id, "result": {}})
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def compressed_fault(request: web.Request, _: Any) -> web.StreamResponse:
    response = web.json_response({"why": "too busy"}, status=503)
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def half(request: web.Request, _: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json"})
    response.content_length = 100
    await response.prepare(request)
    await response.write(b'{"jsonrpc"')
    assert request.transport is not None
    request.transport.close()
    return response


async def hanging(request: web.Request, _: Any) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def elsewhere(request: web.Request, _: Any) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://127.0.0.1:1/secret?key=5"})


@pytest.mark.parametrize("at", ["initialize", "tools/call"])
@pytest.mark.parametrize(
    ("status", "code"), [(403, None), (401, -32001), (400, -32602), (200, -32602), (200, -32603)]
)
async def test_a_server_that_repeats_the_token_shows_it_to_nobody(
    tmp_path, monkeypatch, caplog, status, code, at
):
    words = "no access for sesame"

    async def repeat(_: web.Request, request_id: Any) -> web.StreamResponse:
        if code is None:
            return web.Response(text=words, status=status)
        error = {"code": code, "message": words}
        answer = {"jsonrpc": "2.0", "id": request_id, "error": error}
        return web.json_response(answer, status=status)

    monkeypatch.setenv("MY_TOKEN", "sesame")
    caplog.set_level("INFO")
    async with answering(repeat, to=at) as url:
        with pytest.raises(Fault, match=r"no access for \*\*\*") as caught:
            async with opened(tmp_path, f"{url}?key=pw", token="MY_TOKEN") as rig:
                await rig.ask("t")
    assert "sesame" not in str(caught.value) and "key=pw" not in f"{caught.value} {caplog.text}"


async def test_a_session_that_the_server_forgot_is_opened_again(tmp_path):
    sessions: list[str] = []
    async with answering(pleasing, sessions) as url, opened(tmp_path, url) as rig:
        assert await rig.text("t") == "fine"
        sessions[:] = ["another", "one"]  # as after a restart
        result = (await rig.ask("t")).result
        assert result is not None and (result.attempts, result.body["text"]) == (1, "fine")
        assert sessions == ["another", "one", "s2"]


async def test_a_session_whose_headers_do_not_fit_any_more_is_opened_again(tmp_path):
    sessions: list[str] = []

    async def answer(request: web.Request, request_id: Any) -> web.StreamResponse:
        if request.headers["mcp-session-id"] != "s0":
            return await pleasing(request, request_id)
        error = {"code": HEADER_MISMATCH, "message": "header mismatch"}
        body = {"jsonrpc": "2.0", "id": request_id, "error": error}
        return web.json_response(body, status=400)

    async with answering(answer, sessions) as url, opened(tmp_path, url) as rig:
        assert await rig.text("t") == "fine" and sessions == ["s0", "s1"]


async def test_notifications_are_dropped_and_requests_refused(tmp_path):
    async with answering(endless_events) as url, opened(tmp_path, url) as rig:
        assert await rig.text("t") == "after all"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (endless_json, "more than 4 MiB"),
        (compressed, r"the answer is compressed \(gzip\)"),
        (compressed_fault, "HTTP 503"),
        (half, "attempts.*(RemoteProtocolError|ReadError)"),
        (elsewhere, "4 attempts.*Redirect to http://127.0.0.1:1/secret not followed"),
    ],
)
async def test_a_bad_answer_is_a_fault_of_its_call_alone(tmp_path, answer, message):
    before = resident_mb()
    async with answering(answer) as url, opened(tmp_path, url) as rig:
        connection = rig.provider._connection
        with pytest.raises(ToolUnavailable, match=message):
            await rig.ask("t")
        assert rig.provider._connection is connection and connection is not None
        assert not connection.is_over
    assert resident_mb() - before < 60


async def test_a_server_that_hangs_is_cut_off_and_closing_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "NOTIFY_S", 0.2)
    async with answering(hanging) as url, opened(tmp_path, url, timeout=0.3) as rig:
        with pytest.raises(ToolTimeout, match=f"no answer from mcp server {url} for tool='t'"):
            await rig.ask("t")
