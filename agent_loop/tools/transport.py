"""HTTP requests of the tool client: one request to one server, and what its response means.

A failed request raises `RequestFailed` if another attempt may succeed, otherwise a `ToolError`.
Retries, limiter and cache are in `agent_loop.tools.client`.
"""

import os
from typing import Any

import aiohttp
from yarl import URL

from agent_loop.tools.protocol import ToolCall, ToolError, ToolRejected, ToolUnavailable
from agent_loop.tools.responses import (
    dumps,
    fault_of,
    loads,
    replace_surrogates,
    retry_after_s,
    sandbox_fault,
    text_of,
)
from agent_loop.tools.servers import Server
from agent_loop.tools.tokens import TOKEN_VARIABLE, token_for

SETUP_FAULTS = frozenset({401, 403, 404, 405, 407})
"""HTTP statuses of a wrong token or of another program at this URL; the call is not to blame."""


class RequestFailed(Exception):
    """A failed request that may succeed at another attempt.

    Args:
        reason: what went wrong.
        retry_after_s: pause that the server asks for.
        is_overload: the server has too many requests.
        was_executed: whether the server may have executed the call.
        blames_server: whether the failure counts for the server's breaker.
    """

    def __init__(
        self,
        reason: str,
        retry_after_s: float | None = None,
        *,
        is_overload: bool = False,
        was_executed: bool = True,
        blames_server: bool = True,
    ) -> None:
        super().__init__(replace_surrogates(reason))
        self.retry_after_s, self.is_overload = retry_after_s, is_overload
        self.was_executed, self.blames_server = was_executed, blames_server


class HttpTransport:
    """A pooled HTTP session to all tool servers; created inside the event loop that uses it."""

    def __init__(self) -> None:
        headers = {  # complete, because aiohttp would look for missing ones at each request
            "Content-Type": "application/json",
            "User-Agent": "verl-mixed",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
        }
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        self._urls: dict[tuple[str, str], tuple[URL, dict[str, str]]] = {}
        """Server and tool -> URL, and the header with the server's token."""

    async def close(self) -> None:
        await self.session.close()

    async def post(self, call: ToolCall, server: Server) -> dict[str, Any]:
        """Send a call to a server.

        Returns:
            The JSON body of the response.

        Raises:
            RequestFailed: no response, or one that says nothing about the call.
            ToolRejected: the server refuses the call.
            ToolUnavailable: the token is wrong, or this is not a tool server.
        """
        known = self._urls.get((server.url, call.tool))
        if known is None:
            token = token_for(server.url, os.environ)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            known = URL(f"{server.url}/{call.tool}"), headers
            self._urls[server.url, call.tool] = known
        url, headers = known
        body = dumps(call.payload)
        try:
            async with self.session.post(url, data=body, headers=headers) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise _refusal(call, server, response, raw)
                body = loads(raw, response.charset)
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            raise RequestFailed(f"{type(error).__name__}: {error}", was_executed=False) from error
        except (aiohttp.ClientError, ConnectionError, ValueError, RecursionError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        if fault := fault_of(call.tool, body):
            raise RequestFailed(fault)
        fault, is_final = sandbox_fault(call.tool, body)
        if is_final:
            raise ToolRejected(replace_surrogates(fault), tool=call.tool)
        if fault:
            raise RequestFailed(fault, blames_server=False)  # the program may have caused it
        return body


def _refusal(
    call: ToolCall, server: Server, response: aiohttp.ClientResponse, raw: bytes
) -> RequestFailed | ToolError:
    status, text = response.status, replace_surrogates(text_of(raw, response.charset)[:500])
    if status in (408, 429) or status >= 500:
        return RequestFailed(
            f"HTTP {status} {text[:200]}",
            retry_after_s(response.headers),
            is_overload=status in (429, 503),
            was_executed=status not in (429, 503),
            blames_server=status != 429,
        )
    message = f"HTTP {status} for tool={call.tool!r}: {text}"
    if status in SETUP_FAULTS:
        return ToolUnavailable(
            f"{message}; is {server.url} the tool server, and {TOKEN_VARIABLE} its token?",
            tool=call.tool,
        )
    server.close_breaker()
    return ToolRejected(message, tool=call.tool)
