"""The gateway's server over real HTTP: protocols, errors, bounds, fairness and tools."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agent_loop.gateway import server
from agent_loop.gateway.server import MOST_VALUES, Address, Gateway, Pace
from agent_loop.gateway.session import Session
from agent_loop.toolbox.own import SPECS
from agent_loop.turns.turn_loop import Generated, Observation
from tests.agent_loop.gateway.test_session import session_of
from tool_server.wire.protocol import ToolUnavailable

ASKED = {"model": "m", "messages": [{"role": "user", "content": "u"}], "max_tokens": 9}
PATHS = {
    "/v1/chat/completions": ASKED,
    "/v1/messages": ASKED,
    "/v1/responses": {"model": "m", "input": "u"},
}


class Site:
    """A gateway with sessions, and a client."""

    def __init__(self) -> None:
        self.gateway, self.http = Gateway(), aiohttp.ClientSession()

    async def open(self, session: Session, act: Any = None) -> Address:
        session.act = act or session.act
        return await self.gateway.open(session)

    async def post(self, url: str, body: Any) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.http.post(url, data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] in ("{", "[") else text


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.http.close()
    await site.gateway.close()


@pytest.mark.parametrize("path", PATHS)
async def test_each_protocol_says_the_policy_s_words_whole_and_as_a_stream(site: Site, path: str):
    address = await site.open(session_of("hermes", ["well said<|im_end|>"] * 2))
    status, body = await site.post(address.url + path, PATHS[path])
    assert status == 200 and "well said" in json.dumps(body)
    status, stream = await site.post(address.url + path, {**PATHS[path], "stream": True})
    assert status == 200 and "said" in stream and "data: " in stream


@pytest.mark.parametrize("name", ["policy", "org/name", "org%2Fname"])
async def test_a_model_of_any_name_has_the_facts_that_both_kinds_of_clients_read(
    site: Site, name: str
):
    address = await site.open(session_of("hermes", []))
    for end in ("", "?beta=true"):
        async with site.http.get(f"{address.openai}/models/{name}{end}") as answer:
            facts = await answer.json()
        assert answer.status == 200 and facts["id"] == name.replace("%2F", "/")
        assert (facts["object"], facts["type"]) == ("model", "model")
    async with site.http.get(f"{address.openai}/models") as answer:
        listed = await answer.json()
    assert [each["id"] for each in listed["data"]] == ["policy"] and not listed["has_more"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"no json", 400), (b"[" * 9999, 400), (b"{}", 400), (b'"' + b"x" * (9 << 20) + b'"', 413)],
)
async def test_a_body_that_is_none_is_refused_in_the_protocol_s_own_form(
    site: Site, path: str, body: bytes, status: int
):
    address = await site.open(session_of("hermes", []))
    found, answer = await site.post(address.url + path, body)
    assert found == status and answer["error"]["message"]
    assert ("type" in answer) == (path == "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
async def test_half_of_a_surrogate_pair_ends_no_request(site: Site, path: str):
    address = await site.open(session_of("hermes", ["so<|im_end|>"]))
    body = json.dumps(PATHS[path]).replace('"u"', r'"cut \ud83d"').encode()
    status, answer = await site.post(address.url + path, body)
    assert status == 200, answer


async def test_nothing_but_a_session_s_address_is_answered(site: Site):
    address = await site.open(session_of("hermes", []))
    assert address.url.startswith("http://127.0.0.1:") and len(address.key) == 64
    for url in (address.url[:-1] + "x/v1/messages", address.url.rsplit("/s/")[0] + "/v1/messages"):
        assert (await site.post(url, ASKED))[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/embeddings", 404, "v1/chat/completions"),
        ("POST", "", 404, "no such path"),
        ("GET", "/v1/messages", 405, "v1/messages takes POST"),
        ("POST", "/v1/models", 405, "v1/models takes GET"),
        ("GET", "/mcp", 405, "mcp takes POST"),
    ],
)
async def test_another_path_or_method_is_refused_with_those_that_are_served(
    site: Site, method: str, path: str, status: int, words: str
):
    address = await site.open(session_of("hermes", []))
    async with site.http.request(method, address.url + path) as answer:
        assert answer.status == status
        assert words in (await answer.json())["error"]["message"]


async def test_the_requests_of_a_session_end_with_it(site: Site):
    started, ended = asyncio.Event(), asyncio.Event()

    async def engine(*_: Any, **__: Any) -> Generated:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    session = session_of("hermes", [], engine=engine)
    address = await site.open(session)
    asking = asyncio.ensure_future(site.post(address.openai + "/chat/completions", ASKED))
    await started.wait()
    await site.gateway.shut(session)
    assert ended.is_set()
    with pytest.raises(aiohttp.ClientError):
        await asking


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/nothing", "/v1/models", "x/v1/messages"]
)
async def test_a_flood_by_one_agent_leaves_the_others_their_turn(site: Site, path: str):
    flood, calm = session_of("hermes", []), session_of("hermes", ["so<|im_end|>"])
    flooding, address = await site.open(flood), await site.open(calm)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as many:
        url = flooding.url + path
        sent = [asyncio.ensure_future(many.post(url, data=b"{}")) for _ in range(600)]
        status, _ = await site.post(address.openai + "/chat/completions", ASKED)
        waiting = sum(not task.done() for task in sent)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
    assert status == 200 and waiting > 200  # the flood waits, and the other session did not
    senders = [site.gateway._strangers, *site.gateway._served.values()]
    assert all(each.waiting <= server.MOST_WAITING for each in senders)


async def test_what_is_no_http_writes_nothing_to_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
):
    await site.open(session_of("hermes", []))
    for number in range(9):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        if number % 2:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.read(10)
        writer.write([b"x", b"\n\x1b[2J", b"GET / HTTP/9\r\n", b"\xff\0"][number % 4] * 9999)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
    assert not caplog.records


async def test_an_error_that_no_handler_catches_is_in_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def torn(*_: Any) -> Any:
        raise KeyError("torn")

    monkeypatch.setattr(Gateway, "_handle", torn)
    address = await site.open(session_of("hermes", []))
    assert (await site.post(address.openai + "/chat/completions", ASKED))[0] == 500
    assert "KeyError: 'torn'" in caplog.text


async def test_connections_that_come_too_fast_are_read_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "CONNECTIONS_PER_SECOND", 1e-6)
    monkeypatch.setattr(server, "MOST_NEW", 2)
    await site.open(session_of("hermes", []))
    writers = [(await asyncio.open_connection("127.0.0.1", site.gateway.port))[1] for _ in range(3)]
    runner = site.gateway._runner
    assert runner is not None and runner.server is not None
    while len(runner.server.connections) < 3:  # noqa: ASYNC110 - the server sets no event
        await asyncio.sleep(0)
    transports: list[Any] = [each.transport for each in runner.server.connections]
    assert sorted(each.is_reading() for each in transports) == [False, True, True]
    for each in writers:
        each.close()


async def test_connections_of_a_sandbox_above_its_pace_wait_and_those_before_them_are_served(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    address = await site.open(session_of("hermes", []))
    monkeypatch.setattr(server, "Pace", partial(Pace, 1e-6, 2))
    listener = socket.create_server(("127.0.0.1", 0))
    asked = f"GET {urlsplit(address.openai).path}/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with site.gateway.serving(listener):
        streams = [await asyncio.open_connection(*listener.getsockname()[:2]) for _ in range(4)]
        for _, writer in streams:
            writer.write(asked.encode())
        for reader, _ in streams[:2]:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert [reader._buffer for reader, _ in streams[2:]] == [b"", b""]  # type: ignore
    assert listener.fileno() == -1
    for reader, _ in streams[:2]:
        assert await reader.read()  # to its end: the connections of a session end with it
    for _, writer in streams:
        writer.close()


async def test_the_listener_of_a_sandbox_is_closed_also_if_its_end_is_cancelled(site: Site):
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        async with site.gateway.serving(listener):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert listener.fileno() == -1


async def test_the_code_of_a_tool_that_raises_loses_the_session_as_a_loop_error(site: Site):
    async def act(action: Any) -> Observation:
        raise KeyError("torn")

    session = session_of("hermes", [])
    address = await site.open(session, act)
    status, body = await site.post(address.mcp, called("calculate", {"expression": "1"}))
    assert status == 500 and "KeyError" in body["error"]["message"]
    assert isinstance(session.crash, KeyError) and session.over.is_set()


# --- tools ------------------------------------------------------------------------------------


def called(name: Any, arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}


async def test_tools_are_called_through_the_toolbox_and_recorded_in_the_last_turn(site: Site):
    session = session_of("hermes", ["so<|im_end|>"])
    address = await site.open(session)
    await site.post(address.openai + "/chat/completions", ASKED)
    first = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    _, begun = await site.post(address.mcp, first)
    assert begun["result"]["protocolVersion"] == "2025-06-18"
    assert (await site.post(address.mcp, {"jsonrpc": "2.0", "method": "notifications/x"}))[0] == 202
    _, listed = await site.post(address.mcp, {"jsonrpc": "2.0", "id": 2, "method": "tools/list"})
    assert [tool["name"] for tool in listed["result"]["tools"]] == [*SPECS]
    _, done = await site.post(address.mcp, called("calculate", {"expression": "1"}))
    assert done["result"]["content"][0]["text"] == 'ran {"expression": "1"}'
    (row,) = session.rollouts()
    assert [(c.action, c.turn, c.status) for c in row.calls] == [("calculate", 1, "ok")]


async def test_a_body_whose_values_would_hold_the_event_loop_is_refused(
    site: Site,
):
    address = await site.open(session_of("hermes", []))
    lists = [[] for _ in range(MOST_VALUES // 2 + 1)]
    status, said = await site.post(address.openai + "/chat/completions", {"messages": lists})
    assert status == 413 and "too many values" in said["error"]["message"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({}, -32600),
        ([], -32600),
        ({"id": 1, "method": "resources/list"}, -32601),
        (called(5, {}), -32602),
        (called("calculate", [1]), -32602),
    ],
)
async def test_a_message_that_is_none_of_mcp_s_gets_an_error(site: Site, message: Any, code: int):
    address = await site.open(session_of("hermes", []))
    _, answer = await site.post(address.mcp, message)
    assert answer["error"]["code"] == code


async def test_a_tool_that_is_down_loses_the_session(site: Site):
    async def act(action: Any) -> Observation:
        fault = ToolUnavailable("no server", tool="calculate")
        fault.server_wait_s = 30.0
        raise fault

    session = session_of("hermes", ["so<|im_end|>"])
    address = await site.open(session, act)
    await site.post(address.openai + "/chat/completions", ASKED)
    _, answer = await site.post(address.mcp, called("calculate", {}))
    assert "no server" in answer["error"]["message"]
    assert session.fault is not None and session.fault.tool == "calculate"
    assert [c.server_wait_s for row in session.rollouts() for c in row.calls] == [30.0]


# --- agents that hang up ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("content-length: 99999", b'{"model": "m", '),
        ("transfer-encoding: chunked", b"zz\r\n"),
        ("content-encoding: gzip\r\ncontent-length: 5", b"nogzp"),
        ("content-length: 5000", json.dumps({**ASKED, "stream": True}).ljust(5000).encode()),
    ],
)
async def test_an_agent_that_hangs_up_or_breaks_a_body_loses_its_request_only(
    site: Site, head: str, body: bytes
):
    session = session_of("hermes", ["well<|im_end|>"] * 2)
    address = await site.open(session)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    path = address.url.split("/s/")[1]
    request = f"POST /s/{path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n"
    writer.write(request.encode() + body)
    await writer.drain()
    writer.close()
    status, _ = await site.post(address.openai + "/chat/completions", ASKED)
    await site.gateway.shut(session)
    assert status == 200 and session.crash is None and not session.over.is_set()
    assert await reader.read() is not None


async def test_the_header_of_ignored_fields_is_one_short_line(site: Site):
    address = await site.open(session_of("hermes", ["well<|im_end|>"]))
    body = {**ASKED, **{f"é{n}\r\nset-cookie: x": n for n in range(400)}}
    async with site.http.post(address.openai + "/chat/completions", json=body) as answer:
        assert answer.status == 200 and len(answer.headers["x-ignored-fields"]) <= 1000
        assert "set-cookie" not in answer.headers


async def test_more_messages_than_a_context_holds_are_refused_before_they_are_read(site: Site):
    address = await site.open(session_of("hermes", []))
    many = [{"role": "user", "content": "u"}] * 5000
    for path in ("/v1/messages/count_tokens", "/v1/messages"):
        status, body = await site.post(address.url + path, {**ASKED, "messages": many})
        assert status == 400 and "length <= 4096" in body["error"]["message"]


async def test_a_call_of_a_tool_before_the_first_request_is_in_the_first_row(site: Site):
    session = session_of("hermes", ["so<|im_end|>"])
    address = await site.open(session)
    await site.post(address.mcp, called("calculate", {"expression": "1"}))
    await site.post(address.openai + "/chat/completions", ASKED)
    (row,) = session.rollouts()
    assert [(c.action, c.turn, c.status) for c in row.calls] == [("calculate", 0, "ok")]
