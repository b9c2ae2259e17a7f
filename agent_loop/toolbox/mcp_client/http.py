"""An MCP server over streamable HTTP: bounds and typed faults below the SDK's transport.

The SDK reads a JSON answer of any size, tells little of an HTTP error, and ends the connection for
all calls if a request of one of them fails. This transport of its HTTP client reads up to a bound,
and turns each fault of a request into a JSON-RPC error with a code of `results`.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from agent_loop.toolbox.mcp_client.results import (
    HTTP_FAILED,
    HTTP_STATUS,
    MAX_MESSAGE_BYTES,
    NOT_SENT,
    SESSION_LOST,
    TOO_LARGE,
    TOO_LARGE_TEXT,
    error_answer,
)
from tool_server.wire.responses import retry_after_s

CONNECT_S = 10.0
NOTIFY_S = 5.0
"""Longest time for a message that is no call: the SDK sends these one after the other, so one
without an answer would hold up the calls."""

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each URL, which may hold a key

_SESSION, _KIND, _JSON = "mcp-session-id", "content-type", "application/json"


@asynccontextmanager
async def http_streams(url: str, token: str) -> AsyncIterator[Any]:
    """The SDK's streams of messages.

    Args:
        token: bearer token; "" for none.
    """
    headers = {"accept-encoding": "identity"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx2.AsyncClient(
            transport=_BoundedTransport(limits=limits),
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
        ) as client,
        streamable_http_client(
            url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":  # waits for messages of the server; the SDK tries again
            return await super().handle_async_request(request)
        head = request.content[:200]
        if b'"id":' not in head or b'"method":' not in head:
            request.extensions["timeout"] = httpx2.Timeout(NOTIFY_S).as_dict()
        try:
            response = await super().handle_async_request(request)
            return await _bounded(response, _SESSION in request.headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _fault(NOT_SENT, f"no connection ({error or type(error).__name__})")
        except httpx2.TransportError as error:
            return _fault(HTTP_FAILED, f"{type(error).__name__}: {error}")


async def _bounded(response: httpx2.Response, had_session: bool) -> httpx2.Response:
    status, kind = response.status_code, response.headers.get(_KIND, "").lower()
    encoding = response.headers.get("content-encoding", "identity")
    is_json, raw = kind.startswith(_JSON), bytearray()
    if status < 400 and not is_json and encoding == "identity":
        return response  # events, which the SDK bounds
    try:
        # a small answer may be large when it is decompressed
        if encoding != "identity" and status < 400:
            return _fault(TOO_LARGE, f"the answer is compressed ({encoding}): switch it off")
        async for chunk in response.stream:  # type: ignore[union-attr]
            raw += chunk
            if len(raw) > MAX_MESSAGE_BYTES:
                return _fault(TOO_LARGE, TOO_LARGE_TEXT)
    finally:
        await response.aclose()
    if status == 404 and had_session:
        return _fault(SESSION_LOST, "the server does not know the session any more")
    if status < 400 or (is_json and b'"error"' in raw and b'"code"' in raw):
        kept = {
            name: response.headers[name] for name in (_KIND, _SESSION) if name in response.headers
        }
        return httpx2.Response(status, headers=kept, content=bytes(raw))
    text = raw.decode(errors="replace").strip() if encoding == "identity" else ""
    data = {"status": status, "retry_after_s": retry_after_s(response.headers)}
    return _fault(HTTP_STATUS, f"HTTP {status} {text}".strip(), data)


def _fault(code: int, message: str, data: Any = None) -> httpx2.Response:
    """A response that the SDK takes for a JSON-RPC error; it fills in the id."""
    content = error_answer(None, code, message, data)
    return httpx2.Response(400, headers={_KIND: _JSON}, content=content)
