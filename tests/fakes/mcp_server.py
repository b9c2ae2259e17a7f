"""A small MCP server by the official SDK: over stdio as a program, over HTTP inside a test."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp_types import InputRequiredResult, ToolAnnotations
from starlette.types import ASGIApp, Receive, Scope, Send

COMMAND = f"{sys.executable} -m tests.fakes.mcp_server"


def server() -> MCPServer:
    made = MCPServer("fake", version="7")
    calls: dict[str, int] = {}
    reads = ToolAnnotations(read_only_hint=True)

    @made.tool(annotations=reads)
    def echo(text: str) -> str:
        """Says the text again."""
        return text

    @made.tool(annotations=ToolAnnotations(idempotent_hint=True), structured_output=True)
    def add(a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    @made.tool()
    def divide(a: float, b: float) -> float:
        """a / b"""
        return a / b

    @made.tool()
    def nothing() -> list[str]:
        return []

    @made.tool()
    def picture() -> Image:
        return Image(data=b"1234", format="png")

    @made.tool()
    async def greet() -> str | InputRequiredResult:
        """Asks the user for a name."""
        return InputRequiredResult(request_state="which name?")

    @made.tool()
    def large() -> str:
        return "x" * (5 << 20)

    @made.tool()
    def long() -> str:
        return "y" * 1_500_000

    @made.tool()
    def count(key: str) -> str:
        """How often this was called with the key."""
        calls[key] = calls.get(key, 0) + 1
        return str(calls[key])

    @made.tool()
    async def wait(key: str) -> str:
        """Never ends; `count` tells how often it was cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            calls[key] = calls.get(key, 0) + 1
        return ""

    return made


class _Guarded:
    """Checks the token, and answers from a script first: HTTP statuses."""

    def __init__(self, app: ASGIApp, token: str, script: list[int]) -> None:
        self._app, self._token, self._script = app, token, script
        self.tokens: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        if scope["type"] == "http" and scope["method"] == "POST":
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            self.tokens.append(given)
            status = self._script.pop(0) if self._script else 0
            if self._token and given != f"Bearer {self._token}":
                status = 401
        if not status:
            await self._app(scope, receive, send)
            return
        headers = [(b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"scripted"})


class HttpFake:
    """A running server; `script` holds HTTP statuses that come before real answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/mcp"
        self.script: list[int] = []
        self.tokens: list[str] = []


@asynccontextmanager
async def over_http(token: str = "", port: int = 0, **settings: Any) -> AsyncIterator[HttpFake]:
    """The server on a loopback port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        fake = HttpFake(listener.getsockname()[1])
        app = _Guarded(server().streamable_http_app(**settings), token, fake.script)
        fake.tokens = app.tokens
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        running.capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # pytest's
        task = asyncio.create_task(running.serve([listener]))
        while not running.started:  # noqa: ASYNC110 (uvicorn has no event)
            await asyncio.sleep(0.005)
        try:
            yield fake
        finally:
            running.should_exit = True
            await task


if __name__ == "__main__":
    server().run("stdio")
