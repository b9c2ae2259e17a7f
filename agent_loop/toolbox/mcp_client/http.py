"""An MCP server over streamable HTTP: bounds and typed faults below the SDK's transport.

The SDK reads a JSON answer of any size, and tells little of an HTTP error. This transport of its
HTTP client reads up to a bound, refuses compressed answers, and turns each fault of a request into
a JSON-RPC error with a code of `messages`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx2
from typing_extensions import Self

from agent_loop.toolbox.mcp_client.messages import (
    HTTP_FAILED,
    HTTP_STATUS,
    MAX_MESSAGE_BYTES,
    NOT_SENT,
    SESSION_LOST,
    TOO_LARGE,
    error_answer,
    reply_to,
    too_large,
)
from tool_server.wire.responses import retry_after_s

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

CONNECT_S = 10.0
NOTIFY_S = 5.0
"""Longest time for a message that is no call: the SDK sends these one after the other, so one
without an answer would hold up the calls."""

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each URL, which may hold a key

_SESSION = "mcp-session-id"
_JSON = {"content-type": "application/json"}


class HttpServer:
    """A transport of the SDK: an async context manager that gives the streams of messages.

    Args:
        url: of the server.
        token: bearer token; "" for none.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._stack = AsyncExitStack()
        self.closed = asyncio.Event()
        """Set when the connection is no longer used."""

    async def __aenter__(self) -> Any:
        from mcp.client.streamable_http import streamable_http_client

        headers = {"accept-encoding": "identity"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        async with AsyncExitStack() as stack:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            client = httpx2.AsyncClient(
                transport=_BoundedTransport(httpx2.AsyncHTTPTransport(limits=limits)),
                headers=headers,
                timeout=httpx2.Timeout(None, connect=CONNECT_S),
            )
            await stack.enter_async_context(client)
            read, write = await stack.enter_async_context(
                streamable_http_client(
                    self._url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
                )
            )
            self._stack = stack.pop_all()
        return _Answers(read, write), write

    async def __aexit__(self, *exception: object) -> None:
        self.close()
        await self._stack.aclose()

    def close(self) -> None:
        self.closed.set()

    async def stop(self) -> None:
        """Does nothing: `close` has freed everything."""

    async def why_closed(self) -> str:
        return self.state()

    def state(self) -> str:
        return ""


class _Answers:
    """The server's responses. Its notifications are dropped, its requests refused."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._read.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "SessionMessage | Exception":
        from mcp.shared.message import SessionMessage
        from mcp_types import JSONRPCNotification, JSONRPCRequest, jsonrpc_message_adapter

        while True:
            item = await self._read.__anext__()
            if isinstance(item, Exception) or isinstance(item.message, JSONRPCNotification):
                continue
            if not isinstance(item.message, JSONRPCRequest):
                return item
            reply = reply_to(item.message.id, item.message.method[:100])
            message = jsonrpc_message_adapter.validate_python(reply, by_name=False)
            await self._write.send(SessionMessage(message))

    async def receive(self) -> "SessionMessage | Exception":
        from anyio import EndOfStream

        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise EndOfStream from None


class _BoundedTransport(httpx2.AsyncBaseTransport):
    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        head = request.content[:200] if request.method == "POST" else b""
        is_call = b'"id":' in head and b'"method":' in head
        if not is_call:
            if request.method != "GET":  # a GET waits for messages of the server
                request.extensions["timeout"] = httpx2.Timeout(NOTIFY_S).as_dict()
            return await self._answer_to_other(request)
        try:
            return await self._answer_to_call(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _fault(NOT_SENT, f"no connection ({error or type(error).__name__})")
        except httpx2.TransportError as error:
            return _fault(HTTP_FAILED, f"{type(error).__name__}: {error}")

    async def _answer_to_other(self, request: httpx2.Request) -> httpx2.Response:
        try:
            return await self._inner.handle_async_request(request)
        except httpx2.TransportError:
            if request.method == "GET":
                raise  # the SDK tries again
            return httpx2.Response(202)  # an error would end the connection for all calls

    async def _answer_to_call(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        status, kind = response.status_code, response.headers.get("content-type", "").lower()
        encoding = response.headers.get("content-encoding", "identity")
        if status >= 400:
            try:
                raw = await _read(response, MAX_MESSAGE_BYTES) or b""
            finally:
                await response.aclose()
            return _refusal(request, response, raw, kind)
        if encoding != "identity":
            await response.aclose()
            return _fault(TOO_LARGE, f"the answer is compressed ({encoding}): switch it off")
        if not kind.startswith("application/json"):
            return response  # events, which the SDK bounds
        try:
            raw = await _read(response, MAX_MESSAGE_BYTES)
        finally:
            await response.aclose()
        if raw is None:
            return _fault(TOO_LARGE, too_large(0)["error"]["message"])
        return httpx2.Response(status, headers=_kept(response), content=raw)


def _kept(response: httpx2.Response) -> dict[str, str]:
    """The headers that the SDK reads."""
    session = response.headers.get(_SESSION)
    return _JSON | ({_SESSION: session} if session else {})


async def _read(response: httpx2.Response, limit: int) -> bytes | None:
    """The body as it came; None if it has more bytes than the limit."""
    raw = bytearray()
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    chunks: AsyncIterator[bytes] = aiter(response.stream)
    async for chunk in chunks:
        raw += chunk
        if len(raw) > limit:
            return None
    return bytes(raw)


def _refusal(
    request: httpx2.Request, response: httpx2.Response, raw: bytes, kind: str
) -> httpx2.Response:
    status = response.status_code
    if status == 404 and _SESSION in request.headers:
        return _fault(SESSION_LOST, "the server does not know the session any more")
    if kind.startswith("application/json") and b'"error"' in raw and b'"code"' in raw:
        return httpx2.Response(status, headers=_kept(response), content=raw)
    text = raw.decode(errors="replace").strip()
    data = {"status": status, "retry_after_s": retry_after_s(response.headers)}
    return _fault(HTTP_STATUS, f"HTTP {status} {text}".strip(), data)


def _fault(code: int, message: str, data: Any = None) -> httpx2.Response:
    """A response that the SDK takes for a JSON-RPC error; it fills in the id."""
    content = json.dumps(error_answer(None, code, message, data)).encode()
    return httpx2.Response(400, headers=_JSON, content=content)
