"""What the tools of the server share: reading a request, waiting for a place, counting."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import prometheus_client
from aiohttp import web
from pydantic import BaseModel, ValidationError

Request = TypeVar("Request", bound=BaseModel)


class Endpoint(Protocol):
    """One tool of the server."""

    name: str
    """Of its place in `/health`."""

    def add_routes(self, router: web.UrlDispatcher) -> None: ...

    def health(self) -> dict[str, Any]:
        """What `/health` says of it."""
        ...

    async def start(self) -> None:
        """Before the server listens."""
        ...

    async def close(self) -> None:
        """After the last request."""
        ...


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
            "tool_queued", "Requests that wait for a place.", ["tool"], registry=self.registry
        )


class Places:
    """So many requests at once, and so many in line.

    Args:
        count: requests worked on at once.
        queue_length: requests that may wait.
    """

    def __init__(self, count: int, queue_length: int) -> None:
        self.count, self.queue_length = count, queue_length
        self.queued = 0
        """Requests that wait."""

        self._places = asyncio.Semaphore(count)
        self._mean_s = 0.05

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it.

        Raises:
            web.HTTPTooManyRequests: the line is full; `Retry-After` is when it may be shorter.
        """
        if self.queued >= self.queue_length and self._places.locked():
            retry_after_s = math.ceil(max(1.0, self.queued * self._mean_s / self.count))
            raise web.HTTPTooManyRequests(
                text=json.dumps({"error": f"queue full: {self.queued} requests wait"}),
                content_type="application/json",
                headers={"Retry-After": str(min(60, retry_after_s))},
            )
        self.queued += 1
        try:
            await self._places.acquire()
        finally:
            self.queued -= 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._places.release()
            self._mean_s += (time.monotonic() - started - self._mean_s) / 8


METRICS = web.AppKey("metrics", Metrics)


@web.middleware
async def measure(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Count the request, by tool and status."""
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


async def body_of(request: web.Request, model: type[Request]) -> Request:
    """The request's JSON as `model`; 400 with one message that names every wrong field."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()
        )
        raise bad_request(request, wrong) from error


def bad_request(request: web.Request, wrong: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(
        text=json.dumps({"error": f"POST {request.path}: {wrong}"}),
        content_type="application/json",
    )
