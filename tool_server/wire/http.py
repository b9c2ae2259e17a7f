"""One way to ask a server over HTTP, and the one table of what its answer means.

For tools, judges, evaluations, environments and search engines. What came decides whether the call
may have been executed, and whether it may be tried again (`protocol.Fault`):

| what came | executed | again |
| --- | --- | --- |
| no connection, no such host, an error with `X-Executed: no` | no | until the deadline |
| the connection broke, 408, 425, 429, 502, 503, 504 | maybe | until the deadline |
| another 5xx, 502 or 504 with `X-Executed`, an answer that cannot be read | maybe | counted |
| a redirect, 401, 403, 404, 405, 407, a compressed or too large answer | maybe | never |
| another 4xx: the model's mistake if the model wrote the request | maybe | never |
| one of the server's own statuses (`Peer.mistakes`): the model's mistake | maybe | never |

An answer is read up to a bound. A compressed answer is refused, because a small one may be large
when it is decompressed, and requests ask for none. A redirect is not followed, because the request
would be sent twice, and to a server that the user did not name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
from yarl import URL

from tool_server.wire.protocol import EXECUTED, Again, Fault, ToolRejected
from tool_server.wire.protocol import ToolUnavailable as Unavailable
from tool_server.wire.responses import retry_after_s

LATER = frozenset({408, 425, 429, 503})
"""HTTP statuses of a server that does not answer now."""

OVERLOAD = frozenset({429, 503})
AWAY = frozenset({502, 504})
"""Statuses of a proxy whose server is away; without `X-Executed`."""

SETUP = frozenset({401, 403, 404, 405, 407})
"""Statuses of a wrong token or of another program at this URL; the request is not to blame."""

MAX_ERROR_BYTES = 1 << 20
"""Bytes read of an error's text."""

SHOWN_ERROR = 500
"""Characters of it in a message."""

CONNECT_S = 10.0
"""Longest time for a connection. A host that drops packets would take more than two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who is asked, for the messages of faults."""

    name: str
    """URL and what is there; without secrets."""

    tool: str = ""
    """`Fault.tool`."""

    address_key: str
    """Setting that holds the address."""

    remedy: str
    """What to do about a status in `SETUP`."""

    secret: str = field(default="", repr=False)
    """Key of the server, sent as a bearer token. Its errors may repeat it: it is taken out of
    messages."""

    model_writes: bool = False
    """Whether the model wrote the request, so a refusal is its mistake."""

    refused: str = ""
    """What to do about a refusal of a request that the model did not write."""

    mistakes: frozenset[int] = frozenset()
    """Statuses of a mistake of the model, which reads the server's words alone."""

    shows: int = SHOWN_ERROR
    """Characters of the server's words in a message; 0 if they may repeat what is secret."""


def plain_session(
    headers: Mapping[str, str] = MappingProxyType({}), **connector: Any
) -> aiohttp.ClientSession:
    """A session for `post`: it asks for uncompressed answers, decompresses none, keeps no cookies
    and has no time limit.

    Args:
        headers: sent with each request.
        connector: `connector`, or options of a `TCPConnector`.
    """
    return aiohttp.ClientSession(
        connector=connector.pop("connector", None) or aiohttp.TCPConnector(**connector),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        # complete, because aiohttp would look for missing ones at each request
        headers={
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": "verl-mixed",
            **headers,
        },
    )


class _Body(aiohttp.BytesPayload):
    """A body that knows whether aiohttp had a connection and began to write it. (A `TraceConfig`
    knows it too, and costs a call 10 µs more.)"""

    was_sent = False

    async def write(self, writer: Any) -> None:
        self.was_sent = True
        await super().write(writer)

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        self.was_sent = True
        await super().write_with_length(writer, content_length)


async def post(
    session: aiohttp.ClientSession, url: URL | str, data: bytes, peer: Peer, *, limit: int
) -> tuple[bytes, aiohttp.ClientResponse]:
    """Send a request with a JSON body; the body of the answer, and its status and headers.

    The caller has a deadline.

    Args:
        session: a `plain_session`.
        limit: bytes that the answer may have.

    Raises:
        ToolRejected: the server refuses what the model wrote.
        ToolUnavailable: there is no answer of status 200, or it must not be read.
    """
    body = _Body(data, content_type="application/json")
    headers = {"Authorization": f"Bearer {peer.secret}"} if peer.secret else None
    try:
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status >= 400:
                try:
                    raw = await _read(response, MAX_ERROR_BYTES)
                except aiohttp.ClientError:
                    raw = b""
                raise fault_of(
                    response.status,
                    raw.decode(errors="replace"),
                    peer,
                    executed=response.headers.get(EXECUTED),
                    pause_s=retry_after_s(response.headers),
                )
            if response.status >= 300:
                raise Unavailable(
                    f"{peer.name} redirects to {_redirect_target(response)} (HTTP "
                    f"{response.status}), and redirects are not followed; set {peer.address_key} "
                    "to the final address",
                    tool=peer.tool,
                )
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise Unavailable(
                    f"cannot read the answer of {peer.name}: it has Content-Encoding="
                    f"{encoding[:40]!r} although the request asked for identity; switch "
                    "compression off at the proxy in front of it",
                    tool=peer.tool,
                )
            raw = await _read(response, limit)
            if len(raw) > limit:
                raise Unavailable(
                    f"the answer of {peer.name} has more than {limit >> 20} MiB: reading stopped; "
                    "limit what that server answers, for example the output of programs or the "
                    "number of passages",
                    tool=peer.tool,
                )
            return raw, response
    except aiohttp.ClientConnectorCertificateError as error:
        raise Unavailable(
            f"{peer.name}: {type(error).__name__}: {error}; correct {peer.address_key} or the "
            "certificate",
            tool=peer.tool,
            executed=False,
        ) from error
    except (aiohttp.ClientResponseError, ValueError) as error:  # this is not HTTP
        raise unreadable(error, peer) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Unavailable(
            f"{type(error).__name__}: {error}",
            tool=peer.tool,
            again=Again.UNTIL_DEADLINE,
            executed=body.was_sent,
            is_away=not body.was_sent,
        ) from error


def unreadable(error: Exception, peer: Peer) -> Fault:
    """The fault of an answer that is not what the server should answer."""
    words = getattr(error, "message", error)  # of aiohttp's without the URL, which may be secret
    return Unavailable(f"{type(error).__name__}: {words}", tool=peer.tool, again=Again.COUNTED)


def fault_of(
    status: int,
    words: str,
    peer: Peer,
    *,
    executed: str | None = None,
    pause_s: float | None = None,
) -> Fault:
    """The fault of an HTTP status of 400 or more.

    Args:
        words: what the server says.
        executed: the header `X-Executed`; None without it.
        pause_s: `Retry-After` in seconds; None without it.
    """
    words = _text_of_error(words)
    words = (words.replace(peer.secret, "***") if peer.secret else words)[: peer.shows]
    said = f"HTTP {status} {words}".rstrip()
    if status in peer.mistakes:
        return ToolRejected(words, tool=peer.tool)
    may_be_executed = executed != "no"
    if status in LATER or status >= 500:
        # with the header it is a server of ours, which says so of the engine that it asks
        is_away = status in AWAY and executed is None
        waits = is_away or status in LATER or not may_be_executed
        return Unavailable(
            said,
            tool=peer.tool,
            again=Again.UNTIL_DEADLINE if waits else Again.COUNTED,
            executed=may_be_executed,
            retry_after_s=pause_s,
            # Without a pause, a server of ours refuses this call alone: others need not wait.
            is_overload=status in OVERLOAD and (may_be_executed or pause_s is not None),
            is_away=is_away,
        )
    if status in SETUP:
        if peer.secret and status in (401, 403):  # without its words, which may repeat the key
            said = f"HTTP {status}"
        is_known = status not in (401, 403)  # else nobody looked at the request
        return Unavailable(
            f"{peer.name} answers {said}; {peer.remedy}", tool=peer.tool, executed=is_known
        )
    if peer.model_writes:
        return ToolRejected(f"HTTP {status} for tool={peer.tool!r}: {words}", tool=peer.tool)
    return Unavailable(f"{peer.name} refuses the request ({said}); {peer.refused}", tool=peer.tool)


def _text_of_error(words: str) -> str:
    """The text of `{"error": text}`; other words as they are."""
    try:
        body = json.loads(words)
    except (ValueError, RecursionError):
        return words
    text = body.get("error") if isinstance(body, dict) else None
    return text if isinstance(text, str) and text else words


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body; of a longer one the beginning, with at least one byte more than `limit`."""
    chunks, size = list[bytes](), 0
    while size <= limit and (chunk := await response.content.readany()):
        chunks.append(chunk)
        size += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _redirect_target(response: aiohttp.ClientResponse) -> str:
    """Scheme and host of a redirect; the rest may be secret."""
    try:
        return str(response.url.join(URL(response.headers["Location"])).origin())
    except (KeyError, ValueError):
        return "no valid address"
