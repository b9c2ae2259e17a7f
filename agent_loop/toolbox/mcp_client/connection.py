"""A connection to an MCP server, in a task of its own, by the SDK's client.

The SDK opens a connection in cancel scopes, which must be left by the task that entered them. So
one task opens the connection, waits, and closes it. The tasks of the calls write their requests and
wait for their answers; many calls are under way at once, and a call that is cancelled tells the
server. The SDK answers a server's pings and refuses its other requests.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agent_loop.toolbox.mcp_client.results import HTTP_STATUS, MAX_ERROR, remedy_for
from agent_loop.toolbox.mcp_client.target import ServerTarget
from config.compat import timeout
from tool_server.wire.protocol import Again, ToolUnavailable

if TYPE_CHECKING:
    import mcp_types as types
    from mcp import Client, ClientSession

    from agent_loop.toolbox.mcp_client.stdio import ServerProcess

START_S = 60.0
"""Longest time from the start of a server until its tools are listed. The first start of some
commands downloads the server."""

CLOSE_S = 6.0
"""Longest time in which a connection closes, before it is cancelled."""

MAX_TOOLS = 512


class _Refused(Exception):
    """Another try would end the same."""


class Connection:
    """A connection, which begins to open at once.

    Args:
        target: the server.
    """

    def __init__(self, target: ServerTarget) -> None:
        self._target = target
        self._process: ServerProcess | None = None
        self.session: ClientSession | None = None
        """For calls; None before the connection is open."""

        self.tools: list[types.Tool] = []
        """What the server listed."""

        self.version = ""
        """Name and version of the server, as it says."""

        self.unanswered = 0
        """Calls in a row that had no answer in their time."""

        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._failure = f"{target.name} was closed while it started", False
        """Why it did not open, and whether another try would end the same."""

        # With the context of the first caller, its trajectory would be billed for all later ones.
        loop = asyncio.get_running_loop()
        self._task = contextvars.Context().run(loop.create_task, self._run())

    @property
    def is_over(self) -> bool:
        """Whether the server has ended, or the connection is closed or closing."""
        return self._closing.is_set()

    async def started(self) -> "ClientSession":
        """The session for calls; waits until it is open.

        Raises:
            ToolUnavailable: the server did not start, or did not list its tools.
        """
        await self._opened.wait()
        if self.session is None:
            message, is_final = self._failure
            raise ToolUnavailable(
                message,
                tool=self._target.limits_name,
                again=Again.NEVER if is_final else Again.UNTIL_DEADLINE,
                executed=False,
                is_away=not is_final,
            )
        return self.session

    def begin_to_close(self) -> None:
        """Let the connection close, and the server end, without waiting for it."""
        self._closing.set()
        if self.session is None:
            self._task.cancel()

    async def close(self) -> None:
        """Close the connection and end the server, in a bounded time."""
        self.begin_to_close()
        for _ in range(2):
            if self._task.done() or self._task.get_loop().is_closed():
                return
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()

    async def why_closed(self) -> str:
        """What is known of the end of the server's process; "" if it has not ended."""
        if self._process is None or not self.is_over:
            return ""
        return await self._process.why_closed()

    async def _run(self) -> None:
        from mcp import Client
        from mcp_types import Implementation

        opening = timeout(START_S)
        info = Implementation(name="verl-mixed", version="1")
        client = Client(self._transport(), cache=None, client_info=info)
        try:
            try:
                async with opening:
                    await client.__aenter__()
                    await self._list(client)
                self.session = client.session
                self._opened.set()
                await self._closing.wait()
            finally:
                await client.__aexit__(None, None, None)
        except Exception as error:  # the SDK, its HTTP client and anyio raise many kinds, in groups
            # after the start, the callers have learned it from their calls
            is_late = opening.expired() and isinstance(error, TimeoutError | asyncio.TimeoutError)
            self._failure = self._failure_of(_first(error), is_late)
        finally:
            self._closing.set()
            self._opened.set()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        target = self._target
        if target.url:
            from agent_loop.toolbox.mcp_client.http import http_streams

            async with http_streams(target.url, target.token) as streams:
                yield streams
            return
        from agent_loop.toolbox.mcp_client.stdio import ServerProcess

        self._process = process = ServerProcess(target, self._closing)
        try:
            try:
                await process.start()
            except (OSError, ValueError) as error:
                raise _Refused(f"{target.name} did not start: {error}; {self._remedy}") from error
            yield process, process
        finally:
            await process.stop()

    async def _list(self, client: "Client") -> None:
        """Note all tools, and what the server says of itself."""
        from mcp_types import PaginatedRequestParams

        info = client.server_info
        self.version = f"{info.name} {info.version}" if info is not None else ""
        cursor: str | None = None
        while len(self.tools) <= MAX_TOOLS:
            page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            self.tools += page.tools
            if (cursor := page.next_cursor) is None:
                return
        raise _Refused(
            f"{self._target.name} lists more than {MAX_TOOLS} tools, which is the most that is "
            "read; use a server with fewer tools"
        )

    @property
    def _remedy(self) -> str:
        if self._target.url:
            return "is this the URL of an MCP server, and is it up?"
        return "run the command by hand, or correct `mcp` or `env`"

    def _failure_of(self, error: BaseException, is_late: bool) -> tuple[str, bool]:
        if isinstance(error, _Refused):
            return str(error), True
        target, remedy = self._target, self._remedy
        code, data = getattr(error, "code", 0), getattr(error, "data", None)
        status = data.get("status", 0) if code == HTTP_STATUS and isinstance(data, dict) else 0
        if status in (401, 403):
            remedy = remedy_for(status, target.token_variable)
        problem = f"it did not list its tools within {START_S:g} s" if is_late else ""
        state = self._process.state() if self._process is not None else ""
        known = "; ".join(filter(None, [problem, state]))
        message = target.hidden(str(error))[:MAX_ERROR] or type(error).__name__
        is_final = 400 <= status < 500
        if self._process is not None:
            is_final = self._process.cannot_be_executed
        return f"{target.name} did not start: {known or message}; {remedy}", is_final


def _first(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group of them."""
    inside: Sequence[BaseException] = getattr(error, "exceptions", ())
    return _first(inside[0]) if inside else error
