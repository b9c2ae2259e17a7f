"""Who may come in, how the server stops, and what an error looks like.

With a token set, every path but `/health` wants `Authorization: Bearer TOKEN`. A server that was
told to stop answers 503 to whatever is new, and lets requests under way end.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from agent_loop.tools.server.http import Handler, json_error

WATCHED_PATHS = frozenset(("/health", "/metrics"))
"""Answered while the server stops."""

RETRY_AFTER_S = 5
"""What a stopping server tells who comes late: another one may be there by then."""

_LOG = logging.getLogger(__name__)


class Drain:
    """Requests under way, and the end of taking in new ones."""

    def __init__(self) -> None:
        self.began = False
        """Nothing new is taken in."""

        self.ended = False
        """What is under way is cancelled."""

        self._under_way: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around the work of one request."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)
            if not self._under_way:
                self._empty.set()

    async def finish(self, drain_s: float, hurry: asyncio.Event) -> int:
        """Let requests under way end, and cancel those that have not.

        Args:
            drain_s: how long they may take.
            hurry: set: they may take no longer.

        Returns:
            Requests that were cancelled.
        """
        self.began = True
        if self._under_way:
            self._empty.clear()
            waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, hurry)]
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        self.ended = True
        late = list(self._under_way)
        for task in late:
            task.cancel()
        return len(late)


DRAIN = web.AppKey("drain", Drain)
TOKEN = web.AppKey("token", str)
"""Empty: everybody may come in."""


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse who has no token and who comes too late."""
    if request.path != "/health" and not is_authorised(request):
        raise json_error(
            web.HTTPUnauthorized,
            "this server wants a token: send `Authorization: Bearer TOKEN`",
            {"WWW-Authenticate": "Bearer"},
        )
    if request.path in WATCHED_PATHS:
        return await handler(request)
    drain = request.app[DRAIN]
    if drain.began:
        raise _stopping("this server stops and takes nothing new")
    with drain.under_way():
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if not drain.ended:
                raise
            raise _stopping("this server stopped before it had an answer") from None


def is_authorised(request: web.Request) -> bool:
    """Whether the request carries the server's token, where it has one."""
    token = request.app[TOKEN]
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return not token or (scheme.lower() == "bearer" and same)


def _stopping(why: str) -> web.HTTPException:
    error = json_error(web.HTTPServiceUnavailable, why, {"Retry-After": str(RETRY_AFTER_S)})
    error.force_close()
    return error


@web.middleware
async def say_errors_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """`{"error": ...}` for what no tool answered; what a tool wrote stays as it is."""
    try:
        return await handler(request)
    except web.HTTPError as error:
        why = _reason(request, error)
        if why is None:
            raise
        error.text = json.dumps({"error": why})
        error.content_type = "application/json"
        raise
    except Exception as error:
        _LOG.exception("no answer to %s %s", request.method, request.path)
        why = f"{request.path}: internal error ({type(error).__name__}); see the server's log"
        raise json_error(web.HTTPInternalServerError, why) from error


def _reason(request: web.Request, error: web.HTTPError) -> str | None:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return f"{request.method} {request.path}: {error.text}"
        case web.HTTPNotFound() if request.match_info.http_exception is error:
            return f"no {request.path} here; there are {', '.join(_paths(request.app))}"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return f"{request.path} takes {allowed}, not {request.method}"
    return error.reason if error.text == f"{error.status}: {error.reason}" else None


def _paths(app: web.Application) -> list[str]:
    return sorted(
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
