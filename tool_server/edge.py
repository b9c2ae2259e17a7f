"""What happens around each request: admission, draining, metrics, and errors as JSON.

No request of a web page is admitted. With a token set, every path but `/health` needs
`Authorization: Bearer TOKEN`. All this is decided by the headers: the body of a request that is
refused is not kept. A server that drains answers new requests with 503 and lets the requests under
way end. Each error says whether the call may have been executed.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable

import prometheus_client
from aiohttp import web

from tool_server.connections import CONNECTIONS
from tool_server.http import BODIES, RequestSlots, json_error
from tool_server.wire.protocol import EXECUTED
from tool_server.wire.web_pages import web_page_fault

MONITORING_PATHS = frozenset(("/health", "/metrics"))
"""Paths that are answered while the server drains."""

RETRY_AFTER_S = 5
"""`Retry-After` of a server that drains; another server may have started by then."""

_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        self.queued = prometheus_client.Gauge(
            "tool_queued", "Requests that wait for a slot.", ["tool"], registry=self.registry
        )
        prometheus_client.ProcessCollector(registry=self.registry)

    def watch_queue(self, tool: str, slots: RequestSlots) -> None:
        """Export the length of a tool's queue at the time of each scrape."""
        self.queued.labels(tool).set_function(lambda: slots.queued)


class Drain:
    """Requests under way, and the state of draining."""

    def __init__(self) -> None:
        self.began = False
        """New requests are refused."""

        self.ended = False
        """Requests under way are cancelled."""

        self.cancelled = 0
        """How many."""

        self.under_way: set[asyncio.Task[object]] = set()
        """Each ends when its answer is sent."""

    async def finish(self, drain_s: float) -> None:
        """Wait for the requests under way, at most `drain_s`, and cancel the rest."""
        self.began = True
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=drain_s)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the requests under way."""
        if not self.ended:
            self.ended, self.cancelled = True, len(self.under_way)
            for task in list(self.under_way):
                task.cancel()


METRICS = web.AppKey("metrics", Metrics)
DRAIN = web.AppKey("drain", Drain)
TOKEN = web.AppKey("token", str)
"""The token of the server; empty serves everybody."""

ONLY_LOOPBACK = web.AppKey("only_loopback", bool)
"""Whether the server listens on this machine alone; then its name in `Host` is one of loopback."""


@web.middleware
async def one_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Admit a request, let its tool answer, count and time it by tool and status.

    An error that no tool answered becomes `{"error": ...}`; answers of tools stay as they are.
    """
    metrics = request.app[METRICS]
    known = request.match_info.route.resource is not None
    tool = request.path.strip("/") if known else "unknown"
    started, status = time.monotonic(), 500
    metrics.in_flight.labels(tool).inc()
    try:
        _admit(request)
        if request.path in MONITORING_PATHS:
            response = await handler(request)
        else:
            response = await _until_end(request, handler)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        if (why := _reason(request, error)) is not None:
            error.text = json.dumps({"error": why})
            error.content_type = "application/json"
        raise
    except asyncio.CancelledError:
        status = 499  # nginx's status for a client that closed the connection
        raise
    except Exception as error:
        _LOG.exception("no answer to %s %s", request.method, request.path)
        why = f"{request.path}: internal error ({type(error).__name__}); see the server's log"
        raise json_error(web.HTTPInternalServerError, why) from error
    finally:
        metrics.in_flight.labels(tool).dec()
        metrics.requests.labels(tool, str(status)).inc()
        metrics.seconds.labels(tool).observe(time.monotonic() - started)


def _admit(request: web.Request) -> None:
    """Refuse a request without the token, and what a page in somebody's browser can send without
    this server's consent."""
    headers, authorised = request.headers, is_authorised(request)
    if request.path != "/health" and not authorised:
        raise json_error(
            web.HTTPUnauthorized,
            f"{request.path} needs a token: send `Authorization: Bearer TOKEN`",
            {"WWW-Authenticate": "Bearer"},
        )
    if why := web_page_fault(headers, only_loopback=request.app[ONLY_LOOPBACK]):
        raise json_error(web.HTTPForbidden, why)
    if request.method == "POST" and request.content_type != "application/json":
        why = f"POST {request.path} takes Content-Type application/json"
        raise json_error(web.HTTPUnsupportedMediaType, f"{why}, not {request.content_type}")
    if headers.get("Content-Encoding", "identity") != "identity":
        why = "send the body without Content-Encoding"
        raise json_error(web.HTTPUnsupportedMediaType, why)
    if authorised:
        request.app[CONNECTIONS].admit(request.protocol)


def is_authorised(request: web.Request) -> bool:
    """Whether the request has the server's token, or the server has none."""
    token = request.app[TOKEN]
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return not token or (scheme.lower() == "bearer" and same)


async def _until_end(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answer, unless the server stops before or meanwhile."""
    drain, task = request.app[DRAIN], asyncio.current_task()
    assert task is not None
    if drain.began:
        why = "the server stops and takes no new requests: try again after Retry-After seconds"
        raise _stopping(why, executed="no")
    drain.under_way.add(task)
    try:
        return await handler(request)
    except asyncio.CancelledError:
        if not drain.ended:
            raise
        why = "the server stopped before it had an answer: try again"
        raise _stopping(why, executed="maybe") from None
    finally:
        drain.under_way.discard(task)
        request.app[BODIES].release(request)


def _stopping(why: str, executed: str) -> web.HTTPException:
    headers = {"Retry-After": str(RETRY_AFTER_S), EXECUTED: executed}
    error = json_error(web.HTTPServiceUnavailable, why, headers)
    error.force_close()
    return error


def _reason(request: web.Request, error: web.HTTPException) -> str | None:
    """What to say of an error that no tool answered; None for the answer of a tool."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            return f"{request.method} {request.path}: {error.text}"
        case web.HTTPNotFound() if request.match_info.http_exception is error:
            known = sorted(
                f"{route.method} {route.resource.canonical}"
                for route in request.app.router.routes()
                if route.resource is not None and route.method != "HEAD"
            )
            return f"no {request.path} here: the paths are {', '.join(known)}"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return f"{request.path} takes {allowed}, not {request.method}"
    return error.reason if error.text == f"{error.status}: {error.reason}" else None
