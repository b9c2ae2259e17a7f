"""Shared by all tools of the server: request bodies, slots with a queue, JSON errors."""

import asyncio
import hashlib
import io
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from config.compat import timeout
from tool_server.wire.protocol import NOT_EXECUTED
from tool_server.wire.responses import dumps, read_json

MOST_ERRORS = 20
"""Mistakes of one request that are named."""

MOST_QUEUED = 20_000
"""Requests of one tool that may wait; further requests are answered with 429 and Retry-After."""

LARGE_BYTES = 1 << 20

Request = TypeVar("Request", bound=BaseModel)


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


class RequestSlots:
    """Slots for `count` requests and a queue of `queue_length`, first come, first served."""

    def __init__(self, count: int, queue_length: int = MOST_QUEUED) -> None:
        self.count, self.queue_length = count, queue_length
        self.active = 0
        """Requests that run."""

        self.queued = 0
        """Requests that wait."""

        self._free = asyncio.Semaphore(count)
        self._mean_s = 0.05

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it. A request that is cancelled leaves the queue.

        Raises:
            web.HTTPTooManyRequests: the queue is full; `Retry-After` estimates when it is shorter.
        """
        if self._free.locked() and self.queued >= self.queue_length:
            raise json_error(
                web.HTTPTooManyRequests,
                f"queue full: {self.queued} requests wait; try again after Retry-After seconds",
                {"Retry-After": str(self._retry_after_s()), **NOT_EXECUTED},
            )
        self.queued += 1
        try:
            await self._free.acquire()
        finally:
            self.queued -= 1
        self.active += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += (time.monotonic() - started - self._mean_s) / 8
            self.active -= 1
            self._free.release()

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


class Bodies:
    """The request bodies in memory: of requests that are received, wait in a queue, or run."""

    def __init__(self, most_bytes: int = 1 << 30, whole_s: float = 60.0) -> None:
        self.most_bytes, self.whole_s = most_bytes, whole_s
        self.held = 0
        """Bytes of all these bodies."""

        self._held_of: dict[int, int] = {}

    async def read(self, request: web.Request) -> bytes | bytearray:
        """The body of a request, which counts until `release`.

        Raises:
            web.HTTPRequestEntityTooLarge, web.HTTPRequestTimeout: it is too large, or too slow.
            web.HTTPServiceUnavailable: all bodies together are too large.
        """
        if not request.can_read_body:  # there is none, or a middleware has read it
            return await request.read()
        body, largest = bytearray(), request.client_max_size
        try:
            async with timeout(self.whole_s):
                async for part in request.content.iter_any():
                    body += part
                    self.held += len(part)
                    self._held_of[id(request)] = len(body)
                    if len(body) > largest:
                        raise web.HTTPRequestEntityTooLarge(largest, len(body))
                    if self.held > self.most_bytes:
                        why = f"the requests under way hold {self.most_bytes >> 20} MB: try again"
                        headers = {"Retry-After": "1", **NOT_EXECUTED}
                        raise json_error(web.HTTPServiceUnavailable, why, headers)
        except TimeoutError as error:
            why = f"{request.path}: the body did not end within {self.whole_s:g} s"
            raise json_error(web.HTTPRequestTimeout, why) from error
        return body

    def release(self, request: web.Request) -> None:
        """The request is answered, so nothing of its body is kept."""
        self.held -= self._held_of.pop(id(request), 0)


BODIES = web.AppKey("bodies", Bodies)


async def body_of(request: web.Request, model: type[Request]) -> Request:
    """The request's JSON as `model`; a wrong one is answered with 400, which names wrong fields.

    Half of a character in UTF-16 (a lone surrogate), which only an escape in JSON can express,
    becomes `?`: models write them, and no program can hold one.
    """
    body = await request.app[BODIES].read(request)
    try:
        return read_json(model.model_validate_json, body)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}"
            for item in error.errors()[:MOST_ERRORS]
        )
    except (ValueError, RecursionError) as error:
        wrong = f"body: {error}"
    raise json_error(web.HTTPBadRequest, f"POST {request.path}: {wrong}")


def json_error(
    kind: type[web.HTTPError], why: str, headers: Mapping[str, str] | None = None
) -> web.HTTPException:
    """A response with the body `{"error": why}`."""
    return kind(text=json.dumps({"error": why}), content_type="application/json", headers=headers)


def json_answer(answer: Any, status: int = 200) -> web.Response:
    """A response in JSON; bytes are written in base64."""
    body = dumps(answer)
    # A large body is sent in pieces, because a socket takes and copies what it cannot send at once.
    sent = io.BytesIO(body) if len(body) > LARGE_BYTES else body
    return web.Response(body=sent, status=status, content_type="application/json")
