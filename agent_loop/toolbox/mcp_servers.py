"""MCP servers as tools: `tools: [{mcp: "python -m mcp_server_time"}]`, or a URL.

A server over stdio is a process. Each event loop has one, which is started at first use and again
after it has died; with `per: trajectory`, each trajectory has its own. A call that was under way
when a server died may have been executed, so it is tried again only if the tool may be called
twice: its annotations say so, or the entry sets `retry` or `cache`.

`mcp_client` holds the connections, their bounds and the meaning of results.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import local_route
from agent_loop.calls.servers import Server
from agent_loop.row import Row
from agent_loop.toolbox.functions import LocalTool
from agent_loop.toolbox.mcp_client.connection import Connection
from agent_loop.toolbox.mcp_client.results import (
    HEADER_MISMATCH,
    MAX_ERROR,
    SESSION_LOST,
    body_of,
    failure_of,
)
from agent_loop.toolbox.mcp_client.target import target_of
from agent_loop.toolbox.spec import ToolProvider, ToolSpec, ToolState, chosen, freed
from config.tool_entries import ToolEntry
from rate_limit.slots import FileSlots
from tool_server.wire.protocol import Again, ToolCall, ToolResult, ToolUnavailable
from tool_server.wire.responses import sendable

if TYPE_CHECKING:
    import mcp_types as types


MOST_UNANSWERED = 20
"""Calls in a row that were given up after a quarter of their time or later, after which a server is
replaced. Those that end with their trajectories say nothing of it."""


class McpProvider(ToolProvider):
    """The tools of an MCP server.

    Args:
        entry: an entry with `mcp`.
        client: tool client of the event loop.

    Raises:
        ValueError: the entry is wrong, or an environment variable that it names is missing.
    """

    def __init__(self, entry: ToolEntry, client: ToolClient) -> None:
        super().__init__()
        self.entry, self._target = entry, target_of(entry)
        route = local_route(
            self._target.name,
            self._post,
            key=self._target.digest,
            timeout_s=client.route.timeout_s,
            clock=client.clock,
            max_retries=client.route.max_retries,
            advice="raise `timeout` of the tool, or look for what it waits",
        )
        self._route = client.limits(route, entry)
        self._listed: list[LocalTool] | None = None
        self._connection: Connection | None = None
        self.servers: FileSlots | None = None
        """Most servers at once, of a source with a server for each trajectory."""

        if entry.per == "trajectory" and (slots := self._route.slots) is not None:
            self.servers = FileSlots(slots.path.with_suffix(".servers"), slots.slots)

    async def tools(self) -> list[LocalTool]:
        if self._listed is None:
            is_shared = self.entry.per != "trajectory"
            connection = self._connected() if is_shared else self.connect()
            try:
                await connection.started()
            finally:
                if not is_shared:
                    await connection.close()
            # A tool that is not offered may have a name or a schema that would be refused.
            wanted = chosen(self.entry.only, connection.tools)
            # The check of megabytes of schemas would stop the event loop.
            self._listed = [
                await asyncio.to_thread(self._tool_of, each, connection) for each in wanted
            ]
        return self._listed

    def begin(self, client: ToolClient, row: Row) -> ToolState | None:
        return self._of_trajectory() if self.entry.per == "trajectory" else None

    @asynccontextmanager
    async def _of_trajectory(self) -> AsyncIterator[list[LocalTool]]:
        tools = await self.tools()

        async def post(call: ToolCall, server: Server) -> ToolResult:
            if connection.is_over:
                raise ToolUnavailable(
                    f"{server.url} ended, and the state of the trajectory with it "
                    f"({await connection.why_closed()}); look for what ended it",
                    tool=call.tool,
                )
            try:
                return await self.ask(connection, call)
            except ToolUnavailable as fault:
                fault.is_away = False  # those of the other trajectories still run
                raise

        # The deadline of the trajectory bounds the wait for a place.
        async with nullcontext() if self.servers is None else self.servers.hold_async():
            connection = self.connect()
            try:
                await connection.started()
                yield [replace(tool, route=tool.route.limited(post=post)) for tool in tools]
            finally:
                await freed(self._target.name, connection.close())

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def connect(self) -> Connection:
        """A new connection, which begins to open."""
        return Connection(self._target)

    async def ask(self, connection: Connection, call: ToolCall) -> ToolResult:
        """One attempt of a call; for errors see `routes.Post`."""
        from mcp import MCPError
        from mcp_types import CallToolResult

        session, target, tool = await connection.started(), self._target, call.tool
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            result = await session.call_tool(
                tool, sendable(call.payload), allow_input_required=True
            )
        except asyncio.CancelledError:
            connection.unanswered += loop.time() - asked_at >= self._route.timeout_s / 4
            if connection.unanswered >= MOST_UNANSWERED:
                connection.begin_to_close()  # it hangs: the next call opens a new one
            raise
        except MCPError as error:
            connection.unanswered = 0
            if error.code in (SESSION_LOST, HEADER_MISMATCH):
                connection.begin_to_close()  # the next attempt opens a new one
            ending = await connection.why_closed()
            raise failure_of(error, tool, target, ending) from error
        except (RuntimeError, ValueError) as error:  # it breaks the protocol or its own schema
            raise ToolUnavailable(
                f"{target.name} gave an invalid result: {target.hidden(str(error))[:MAX_ERROR]}",
                tool=tool,
                again=Again.COUNTED,
            ) from error
        connection.unanswered = 0
        if not isinstance(result, CallToolResult):
            raise ToolUnavailable(
                f"tool={tool!r} of {target.name} asks for input during a call, which nobody can "
                "give here; leave the tool out with `only`",
                tool=tool,
            )
        body = body_of(result, tool, target.name)
        return ToolResult(body=body, tool=tool, cacheable=not body["is_error"])

    def _connected(self) -> Connection:
        """The connection of this event loop; a new one if there is none, or its server died."""
        if self._connection is None or self._connection.is_over:
            self._connection = self.connect()
        return self._connection

    async def _post(self, call: ToolCall, server: Server) -> ToolResult:
        return await self.ask(self._connected(), call)

    def _tool_of(self, tool: "types.Tool", connection: Connection) -> LocalTool:
        """A tool that the server listed.

        Raises:
            ValueError: its name or its schema is not one that a model can use.
        """
        spec = ToolSpec(
            name=tool.name, description=tool.description or "", parameters=tool.input_schema
        )
        said = tool.annotations
        may_repeat = said is not None and (said.read_only_hint or said.idempotent_hint)
        about = [self._target.digest, connection.version, spec.schema]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        return LocalTool(
            spec=spec,
            route=replace(self._route, key=f"mcp:{digest}"),
            idempotent=bool(may_repeat or self.entry.retry or self.entry.cache),
        )
