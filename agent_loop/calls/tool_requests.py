"""Requests to tool servers: the URL and token of a call, and what the answer says of the tool."""

import hashlib
import os

from yarl import URL

from agent_loop.calls.servers import Server
from config.tool_entries import without_secrets
from tool_server.wire.http import Peer, plain_session, post, unreadable
from tool_server.wire.protocol import (
    CACHEABLE,
    FINGERPRINT,
    Again,
    ToolCall,
    ToolResult,
    ToolUnavailable,
)
from tool_server.wire.responses import decode, dumps, max_answer_bytes
from tool_server.wire.tokens import TOKEN_VARIABLE, token_for

KEEP_S = 4.0
"""How long an unused connection is kept. Some servers close theirs after 5 s (uvicorn), and a call
that is sent in that moment may be lost."""


class ToolRequests:
    """A pooled HTTP session to all tool servers; made inside the event loop that uses it."""

    def __init__(self) -> None:
        self.session = plain_session(limit=0, keepalive_timeout=KEEP_S)
        self._places: dict[tuple[str, str], tuple[URL, Peer]] = {}
        """Server and tool -> URL, and who is asked with which token."""

    async def post(self, call: ToolCall, server: Server) -> ToolResult:
        """Send a call to a server.

        Raises:
            ToolRejected: the server refuses the call.
            ToolUnavailable: there is no answer that can be read; see `wire.http`.
        """
        place = server.url, call.tool
        if place not in self._places:
            self._places[place] = self._place_of(*place)
        url, peer = self._places[place]
        limit = max_answer_bytes(call.tool)
        data = dumps(call.payload)
        try:
            raw, response = await post(self.session, url, data, peer, limit=limit)
        except ToolUnavailable as error:
            if error.again is not Again.NEVER or error.executed:
                raise
            _, renewed = self._places[place] = self._place_of(*place)
            if renewed == peer:
                raise
            # the token was renewed since it was read
            raw, response = await post(self.session, url, data, renewed, limit=limit)
        try:
            body = decode(call, raw)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, peer) from error
        mark = response.headers.get(CACHEABLE)
        return ToolResult(
            body=body,
            tool=call.tool,
            origin=response.headers.get(FINGERPRINT) or _hash_of(server.url),
            cacheable=None if mark is None else mark == "yes",
        )

    def _place_of(self, base_url: str, tool: str) -> tuple[URL, Peer]:
        peer = Peer(
            name=f"{without_secrets(base_url)} for tool={tool!r}",
            tool=tool,
            address_key="tool_config.server_url",
            remedy=f"is it the tool server, and {TOKEN_VARIABLE} its token?",
            secret=token_for(base_url, os.environ),
            model_writes=True,
        )
        return URL(f"{base_url}/{tool}"), peer


def _hash_of(url: str) -> str:
    """What stands for the answers of a server that names no fingerprint."""
    return f"url:{hashlib.sha256(url.encode()).hexdigest()[:32]}"
