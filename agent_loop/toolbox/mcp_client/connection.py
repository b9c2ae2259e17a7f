"""A connection to an MCP server, in a task of its own, by the SDK's client.

The SDK opens a connection in cancel scopes, which must be left by the task that entered them. So
one task opens the connection, waits, and closes it. The tasks of the calls write their requests and
wait for their answers; many calls are under way at once, and a call that is cancelled tells the
server.
"""

import asyncio
import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_loop.calls.child_process import inherited_environment
from agent_loop.toolbox.mcp_client.messages import HTTP_STATUS
from agent_loop.toolbox.mcp_client.process import ProcessFault, ServerProcess
from agent_loop.toolbox.mcp_client.results import MAX_ERROR, remedy_for
from agent_loop.toolbox.mcp_client.target import ServerTarget
from config.compat import timeout

if TYPE_CHECKING:
    import mcp_types as types
    from mcp import Client, ClientSession

    from agent_loop.toolbox.mcp_client.http import HttpServer

START_S = 60.0
"""Longest time from the start of a server until its tools are listed. The first start of some
commands downloads the server."""

CLOSE_S = 6.0
"""Longest time in which a connection closes, before it is cancelled."""

MAX_TOOLS = 512
MAX_PAGES = 64
MAX_LISTED_CHARS = 1 << 20
"""Largest sum of all names, descriptions and schemas of a server's tools."""


class StartFailed(Exception):
    """A server did not start, or did not list its tools.

    Args:
        reason: what went wrong, and what to do.
        is_final: whether another try would end the same.
    """

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Connection:
    """A connection, which begins to open at once.

    Args:
        target: the server.
        start_s: longest time until its tools are listed.
    """

    def __init__(self, target: ServerTarget, start_s: float = START_S) -> None:
        self._target, self._start_s = target, start_s
        self._transport: ServerProcess | HttpServer | None = None
        self.session: ClientSession | None = None
        """For calls; None before the connection is open."""

        self.tools: list[types.Tool] = []
        """What the server listed."""

        self.version = ""
        """Name and version of the server, as it says."""

        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        # With the context of the first caller, its trajectory would be billed for all later ones.
        self._task = contextvars.Context().run(loop.create_task, self._run())

    @property
    def is_over(self) -> bool:
        """Whether the server has ended, or the connection is closed or closing."""
        transport = self._transport
        return self._task.done() or (transport is not None and transport.closed.is_set())

    async def started(self) -> None:
        """Wait until calls can be made.

        Raises:
            StartFailed: the server did not start.
        """
        if not self._ready.done():
            await asyncio.wait([self._ready])  # a caller that is cancelled does not end the start
        if self._ready.cancelled():
            raise StartFailed(f"{self._target.name} was closed while it started")
        self._ready.result()

    def begin_to_close(self) -> None:
        """Let the connection close, and the server end, without waiting for it."""
        if self._transport is not None and self._ready.done():
            self._transport.close()
        else:
            self._task.cancel()

    async def close(self) -> None:
        """Close the connection and end the server, in a bounded time."""
        self.begin_to_close()
        if self._task.done() or self._task.get_loop().is_closed():
            return
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_S)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)

    async def why_closed(self) -> str:
        """What is known of the end of the server's process; "" if it has not ended."""
        if self._transport is None or not self._transport.closed.is_set():
            return ""
        return await self._transport.why_closed()

    async def _run(self) -> None:
        opening = timeout(self._start_s)
        transport = self._transport = _transport_of(self._target)
        try:
            client = _client_of(transport)
            try:
                async with opening:
                    await client.__aenter__()
                    await self._list(client)
                self.session = client.session
                self._ready.set_result(None)
                await transport.closed.wait()
            finally:
                await client.__aexit__(None, None, None)
        except Exception as error:  # the SDK, its HTTP client and anyio raise many kinds, in groups
            if self._ready.done():
                return  # the callers have learned it from their calls
            is_late = opening.expired() and isinstance(error, TimeoutError | asyncio.TimeoutError)
            self._ready.set_exception(self._start_failed(_first(error), is_late, transport.state()))
        finally:
            transport.close()
            if not self._ready.done():
                self._ready.cancel()
            await transport.stop()

    async def _list(self, client: "Client") -> None:
        """Note all tools, and what the server says of itself."""
        from mcp_types import PaginatedRequestParams

        info = client.server_info
        self.version = f"{info.name} {info.version}" if info is not None else ""
        cursor: str | None = None
        chars = 0
        for _ in range(MAX_PAGES):
            page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            self.tools += page.tools
            chars += sum(len(tool.model_dump_json()) for tool in page.tools)
            if len(self.tools) > MAX_TOOLS or chars > MAX_LISTED_CHARS:
                break
            if (cursor := page.next_cursor) is None:
                return
        raise StartFailed(
            f"{self._target.name} lists more than {MAX_TOOLS} tools, {MAX_LISTED_CHARS >> 20} MiB "
            f"or {MAX_PAGES} pages, which is the most that is read; use a server with fewer tools",
            is_final=True,
        )

    def _start_failed(self, error: BaseException, is_late: bool, state: str) -> StartFailed:
        if isinstance(error, StartFailed):
            return error
        name = self._target.name
        message = self._target.hidden(str(error))[:MAX_ERROR] or type(error).__name__
        remedy = "is this the URL of an MCP server, and is it up?"
        if self._target.command:
            remedy = "run the command by hand, or correct `mcp` or `env`"
        if is_late:
            after = f"; {state}" if state else ""
            return StartFailed(
                f"{name} did not list its tools within {self._start_s:g} s{after}; {remedy}"
            )
        code, data = getattr(error, "code", 0), getattr(error, "data", None)
        status = data.get("status", 0) if code == HTTP_STATUS and isinstance(data, dict) else 0
        if status in (401, 403):
            remedy = remedy_for(status, self._target.token_variable)
        reason = state if state and not isinstance(error, ProcessFault) else message
        return StartFailed(
            f"{name} did not start: {reason}; {remedy}",
            is_final=isinstance(error, ProcessFault) or 400 <= status < 500,
        )


def _transport_of(target: ServerTarget) -> Any:
    if target.url:
        from agent_loop.toolbox.mcp_client.http import HttpServer

        return HttpServer(target.url, target.token)
    env = inherited_environment() | dict(target.env)
    return ServerProcess(target.command, env, target.cwd, target.hidden)


def _client_of(transport: Any) -> "Client":
    from mcp import Client
    from mcp_types import Implementation

    info = Implementation(name="verl-mixed", version="1")
    return Client(transport, cache=None, client_info=info)


def _first(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group of them."""
    inside: Sequence[BaseException] = getattr(error, "exceptions", ())
    return _first(inside[0]) if inside else error
