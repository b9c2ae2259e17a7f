"""Hostile and malformed answers: each gives a value or a typed fault, within a bound of memory."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.agent_loop.calls.test_client import CALL, GOOD, client
from tests.fakes.tool_server import running
from tool_server.sandbox import Limits
from tool_server.wire.http import AWAY, LATER
from tool_server.wire.protocol import (
    Fault,
    ToolCall,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
    cell_call,
    run_code_call,
)
from tool_server.wire.responses import MAX_OTHER_ANSWER_BYTES, decode, max_answer_bytes

SEARCH = ToolCall(tool="retrieve", payload={"queries": ["a"]})
RUN = run_code_call("1", "")
CELL = cell_call("x = 1", "", "s")


def reply(body: bytes, **headers: str) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": "application/json"} | headers)


@asynccontextmanager
async def saying(answer: bytes, repeat: bytes = b"") -> AsyncIterator[tuple[str, list[bytes]]]:
    """URL of a server that says these bytes to each request, then `repeat` without end; and the
    requests that it got."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seen.append(await reader.readuntil(b"}"))
            writer.write(answer)
            await writer.drain()
            while repeat:
                writer.write(repeat)
                await writer.drain()
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def outcome(url: str | list[str], call: ToolCall = CALL, **more: Any) -> ToolResult | Fault:
    async with client(url, **{"max_retries": 0, "caches": False} | more) as tools:
        try:
            return await tools.call(call)
        except Fault as error:
            return error


def http(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers]) + b"\r\n\r\n" + body


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head", [b"Transfer-Encoding: chunked", b"Content-Length: 1500000000", b""]
)
@pytest.mark.parametrize("status", [b"200 OK", b"500 Broken"])
async def test_of_an_answer_without_end_no_more_than_the_bound_is_kept(head, status):
    chunk = b"a" * 65_536
    repeat = b"10000\r\n" + chunk + b"\r\n" if b"chunked" in head else chunk
    answer = http(b"", *filter(None, [head])).replace(b"200 OK", status)
    async with saying(answer, repeat) as (url, _):
        tracemalloc.start()
        try:
            error = await outcome(url)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert isinstance(error, ToolUnavailable) and not isinstance(error, ToolTimeout)
    assert peak < 4 * MAX_OTHER_ANSWER_BYTES
    if status == b"200 OK":
        assert f"the answer of {url} for tool='calculate' has more than 1 MiB" in str(error)


async def test_an_answer_of_the_largest_size_is_read_and_one_byte_more_is_not():
    empty = len(json.dumps({"result": ""}))
    text = "a" * (MAX_OTHER_ANSWER_BYTES - empty)
    async with running([{"result": text}, {"result": text + "a"}]) as server:
        read, refused = await outcome(server.url), await outcome(server.url)
    assert isinstance(read, ToolResult) and read.body == {"result": text}
    assert isinstance(refused, ToolUnavailable) and len(server.seen) == 2


async def test_an_answer_that_is_too_large_is_not_asked_for_again():
    async with running([{"result": "a" * (MAX_OTHER_ANSWER_BYTES + 1)}]) as server:
        error = await outcome(server.url, max_retries=3)
    assert "the output of programs" in str(error) and len(server.seen) == 1


async def test_the_largest_output_of_our_sandbox_is_within_the_bound():
    stream = "\0" * Limits().output_bytes
    run = {"status": "Finished", "return_code": 0, "stdout": stream, "stderr": stream}
    answer = {"status": "Success", "message": "", "run_result": run}
    assert len(json.dumps(answer)) + 65_536 < max_answer_bytes("run_code")
    async with running([answer]) as server:
        result = await outcome(server.url, RUN)
    assert isinstance(result, ToolResult) and result.body["run_result"]["stdout"] == stream


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "what is this"])
async def test_a_compressed_answer_is_refused_and_never_decompressed(encoding):
    bomb = gzip.compress(b'{"result": "' + b"a" * 2_000_000 + b'"}')
    async with running([reply(bomb, **{"Content-Encoding": encoding})]) as server:
        error = await outcome(server.url, max_retries=3)
    assert isinstance(error, ToolUnavailable) and f"Content-Encoding='{encoding}'" in str(error)
    assert len(server.seen) == 1


async def test_an_answer_that_drips_costs_the_deadline_and_no_more():
    async with saying(http(b"", b"Content-Length: 100000"), b"a") as (url, _):
        error = await outcome(url, timeout_s=0.05)
    assert isinstance(error, ToolTimeout)


# --- malformed answers ----------------------------------------------------------------------------

MALFORMED = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"\x00\xff",
    b'{"result": null}',
    b'{"result": {}}',
    b'{"result": true}',
    b'{"result": NaN}',
    b'{"result": -Infinity}',
    b'{"result": 1e999}',
    b'{"result": "\\ud83d", "error": NaN}',
    b'{"result": ' + b"9" * 5000 + b"}",
    b'{"x": ' + b"[" * 100_000,
    b'{"result": "1", "error": "2"}',
    b'{"result": "2"} and more',
    b"<html>sign in</html>",
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:40]))
async def test_a_malformed_answer_is_a_fault_of_the_infrastructure_and_tried_again(body):
    async with running([lambda _: reply(body)]) as server:
        error = await outcome(server.url, max_retries=1)
    assert isinstance(error, ToolUnavailable), error
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "result",
    [
        "null",
        "[null]",
        "[[null]]",
        "[[], []]",
        '[[{"document": null}]]',
        '[[{"document": {"contents": null}}]]',
        '[[{"document": {"contents": "a"}, "score": NaN}]]',
        '[[{"document": {"contents": "a"}, "score": null}]]',
    ],
)
async def test_passages_of_another_form_are_malformed(result):
    async with running([lambda _: reply(f'{{"result": {result}}}'.encode())]) as server:
        error = await outcome(server.url, SEARCH)
    assert isinstance(error, ToolUnavailable), error


@pytest.mark.parametrize(
    "headers",
    [
        [b"Content-Length: 15", b"Content-Length: 14"],
        [b"Content-Length: -1"],
        [b"Content-Length: 15", b"Transfer-Encoding: chunked"],
        [b"X: " + b"a" * 100_000],
        [b"X%d: a" % number for number in range(10_000)],
        [b"Content-Length: 9999"],
        [b"\x00\x01: a"],
    ],
    ids=lambda headers: repr(headers[-1][:30]),
)
async def test_wrong_headers_are_a_fault_of_the_infrastructure(headers):
    async with saying(http(b'{"result": "2"}', *headers)) as (url, _):
        error = await outcome(url)
    assert isinstance(error, ToolUnavailable), error


async def test_cookies_of_a_server_are_not_sent_back():
    async with (
        running([(GOOD, {"Set-Cookie": "id=1"})]) as server,
        client(server.url, caches=False) as tools,
    ):
        for _ in range(2):
            await tools.call(CALL)
    assert "Cookie" not in server.headers[1]


tool_calls = st.sampled_from([CALL, SEARCH, RUN, CELL, ToolCall(tool="other", payload={})])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda own: (
        st.lists(own, max_size=3)
        | st.dictionaries(
            st.sampled_from(["result", "status", "run_result", "stdout", "document", "contents"]),
            own,
            max_size=4,
        )
    ),
    max_leaves=12,
)
bodies = st.binary(max_size=80) | values.map(lambda value: json.dumps(value).encode())


@given(tool_calls, bodies)
def test_any_bytes_are_a_body_or_malformed(call, body):
    try:
        value = decode(call, body)
    except (ValueError, RecursionError):
        return
    assert isinstance(value, dict)
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@given(tool_calls, st.integers(200, 599) | st.sampled_from(sorted(LATER | AWAY)), bodies)
def test_any_answer_is_a_result_or_a_typed_fault(call, status, body):
    async def ask() -> None:
        async with running([lambda _: web.Response(status=status, body=body)]) as server:
            got = await outcome(server.url, call)
            assert isinstance(got, Fault) or got.tool == call.tool
            assert (len(server.seen) == 1) == (status not in LATER | AWAY or not call.idempotent)

    asyncio.run(ask())


# --- redirects and calls that are sent once -------------------------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("call", [CALL, CELL], ids=["pure", "cell"])
async def test_a_redirect_is_not_followed(status, call, monkeypatch):
    monkeypatch.setenv("TOOL_SERVER_TOKEN", "s3cret")
    async with running([GOOD]) as other:
        at = f"{other.url}/calculate?key=hidden"
        async with running([(status, {"Location": at})]) as server:
            error = await outcome(server.url, call, max_retries=3)
    assert isinstance(error, ToolUnavailable)
    assert f"for tool='{call.tool}' redirects to {other.url} (HTTP {status})" in str(error)
    assert "tool_config.server_url" in str(error) and "hidden" not in str(error)
    assert (len(server.seen), other.seen) == (1, [])


@pytest.mark.parametrize(
    ("answer", "is_final"),
    [
        (b"", False),
        (b"HTTP/1.1 503 X\r\nX-Executed: no\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", True),
        (b"HTTP/1.1 503 X\r\nX-Executed: no\r\nContent-Length: 9\r\n\r\n{", False),
        (b"not HTTP\r\n\r\n", True),
    ],
    ids=repr,
)
async def test_a_cell_is_sent_again_only_after_an_answer_that_it_was_not_executed(answer, is_final):
    is_final = is_final or not answer  # a connection that broke after the request was written
    async with saying(answer) as (url, seen):
        error = await outcome(url, CELL, max_retries=2)
    assert isinstance(error, ToolUnavailable)
    assert (len(seen) == 1) == is_final


@pytest.mark.slow
async def test_a_cell_is_not_sent_to_another_server_when_the_first_one_hangs():
    async with running(["hang"]) as one, running(["hang"]) as two:
        # a busy server sees the call late
        error = await outcome([one.url, two.url], CELL, timeout_s=3.0)
    assert isinstance(error, ToolTimeout)
    assert len(one.seen) + len(two.seen) == 1
