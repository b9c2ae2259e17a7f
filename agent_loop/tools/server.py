"""The tool server: model-written code, passage search and arithmetic over HTTP.

Speaks the protocols that users already run: SandboxFusion's `POST /run_code` and Search-R1's
`POST /retrieve`; besides `POST /calculate`, `GET /health`, `GET /metrics` (Prometheus). A wrong
request is 400 with one message; a tool without its means (no corpus, no isolation) is 503, never a
made-up answer.
"""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import prometheus_client
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_loop.tools.calculator import CalculationError, calculate
from agent_loop.tools.limiter_collector import LimiterCollector
from agent_loop.tools.sandbox import (
    Limits,
    RunResult,
    Sandbox,
    SandboxKind,
    SandboxUnavailable,
    choose_sandbox,
)
from agent_loop.tools.search import PassageIndex

LEAST_MEMORY_MB = 64
"""A program that asks for less gets this: the interpreter would not start."""

SHUTDOWN_S = 2.0
"""How long requests under way may take to end after SIGTERM."""


class ServerSettings(BaseModel):
    """How the tool server runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8100, ge=0, le=65535)
    """0 takes a free port."""

    corpus_path: Path | None = None
    """Passages for /retrieve, JSON lines of `{"id", "contents"}`; None: /retrieve is 503."""

    sandbox: SandboxKind = "auto"
    """auto: the strongest that works here."""

    sandbox_workers: int = Field(default=2, ge=1)
    """Programs run at once; further ones wait."""

    limiter_path: Path | None = None
    """State file of the rate limiter of those who call; its numbers join /metrics."""


class RunCodeRequest(BaseModel):
    """SandboxFusion's request; what we do not know is ignored, as SandboxFusion does."""

    code: str
    language: str = "python"
    stdin: str | None = ""
    compile_timeout: float = Field(default=10.0, gt=0)
    run_timeout: float = Field(default=5.0, gt=0, le=120)
    memory_limit_MB: int = Field(-1, le=4096)
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


class RetrieveRequest(BaseModel):
    """Search-R1's request."""

    queries: list[str] = Field(min_length=1, max_length=256)
    topk: int | None = Field(default=3, ge=1, le=100)
    return_scores: bool = False


class CalculateRequest(BaseModel):
    """One expression."""

    expression: str


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "tool_requests", "Requests answered.", ["tool", "status"], registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "tool_seconds", "Time to answer.", ["tool"], registry=self.registry
        )
        self.in_flight = prometheus_client.Gauge(
            "tool_in_flight", "Requests under way.", ["tool"], registry=self.registry
        )


SETTINGS = web.AppKey("settings", ServerSettings)
SANDBOX = web.AppKey("sandbox", Sandbox)
SANDBOX_FAULT = web.AppKey("sandbox_fault", str)
INDEX = web.AppKey("index", PassageIndex)
RUNS = web.AppKey("runs", asyncio.Semaphore)
STARTED = web.AppKey("started", float)
METRICS = web.AppKey("metrics", Metrics)


def create_app(settings: ServerSettings) -> web.Application:
    """The server as an aiohttp application.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be indexed.
    """
    app = web.Application(middlewares=[_measure], client_max_size=64 << 20)
    app[SETTINGS], app[METRICS], app[STARTED] = settings, Metrics(), time.monotonic()
    app[RUNS] = asyncio.Semaphore(settings.sandbox_workers)
    try:
        app[SANDBOX] = choose_sandbox(settings.sandbox)
        app[SANDBOX_FAULT] = ""
    except SandboxUnavailable as error:
        app[SANDBOX_FAULT] = str(error)  # fails closed: /run_code is 503, the rest works
    if settings.corpus_path is not None:
        app[INDEX] = PassageIndex.build(settings.corpus_path)
    if settings.limiter_path is not None:
        app[METRICS].registry.register(LimiterCollector(settings.limiter_path))
    app.router.add_post("/run_code", _run_code)
    app.router.add_post("/retrieve", _retrieve)
    app.router.add_post("/calculate", _calculate)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    return app


@web.middleware
async def _measure(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    metrics = request.app[METRICS]
    known = request.match_info.route.resource is not None
    tool = request.path.strip("/") if known else "unknown"
    started, status = time.monotonic(), 500
    metrics.in_flight.labels(tool).inc()
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    except asyncio.CancelledError:
        status = 499  # nginx's number for a client that went away
        raise
    finally:
        metrics.in_flight.labels(tool).dec()
        metrics.requests.labels(tool, str(status)).inc()
        metrics.seconds.labels(tool).observe(time.monotonic() - started)


async def _body(request: web.Request, model: type[BaseModel]) -> Any:
    """The request's JSON as `model`; 400 with one message that names every wrong field."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()
        )
        raise _bad_request(request, wrong) from error


def _bad_request(request: web.Request, wrong: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(
        text=json.dumps({"error": f"POST {request.path}: {wrong}"}),
        content_type="application/json",
    )


async def _run_code(request: web.Request) -> web.Response:
    asked: RunCodeRequest = await _body(request, RunCodeRequest)
    app = request.app
    if SANDBOX not in app:
        raise web.HTTPServiceUnavailable(text=app[SANDBOX_FAULT])
    unsupported = _unsupported(asked)
    if unsupported:
        return web.json_response(_run_answer("SandboxError", unsupported, None))
    memory_mb = max(LEAST_MEMORY_MB, asked.memory_limit_MB)
    limits = Limits(
        wall_s=asked.run_timeout,
        cpu_s=math.ceil(asked.run_timeout),
        memory_mb=memory_mb if asked.memory_limit_MB > 0 else Limits().memory_mb,
    )
    try:
        async with app[RUNS]:
            result = await app[SANDBOX].run_python(asked.code, asked.stdin or "", limits)
    except SandboxUnavailable as error:
        answer = _run_answer("SandboxError", str(error), None)
        return web.json_response(answer, status=503)
    return web.json_response(run_answer(result))


def _unsupported(asked: RunCodeRequest) -> str:
    if asked.language != "python":
        return f"language={asked.language!r} is not supported: this server runs python"
    if asked.files or asked.fetch_files:
        return "files and fetch_files are not supported by this server"
    return ""


def run_answer(result: RunResult) -> dict[str, Any]:
    """What `POST /run_code` says of a program that ran."""
    good = result.status == "Finished" and result.return_code == 0
    return _run_answer("Success" if good else "Failed", "", result)


def _run_answer(status: str, message: str, result: RunResult | None) -> dict[str, Any]:
    """SandboxFusion's `RunCodeResponse`."""
    run = None
    if result is not None:
        run = {
            "status": result.status,
            "execution_time": result.execution_time_s,
            "return_code": result.return_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


async def _retrieve(request: web.Request) -> web.Response:
    asked: RetrieveRequest = await _body(request, RetrieveRequest)
    index = request.app.get(INDEX)
    if index is None:
        raise web.HTTPServiceUnavailable(
            text="this server has no corpus: start it with --corpus FILE"
        )
    topk = asked.topk or 3
    return web.json_response(search_answer(index, asked.queries, topk, asked.return_scores))


def search_answer(
    index: PassageIndex, queries: Sequence[str], topk: int, return_scores: bool
) -> dict[str, Any]:
    """What `POST /retrieve` says: per query the best passages, as Search-R1 has them."""
    found = [index.search(query, topk) for query in queries]
    documents = [[{"id": p.id, "contents": p.contents} for p in passages] for passages in found]
    if not return_scores:
        return {"result": documents}
    scored = [
        [
            {"document": document, "score": passage.score}
            for document, passage in zip(own, passages, strict=True)
        ]
        for own, passages in zip(documents, found, strict=True)
    ]
    return {"result": scored}


async def _calculate(request: web.Request) -> web.Response:
    asked: CalculateRequest = await _body(request, CalculateRequest)
    return web.json_response(calculation_answer(asked.expression))


def calculation_answer(expression: str) -> dict[str, Any]:
    """What `POST /calculate` says."""
    try:
        return {"result": calculate(expression)}
    except CalculationError as error:
        return {"error": str(error)}


async def _health(request: web.Request) -> web.Response:
    app = request.app
    sandbox = app.get(SANDBOX)
    index = app.get(INDEX)
    return web.json_response(
        {
            "status": "ok",
            "sandbox": sandbox.name if sandbox else None,
            "sandbox_why": sandbox.why if sandbox else app[SANDBOX_FAULT],
            "passages": index.size if index else 0,
            "uptime_s": round(time.monotonic() - app[STARTED], 1),
        }
    )


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
