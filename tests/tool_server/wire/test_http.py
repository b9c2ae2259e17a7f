"""What came over HTTP, and what fault it is: each row of the table of `tool_server.wire.http`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver

from tests.ports import free_ports
from tool_server.wire.http import MAX_ERROR_BYTES, SHOWN_ERROR, Peer, fault_of, plain_session, post
from tool_server.wire.protocol import Again, Fault, ToolRejected, ToolUnavailable

NEVER, COUNTED, UNTIL_DEADLINE = Again.NEVER, Again.COUNTED, Again.UNTIL_DEADLINE
PEER = Peer(
    name="the peer",
    tool="judge",
    address_key="base_url",
    remedy="is KEY its key?",
    refused="correct the options",
)
LIMIT = 1 << 20


@asynccontextmanager
async def saying(answer: bytes | None, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that reads a request, says these bytes and hangs up; None: it says nothing, and
    waits. `seen` gets the heads of the requests."""
    over, served = asyncio.Event(), asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n{}")
            if seen is not None:
                seen.append(head)
            if answer is None:
                await over.wait()
            writer.write(answer or b"")
            writer.close()
            await writer.wait_closed()
        served.release()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        over.set()
        await served.acquire()


def http(status: int, *headers: str, body: bytes = b"words") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def asked(url: str, peer: Peer = PEER, limit: int = LIMIT, connector: Any = None) -> bytes:
    async with plain_session({"X-Own": "1"}, **(connector or {})) as session:
        raw, response = await post(session, url, b"{}", peer, limit=limit)
        assert response.status == 200
        return raw


async def fault(answer: bytes | None, peer: Peer = PEER) -> Fault:
    async with saying(answer) as url:
        with pytest.raises(Fault) as caught:
            await asked(url, peer)
    assert caught.value.tool == peer.tool
    return caught.value


def told(fault: Fault) -> tuple[bool, Again, float | None, bool, bool]:
    return fault.executed, fault.again, fault.retry_after_s, fault.is_overload, fault.is_away


NO, MAYBE = "X-Executed: no", "X-Executed: maybe"
PAUSE = "Retry-After: 3"
NOT_HTTP = b"SSH-2.0-OpenSSH_9.6\r\n\r\n"
CUT = http(200, body=b"1234").replace(b"h: 4", b"h: 9")


@pytest.mark.parametrize(
    ("answer", "executed", "again", "pause_s", "is_overload", "is_away", "words"),
    [
        # the connection broke
        (b"", True, UNTIL_DEADLINE, None, False, False, "ServerDisconnectedError"),
        (b"HTTP/1.1 200 X\r\nCont", True, UNTIL_DEADLINE, None, False, False, "Disconnected"),
        (CUT, True, UNTIL_DEADLINE, None, False, False, "ClientPayloadError"),
        # it has no time for this
        (http(408), True, UNTIL_DEADLINE, None, False, False, "HTTP 408 words"),
        (http(425), True, UNTIL_DEADLINE, None, False, False, "HTTP 425"),
        (http(429), True, UNTIL_DEADLINE, None, True, False, "HTTP 429"),
        (http(429, PAUSE), True, UNTIL_DEADLINE, 3.0, True, False, "HTTP 429"),
        (http(429, MAYBE), True, UNTIL_DEADLINE, None, True, False, "HTTP 429"),
        (http(429, NO), False, UNTIL_DEADLINE, None, False, False, "HTTP 429"),
        (http(429, NO, PAUSE), False, UNTIL_DEADLINE, 3.0, True, False, "HTTP 429"),
        (http(503, PAUSE), True, UNTIL_DEADLINE, 3.0, True, False, "HTTP 503"),
        (http(503, NO), False, UNTIL_DEADLINE, None, False, False, "HTTP 503"),
        # a proxy whose server is away; a server of ours says what was executed
        (http(502), True, UNTIL_DEADLINE, None, False, True, "HTTP 502"),
        (http(504), True, UNTIL_DEADLINE, None, False, True, "HTTP 504"),
        (http(502, MAYBE), True, COUNTED, None, False, False, "HTTP 502"),
        (http(504, NO), False, UNTIL_DEADLINE, None, False, False, "HTTP 504"),
        # it failed
        (http(500), True, COUNTED, None, False, False, "HTTP 500 words"),
        (http(500, NO), False, UNTIL_DEADLINE, None, False, False, "HTTP 500"),
        (http(599, PAUSE), True, COUNTED, 3.0, False, False, "HTTP 599"),
        (NOT_HTTP, True, COUNTED, None, False, False, "Expected HTTP"),
        # asking again would not help
        (http(401), False, NEVER, None, False, False, "HTTP 401 words; is KEY its key?"),
        (http(403), False, NEVER, None, False, False, "the peer answers HTTP 403"),
        (http(404, NO), True, NEVER, None, False, False, "HTTP 404 words; is KEY"),
        (http(405), True, NEVER, None, False, False, "is KEY its key?"),
        (http(407), True, NEVER, None, False, False, "is KEY its key?"),
        (http(400), True, NEVER, None, False, False, "the request (HTTP 400 words); correct the"),
        (http(413, body=b""), True, NEVER, None, False, False, "refuses the request (HTTP 413);"),
        (
            http(200, "Content-Encoding: gzip"),
            *(True, NEVER, None, False, False),
            "Content-Encoding='gzip'",
        ),
        (http(200, body=b"x" * (LIMIT + 1)), True, NEVER, None, False, False, "more than 1 MiB"),
        (http(307), True, NEVER, None, False, False, "redirects to no valid address (HTTP 307)"),
        (
            http(302, "Location: http://other/x?secret"),
            *(True, NEVER, None, False, False),
            "the peer redirects to http://other (HTTP 302), and redirects are not followed; set "
            "base_url",
        ),
    ],
)
async def test_what_came_says_whether_it_was_executed_and_may_be_tried_again(
    answer: bytes,
    executed: bool,
    again: Again,
    pause_s: float | None,
    is_overload: bool,
    is_away: bool,
    words: str,
):
    found = await fault(answer)
    assert isinstance(found, ToolUnavailable)
    assert told(found) == (executed, again, pause_s, is_overload, is_away)
    assert words in str(found) and "secret" not in str(found)


class NoSuchHost(AbstractResolver):
    """As the system's for a name that nobody has; it asks no network."""

    async def resolve(self, *_: Any, **__: Any) -> list[Any]:
        raise OSError("no such name")

    async def close(self) -> None: ...


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
async def test_nothing_was_executed_without_a_connection(host: str):
    [port] = free_ports(1)
    with pytest.raises(ToolUnavailable, match=f"Cannot connect to host {host}") as caught:
        await asked(f"http://{host}:{port}/x", connector={"resolver": NoSuchHost()})
    assert told(caught.value) == (False, UNTIL_DEADLINE, None, False, True)


async def test_a_deadline_of_the_caller_is_no_fault():
    async with saying(None) as url:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asked(url), 0.05)


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_a_refusal_of_what_the_model_wrote_is_its_mistake(status: int):
    found = await fault(http(status), replace(PEER, model_writes=True))
    assert isinstance(found, ToolRejected)
    assert str(found) == f"HTTP {status} for tool='judge': words"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500, 503])
async def test_a_key_is_in_no_message(status: int):
    found = await fault(http(status, body=b"wrong key sesame"), replace(PEER, secret="sesame"))
    assert "sesame" not in f"{found}{PEER}"
    assert ("wrong key ***" in str(found)) == (status not in (401, 403))


@pytest.mark.parametrize("body", [b"x" * (2 * MAX_ERROR_BYTES), b"\xff" * 2000, b"\\ud800" * 999])
async def test_of_a_long_error_the_beginning_is_shown(body: bytes):
    found = await fault(http(500, body=body))
    assert len(str(found)) == len("HTTP 500 ") + SHOWN_ERROR


async def test_a_secret_in_a_url_is_in_no_message():
    async with saying(NOT_HTTP) as url:
        with pytest.raises(ToolUnavailable) as caught:
            await asked(f"{url}?key=sesame")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("status", [422, 503])
async def test_a_peer_may_have_statuses_for_mistakes_of_the_model(status: int):
    found = await fault(http(status), replace(PEER, mistakes=frozenset({status})))
    assert isinstance(found, ToolRejected) and str(found) == "words"


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
async def test_words_that_may_be_secret_are_not_shown(status: int):
    found = await fault(http(status, body=b'{"error": "sesame"}'), replace(PEER, shows=0))
    assert f"HTTP {status}" in str(found) and "sesame" not in str(found)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ('{"code": 3, "error": "too late"}', "too late"),
        ('{"error": {"message": "no"}}', '{"error": {"message": "no"}}'),
        ('{"error": ""}', '{"error": ""}'),
        (json.dumps({"error": "x" * 100_000}), "x" * SHOWN_ERROR),
        ("[Errno 2] " + "x" * 600, "[Errno 2] " + "x" * 490),
    ],
)
async def test_the_model_reads_the_error_s_text(said: str, read: str):
    answer = http(400, body=said.encode())
    for peer, before in (
        (replace(PEER, model_writes=True), "HTTP 400 for tool='judge': "),
        (replace(PEER, mistakes=frozenset({400})), ""),
    ):
        assert str(await fault(answer, peer)) == before + read


async def test_a_request_is_plain_and_its_answer_is_what_came():
    seen: list[bytes] = []
    async with saying(http(200, "Set-Cookie: a=b", body=b'{"a": 1}'), seen) as url:
        assert await asked(url, replace(PEER, secret="key"), limit=8) == b'{"a": 1}'
    own = (b"X-Own: 1", b"Authorization: Bearer key\r\n")
    for header in (b"Accept-Encoding: identity", *own, b"verl-mixed"):
        assert header in seen[0]


async def test_without_a_key_none_is_sent():
    seen: list[bytes] = []
    async with saying(http(200), seen) as url:
        await asked(url)
    assert b"Authorization" not in seen[0]


def test_a_status_alone_is_a_fault():
    found = fault_of(429, "slow down", PEER, pause_s=2.0)
    assert told(found) == (True, UNTIL_DEADLINE, 2.0, True, False)
