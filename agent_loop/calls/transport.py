"""HTTP requests of the tool client: one request to one server, and what its response means.

A failed request raises `RequestFailed` if another attempt may succeed, otherwise a `ToolError`.
Retries, limiter and cache are in `agent_loop.calls.client`.

An answer is read up to a bound (`responses.max_answer_bytes`). A compressed answer is refused,
because a small one may be large when it is decompressed, and requests ask for none. A redirect is
not followed, because the request would be sent twice, and to a server that the user did not name.
"""

import asyncio
import json
import os

import aiohttp
from yarl import URL

from agent_loop.calls.routes import RequestFailed
from agent_loop.calls.servers import Server
from tool_server.wire.bounded_read import compression_of, plain_session, read_bounded
from tool_server.wire.protocol import (
    CACHEABLE,
    EXECUTED,
    FINGERPRINT,
    ToolCall,
    ToolError,
    ToolRejected,
    ToolResult,
    ToolUnavailable,
)
from tool_server.wire.responses import (
    decode,
    dumps,
    max_answer_bytes,
    replace_surrogates,
    retry_after_s,
    sandbox_fault,
    text_of,
)
from tool_server.wire.tokens import TOKEN_VARIABLE, token_for

SETUP_FAULTS = frozenset({401, 403, 404, 405, 407})
"""HTTP statuses of a wrong token or of another program at this URL; the call is not to blame."""


MAX_ERROR_BYTES = 4096
"""Bytes read of an error's text."""

MAX_HEALTH_BYTES = 1 << 20
MAX_FINGERPRINT = 128


class HttpTransport:
    """A pooled HTTP session to all tool servers; created inside the event loop that uses it."""

    def __init__(self) -> None:
        headers = {  # complete, because aiohttp would look for missing ones at each request
            "Content-Type": "application/json",
            "User-Agent": "verl-mixed",
            "Accept": "*/*",
        }
        self.session = plain_session(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            limit=0,
            keepalive_timeout=60,
        )
        self._urls: dict[tuple[str, str], tuple[URL, dict[str, str]]] = {}
        """Server and tool -> URL, and the header with the server's token."""

    async def close(self) -> None:
        await self.session.close()

    async def post(self, call: ToolCall, server: Server) -> ToolResult:
        """Send a call to a server.

        Raises:
            RequestFailed: no response, or one that says nothing about the call.
            ToolRejected: the server refuses the call.
            ToolUnavailable: the token is wrong, this is not a tool server, or its answer is a
                redirect, compressed or too large.
        """
        known = self._urls.get((server.url, call.tool))
        if known is None:
            token = token_for(server.url, os.environ)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            known = URL(f"{server.url}/{call.tool}"), headers
            self._urls[server.url, call.tool] = known
        url, headers = known
        limit = max_answer_bytes(call.tool)
        try:
            async with self.session.request(
                "POST", url, data=dumps(call.payload), headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    raw = await read_bounded(response, MAX_ERROR_BYTES)
                    raise _refusal(call, server, response, raw)
                if fault := unreadable(response):
                    raise ToolUnavailable(
                        f"cannot read the answer of {server.url} to tool={call.tool!r}: {fault}",
                        tool=call.tool,
                    )
                raw = await read_bounded(response, limit)
                if len(raw) > limit:
                    raise ToolUnavailable(
                        f"the answer of {server.url} to tool={call.tool!r} has more than "
                        f"{limit >> 20} MiB: reading stopped; limit the output of programs or "
                        "the number of passages at that server",
                        tool=call.tool,
                    )
                body = decode(call, raw, lambda: response.charset)
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            raise RequestFailed(f"{type(error).__name__}: {error}", was_executed=False) from error
        except (aiohttp.ClientError, ConnectionError, ValueError, RecursionError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        fault, is_final = sandbox_fault(call.tool, body)
        if is_final:
            raise ToolRejected(replace_surrogates(fault), tool=call.tool)
        if fault:
            raise RequestFailed(fault, blames_server=False)  # the program may have caused it
        mark = response.headers.get(CACHEABLE)
        return ToolResult(
            body=body,
            tool=call.tool,
            origin=_origin(response.headers.get(FINGERPRINT), server),
            cacheable=None if mark is None else mark == "yes",
        )

    async def ask_origins(self, server: Server, timeout_s: float) -> None:
        """Note the fingerprints of a server's tools in `server.origins`, as its `/health` says.

        Nothing is noted if the server does not answer. An origin that is already known came with
        an answer of the tool and stays.
        """
        try:
            async with self.session.get(
                f"{server.url}/health",
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                raw = await read_bounded(response, MAX_HEALTH_BYTES)
            tools = json.loads(raw)["tools"] if response.status == 200 else {}
            found = {tool: about.get("fingerprint") for tool, about in tools.items()}
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            found = {}  # a server that knows no fingerprints
        for tool in {*found, "run_code", "retrieve", "calculate"}:
            server.origins.setdefault(tool, _origin(found.get(tool), server))


def unreadable(response: aiohttp.ClientResponse) -> str:
    """Why the body must not be read; "" if it may."""
    encoding = compression_of(response)
    if not encoding:
        return ""
    return (
        f"it has Content-Encoding={encoding!r} although the request asked for identity; "
        "switch compression off at the proxy in front of it"
    )


def _origin(fingerprint: object, server: Server) -> str:
    """What answers: the fingerprint that the server gave, or else a hash of its URL."""
    if isinstance(fingerprint, str) and 0 < len(fingerprint) <= MAX_FINGERPRINT:
        return fingerprint
    return server.url_origin


def _refusal(
    call: ToolCall, server: Server, response: aiohttp.ClientResponse, raw: bytes
) -> RequestFailed | ToolError:
    status, text = response.status, replace_surrogates(text_of(raw, response.charset)[:500])
    if status in (408, 429) or status >= 500:
        return RequestFailed(
            f"HTTP {status} {text[:200]}",
            retry_after_s(response.headers),
            is_overload=status in (429, 503),
            was_executed=response.headers.get(EXECUTED) != "no",
            blames_server=status != 429,
        )
    if status < 400:
        return ToolUnavailable(
            f"{server.url} redirects tool={call.tool!r} to {redirect_target(response)} (HTTP "
            f"{status}), and redirects are not followed; set tool_config.server_url to the final "
            "address",
            tool=call.tool,
        )
    message = f"HTTP {status} for tool={call.tool!r}: {text}"
    if status in SETUP_FAULTS:
        return ToolUnavailable(
            f"{message}; is {server.url} the tool server, and {TOKEN_VARIABLE} its token?",
            tool=call.tool,
        )
    server.close_breaker()
    return ToolRejected(message, tool=call.tool)


def redirect_target(response: aiohttp.ClientResponse) -> str:
    """Scheme and host of a redirect; the rest may be secret."""
    try:
        return str(response.url.join(URL(response.headers["Location"])).origin())
    except (KeyError, ValueError):
        return "no valid address"
