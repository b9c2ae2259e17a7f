"""The aiohttp application of the tool server, and the process that serves it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import prometheus_client
from aiohttp import web

from tool_server.calculate import Calculate
from tool_server.connections import CONNECTIONS, Connections, GuardedRunner, most_connections
from tool_server.edge import (
    DRAIN,
    METRICS,
    ONLY_LOOPBACK,
    TOKEN,
    Drain,
    Metrics,
    is_authorised,
    one_request,
)
from tool_server.http import BODIES, Bodies, Endpoint, tool_health
from tool_server.limiter_collector import LimiterCollector
from tool_server.retrieve import Retrieve
from tool_server.run_code import RunCode
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import EXECUTED, FINGERPRINT
from tool_server.wire.tokens import is_loopback

DRAIN_S = 10.0
"""Time that requests under way may take to end after SIGTERM; then they are cancelled."""

SHUTDOWN_S = 2.0
"""After draining: how long the last answers may take to be sent and cancelled requests to end."""

MOST_BODY_BYTES = 32 << 20
"""Largest request body; a larger one is answered with 413."""

ENDPOINTS = web.AppKey("endpoints", Sequence[Endpoint])
STARTED = web.AppKey("started", float)


def create_app(settings: ServerSettings) -> web.Application:
    """The server as an aiohttp application.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be indexed.
        PackageUnusable: programs cannot import a package of `sandbox_packages`.
    """
    app = web.Application(middlewares=[one_request], client_max_size=MOST_BODY_BYTES)
    app[METRICS], app[STARTED], app[DRAIN] = Metrics(), time.monotonic(), Drain()
    app[CONNECTIONS] = Connections(most_connections())
    app[BODIES], app[ONLY_LOOPBACK] = Bodies(), is_loopback(settings.host)
    app[TOKEN] = settings.token.get_secret_value() if settings.token else ""
    run_code = RunCode(settings)
    app[ENDPOINTS] = (run_code, Retrieve(settings), Calculate(settings, run_code))
    for endpoint in app[ENDPOINTS]:
        endpoint.add_routes(app.router)
        app[METRICS].watch_queue(endpoint.name, endpoint.slots)
    if settings.limiter_path is not None:
        app[METRICS].registry.register(LimiterCollector(settings.limiter_path))
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(_started)
    return app


async def _started(app: web.Application) -> AsyncIterator[None]:
    for endpoint in app[ENDPOINTS]:
        await endpoint.start()
    yield
    for endpoint in app[ENDPOINTS]:
        await endpoint.close()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in each error whether the call may have been executed, and in each answer what
    answered."""
    if response.status >= 400:
        response.headers.setdefault(EXECUTED, "maybe")
    elif response.status == 200:
        for endpoint in request.app[ENDPOINTS]:
            if request.path == f"/{endpoint.name}":
                response.headers[FINGERPRINT] = endpoint.fingerprint


async def _health(request: web.Request) -> web.Response:
    """`GET /health`: without the token only the status, with the token everything."""
    app = request.app
    draining = app[DRAIN].began
    answer: dict[str, Any] = {"status": "draining" if draining else "ok", "draining": draining}
    if is_authorised(request):
        answer |= {
            "version": _version(),
            "uptime_s": round(time.monotonic() - app[STARTED], 1),
            "tools": {endpoint.name: tool_health(endpoint) for endpoint in app[ENDPOINTS]},
        }
        for endpoint in app[ENDPOINTS]:
            answer |= endpoint.health()
    return web.json_response(answer, status=503 if draining else 200)


def _version() -> str:
    try:
        return metadata.version("verl-mixed-agent-loop")
    except metadata.PackageNotFoundError:  # Ray's workers run from a copy of the folder
        return "not installed"


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=prometheus_client.generate_latest(request.app[METRICS].registry),
        headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST},
    )


def serve(settings: ServerSettings, *, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cancels the requests under way.

    `ready_file` gets `{"url", "pid"}` as JSON once the server listens.

    Raises:
        OSError: the port is taken.
        PackageUnusable: programs cannot import a package of `sandbox_packages`.
    """
    # The sandbox's probe program must run outside of a running loop.
    asyncio.run(_serve(create_app(settings), settings, ready_file))


def app_runner(app: web.Application) -> web.AppRunner:
    """A runner that limits connections and cancels the work of a client that goes away."""
    return GuardedRunner(app, shutdown_timeout=SHUTDOWN_S)


async def _serve(app: web.Application, settings: ServerSettings, ready_file: Path | None) -> None:
    stop, drain = asyncio.Event(), app[DRAIN]

    def on_signal() -> None:
        if stop.is_set():
            drain.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    runner = app_runner(app)
    await runner.setup()
    try:
        # asyncio accepts as many connections at a time before they can be counted.
        backlog = min(1024, app[CONNECTIONS].most // 2)
        site = web.TCPSite(runner, settings.host, settings.port, backlog=backlog)
        await site.start()
        port = runner.addresses[0][1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{port}"
        if settings.token is None:
            print(
                f"warning: everybody who reaches {url} may run programs here: there is no token",
                file=sys.stderr,
                flush=True,
            )
        if ready_file is not None:
            draft = ready_file.with_suffix(".tmp")
            draft.write_text(json.dumps({"url": url, "pid": os.getpid()}))
            draft.replace(ready_file)
        print(f"tool server listening url={url} pid={os.getpid()}", flush=True)
        await stop.wait()
        # The server still listens while it drains, so that late requests get 503 and no error.
        await drain.finish(DRAIN_S)
        print(f"tool server stopping cancelled={drain.cancelled}", flush=True)
    finally:
        await runner.cleanup()
