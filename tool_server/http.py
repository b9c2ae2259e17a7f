"""Shared by all tools of the server: request bodies, slots with a queue, metrics, JSON errors."""

import asyncio
import base64
import hashlib
import json
import math
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
import prometheus_client
from aiohttp import web
from pydantic import BaseModel, ValidationError

from config.compat import timeout
from tool_server.wire.protocol import NOT_EXECUTED
from tool_server.wire.responses import may_have_surrogates, rewritten_without_surrogates

MOST_ERRORS = 20
"""Mistakes of one request that are named."""

PIECE_BYTES = 3 << 16
"""Bytes of a file that are encoded at once: a multiple of 3, so that the pieces join to base64."""

Request = TypeVar("Request", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(Protocol):
    """One tool of the server."""

    name: str
    """Key of the tool in `/health`."""

    slots: "RequestSlots"
    """`/health` and `/metrics` show their queue."""

    fault: str
    """Why the tool cannot work, for `/health`; empty if it can."""

    fingerprint: str
    """Hash of what the answers depend on beside the request; see `fingerprint_of`."""

    def add_routes(self, router: web.UrlDispatcher) -> None: ...

    def health(self) -> dict[str, Any]:
        """Further fields of `/health`."""
        ...

    async def start(self) -> None:
        """Called before the server listens."""
        ...

    async def close(self) -> None:
        """Called after the last request."""
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
            "tool_queued", "Requests that wait for a slot.", ["tool"], registry=self.registry
        )
        prometheus_client.ProcessCollector(registry=self.registry)

    def watch_queue(self, tool: str, slots: "RequestSlots") -> None:
        """Export the length of a tool's queue at the time of each scrape."""
        self.queued.labels(tool).set_function(lambda: slots.queued)


class RequestSlots:
    """Slots for `count` requests and a queue of `queue_length`, first come, first served."""

    def __init__(self, count: int, queue_length: int) -> None:
        self.count, self.queue_length = count, queue_length
        self.active = 0
        """Requests that run."""

        self._line: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._mean_s = 0.05

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it. A request that is cancelled leaves the queue.

        Raises:
            web.HTTPTooManyRequests: the queue is full; `Retry-After` estimates when it is shorter.
        """
        if self.active < self.count:
            self.active += 1
        else:
            await self._wait()
        started = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += (time.monotonic() - started - self._mean_s) / 8
            self._hand_on()

    async def _wait(self) -> None:
        if self.queued >= self.queue_length:
            raise json_error(
                web.HTTPTooManyRequests,
                f"queue full: {self.queued} requests wait; try again after Retry-After seconds",
                {"Retry-After": str(self._retry_after_s()), **NOT_EXECUTED},
            )
        turn = asyncio.get_running_loop().create_future()
        self._line[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.pop(turn, None)
            else:
                self._hand_on()  # it got the slot in the moment of its cancellation
            raise

    def _hand_on(self) -> None:
        """Give a free slot to the first request in the queue."""
        while self._line:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():  # a done one was cancelled, and its request has not yet noticed
                turn.set_result(None)
                return
        self.active -= 1

    def _retry_after_s(self) -> int:
        return min(60, math.ceil(max(1.0, self.queued * self._mean_s / self.count)))


def tool_health(endpoint: Endpoint) -> dict[str, Any]:
    """The tool's entry in `/health`: whether it is up, and its queue."""
    fault, slots = endpoint.fault, endpoint.slots
    entry: dict[str, Any] = {"up": not fault} | ({"fault": fault} if fault else {})
    entry["fingerprint"] = endpoint.fingerprint
    return entry | {"places": slots.count, "active": slots.active, "queued": slots.queued}


def fingerprint_of(*parts: object) -> str:
    """A hash of what a tool's answers depend on; callers put it into the keys of their caches.

    Each part is shown by `repr`, which must be equal in all processes. Python's version counts for
    every tool.
    """
    return hashlib.sha256(repr((sys.version, parts)).encode()).hexdigest()[:32]


METRICS = web.AppKey("metrics", Metrics)


@web.middleware
async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count and time the request, by tool and status."""
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
        status = 499  # nginx's status for a client that closed the connection
        raise
    finally:
        metrics.in_flight.labels(tool).dec()
        metrics.requests.labels(tool, str(status)).inc()
        metrics.seconds.labels(tool).observe(time.monotonic() - started)


class Bodies:
    """The request bodies that are received or whose request waits: their bytes in all, and their
    time."""

    def __init__(
        self, most_bytes: int = 256 << 20, whole_s: float = 60.0, most_kept: int = 1 << 30
    ) -> None:
        self.most_bytes, self.whole_s, self.most_kept = most_bytes, whole_s, most_kept
        self.held = 0
        """Bytes of all bodies whose end has not arrived."""

        self.kept = 0
        """Bytes of all bodies whose request is not answered: it waits in a queue, or runs."""

        self._kept_of: dict[int, int] = {}

    async def read(self, request: web.Request) -> bytes | bytearray:
        """The body of a request.

        Raises:
            web.HTTPRequestEntityTooLarge, web.HTTPRequestTimeout: it is too large, or too slow.
            web.HTTPServiceUnavailable: all unfinished bodies together are too large, or those of
                all requests that are not answered.
        """
        if not request.can_read_body:  # there is none, or a middleware has read it
            return await request.read()
        body, largest = bytearray(), request.client_max_size
        if (request.content_length or 0) > largest:
            raise web.HTTPRequestEntityTooLarge(largest, request.content_length or 0)
        try:
            async with timeout(self.whole_s):
                async for part in request.content.iter_any():
                    body += part
                    self.held += len(part)
                    if len(body) > largest:
                        raise web.HTTPRequestEntityTooLarge(largest, len(body))
                    if self.held > self.most_bytes:
                        why = (
                            f"unfinished request bodies hold {self.most_bytes >> 20} MB: try again"
                        )
                        raise json_error(web.HTTPServiceUnavailable, why, {"Retry-After": "1"})
        except TimeoutError as error:
            why = f"{request.path}: the body did not end within {self.whole_s:g} s"
            raise json_error(web.HTTPRequestTimeout, why) from error
        finally:
            self.held -= len(body)
        if self.kept + len(body) > self.most_kept:
            why = f"the requests under way hold {self.most_kept >> 20} MB: try again"
            raise json_error(web.HTTPServiceUnavailable, why, {"Retry-After": "1", **NOT_EXECUTED})
        self._kept_of[id(request)] = len(body)
        self.kept += len(body)
        return body

    def release(self, request: web.Request) -> None:
        """The request is answered, so nothing of its body is kept."""
        self.kept -= self._kept_of.pop(id(request), 0)


BODIES = web.AppKey("bodies", Bodies)


async def body_of(request: web.Request, model: type[Request]) -> Request:
    """The request's JSON as `model`; a wrong one is answered with 400, which names wrong fields.

    Half of a character in UTF-16 (a lone surrogate), which only an escape in JSON can express,
    becomes `?`: models write them, and no program can hold one.
    """
    body = await request.app[BODIES].read(request)
    try:
        try:
            return model.model_validate_json(body)
        except ValidationError:
            if not may_have_surrogates(body):
                raise
        return model.model_validate_json(rewritten_without_surrogates(body))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}"
            for item in error.errors()[:MOST_ERRORS]
        )
        raise bad_request(request, wrong) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(request, f"body: {error}") from error


def bad_request(request: web.Request, wrong: str) -> web.HTTPException:
    return json_error(web.HTTPBadRequest, f"POST {request.path}: {wrong}")


def json_error(
    kind: type[web.HTTPError], why: str, headers: Mapping[str, str] | None = None
) -> web.HTTPException:
    """A response with the body `{"error": why}`."""
    return kind(text=json.dumps({"error": why}), content_type="application/json", headers=headers)


def json_answer(
    answer: Any, status: int = 200, files: Mapping[str, bytes] | None = None
) -> web.Response:
    """A response in JSON.

    Args:
        answer: what is encoded.
        status: HTTP status.
        files: path -> content, added to `answer` as `files` in base64. They are encoded in pieces
            while they are sent, because 16 MB at once would keep all other requests waiting.
    """
    try:
        body = msgspec.json.encode(answer)
    except UnicodeEncodeError:  # a lone surrogate, which JSON holds only in escaped form
        body = json.dumps(answer).encode()
    response = web.Response(
        body=with_files(body, files) if files else body,
        status=status,
        content_type="application/json",
    )
    if files:
        response.headers["Content-Length"] = str(length_with_files(body, files))
    return response


async def with_files(answer: bytes, files: Mapping[str, bytes]) -> AsyncIterator[bytes]:
    """The JSON object `answer`, which is not empty, with `files` in base64, in pieces."""
    yield answer.removesuffix(b"}")
    for name, content in _named(files):
        yield name
        for start in range(0, len(content), PIECE_BYTES):
            yield base64.b64encode(memoryview(content)[start : start + PIECE_BYTES])
            await asyncio.sleep(0)
    yield b'"}}'


def length_with_files(answer: bytes, files: Mapping[str, bytes]) -> int:
    """Bytes of all pieces of `with_files`."""
    encoded = (len(name) + 4 * -(-len(content) // 3) for name, content in _named(files))
    return len(answer) + 2 + sum(encoded)


def _named(files: Mapping[str, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """What stands before each content, and the content."""
    before = b',"files":{'
    for path, content in files.items():
        yield before + json.dumps(path).encode() + b':"', content
        before = b'",'
