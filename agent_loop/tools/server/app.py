"""The server as an application, and how it is served."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import prometheus_client
from aiohttp import web

from agent_loop.tools.limiter_collector import LimiterCollector
from agent_loop.tools.server.calculate import Calculate
from agent_loop.tools.server.http import METRICS, Endpoint, Metrics, measure
from agent_loop.tools.server.retrieve import Retrieve
from agent_loop.tools.server.run_code import RunCode
from agent_loop.tools.server.settings import ServerSettings

SHUTDOWN_S = 2.0
"""How long requests under way may take to end after SIGTERM."""

ENDPOINTS = web.AppKey("endpoints", Sequence[Endpoint])
STARTED = web.AppKey("started", float)


def create_app(settings: ServerSettings) -> web.Application:
    """The server as an aiohttp application.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be indexed.
    """
    app = web.Application(middlewares=[measure], client_max_size=64 << 20)
    app[METRICS], app[STARTED] = Metrics(), time.monotonic()
    app[ENDPOINTS] = (RunCode(settings), Retrieve(settings), Calculate(settings))
    for endpoint in app[ENDPOINTS]:
        endpoint.add_routes(app.router)
    if settings.limiter_path is not None:
        app[METRICS].registry.register(LimiterCollector(settings.limiter_path))
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.cleanup_ctx.append(_started)
    return app


async def _started(app: web.Application) -> AsyncIterator[None]:
    for endpoint in app[ENDPOINTS]:
        await endpoint.start()
    yield
    for endpoint in app[ENDPOINTS]:
        await endpoint.close()


async def _health(request: web.Request) -> web.Response:
    app = request.app
    answer = {"status": "ok", "uptime_s": round(time.monotonic() - app[STARTED], 1)}
    for endpoint in app[ENDPOINTS]:
        answer |= endpoint.health()
    return web.json_response(answer)


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=prometheus_client.generate_latest(request.app[METRICS].registry),
        headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST},
    )


def serve(settings: ServerSettings, *, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: address, corpus, sandbox.
        ready_file: gets `{"url", "pid"}` as JSON once the server listens.

    Raises:
        OSError: the port is taken.
    """
    app = create_app(settings)  # proves the sandbox, which needs no running loop
    asyncio.run(_serve(app, settings, ready_file))


def app_runner(app: web.Application) -> web.AppRunner:
    """Runs the application so that a client that gave up frees its place in the sandbox."""
    return web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )


async def _serve(app: web.Application, settings: ServerSettings, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = app_runner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://{settings.host}:{port}"
        if ready_file is not None:
            draft = ready_file.with_suffix(".tmp")
            draft.write_text(json.dumps({"url": url, "pid": os.getpid()}))
            draft.replace(ready_file)
        print(f"tool server listening url={url} pid={os.getpid()}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
