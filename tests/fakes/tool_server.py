"""A real HTTP server on loopback that answers from a script and records what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy


class ScriptedToolServer:
    """Plays `script`: a dict is a JSON answer, a number an HTTP status, a pair (status or JSON
    answer, headers), a response itself, a function makes one of these of the request,
    "drop" closes the connection, "hang" never answers. The last entry repeats. `hangs` is set while
    a request hangs, `hung_up` once a client has closed one that did. `health` is the answer to
    `GET /health`; without one it is 404."""

    def __init__(self, script: list[Any]) -> None:
        self.script = list(script)
        self.seen: list[tuple[str, Any]] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.url = ""
        self.health: Any = None
        self.health_asked = 0
        self.hangs, self.hung_up = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, await request.json()))
        self.headers.append(request.headers)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(step):
            step = step(await request.json())
        if step == "hang":
            self.hangs.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.hangs.clear()
                self.hung_up.set()
                raise
        if step == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(step, web.StreamResponse):
            return step
        if isinstance(step, tuple):
            status, headers = step
            if isinstance(status, dict):
                return web.json_response(status, headers=headers)
            return web.Response(status=status, headers=headers)
        if isinstance(step, int):
            return web.Response(status=step, text=f"scripted {step}")
        return web.json_response(step)

    async def answer_health(self, request: web.Request) -> web.Response:
        self.health_asked += 1
        return web.json_response(self.health, status=404 if self.health is None else 200)


@asynccontextmanager
async def running(script: list[Any]) -> AsyncIterator[ScriptedToolServer]:
    """The server, listening on a free port."""
    server = ScriptedToolServer(script)
    app = web.Application()
    app.router.add_post("/{tool}", server.answer)
    app.router.add_get("/health", server.answer_health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
