"""Middleware of the tool server: who is admitted, draining at shutdown, and errors as JSON.

No request of a web page is admitted. With a token set, every path but `/health` needs
`Authorization: Bearer TOKEN`. All this is decided by the headers: the body of a request that is
refused is not kept. A server that drains answers new requests with 503 and lets the requests under
way end.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tool_server.connections import Connection
from tool_server.http import BODIES, Handler, json_error
from tool_server.wire.protocol import EXECUTED
from tool_server.wire.web_pages import web_page_fault

MONITORING_PATHS = frozenset(("/health", "/metrics"))
"""Paths that are answered while the server drains."""

RETRY_AFTER_S = 5
"""`Retry-After` of a server that drains; another server may have started by then."""

_LOG = logging.getLogger(__name__)


class Drain:
    """Requests under way, and the state of draining."""

    def __init__(self) -> None:
        self.began = False
        """New requests are refused."""

        self.ended = False
        """Requests under way are cancelled."""

        self._under_way: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()

    @contextmanager
    def under_way(self) -> Iterator[None]:
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
        """Wait for the requests under way, at most `drain_s` or until `hurry`; cancel the rest.

        Returns the number of requests that were cancelled.
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
"""The token of the server; empty serves everybody."""

ONLY_LOOPBACK = web.AppKey("only_loopback", bool)
"""Whether the server listens on this machine alone; then its name in `Host` is one of loopback."""


def _refuse_web_pages(request: web.Request) -> None:
    """Refuse what a page in somebody's browser can send without this server's consent."""
    headers = request.headers
    if why := web_page_fault(headers, only_loopback=request.app[ONLY_LOOPBACK]):
        raise json_error(web.HTTPForbidden, why)
    if request.method == "POST" and request.content_type != "application/json":
        why = f"POST {request.path} takes Content-Type application/json"
        raise json_error(web.HTTPUnsupportedMediaType, f"{why}, not {request.content_type}")
    if headers.get("Content-Encoding", "identity") != "identity":
        why = "send the body without Content-Encoding"
        raise json_error(web.HTTPUnsupportedMediaType, why)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests without the token or of a web page, and new requests while the server
    drains."""
    if request.path != "/health" and not is_authorised(request):
        raise json_error(
            web.HTTPUnauthorized,
            f"{request.path} needs a token: send `Authorization: Bearer TOKEN`",
            {"WWW-Authenticate": "Bearer"},
        )
    _refuse_web_pages(request)
    if isinstance(request.protocol, Connection) and is_authorised(request):
        request.protocol.note_admitted()
    if request.path in MONITORING_PATHS:
        return await handler(request)
    drain = request.app[DRAIN]
    if drain.began:
        raise _stopping(
            "the server stops and takes no new requests: try again after Retry-After seconds",
            executed="no",
        )
    with drain.under_way():
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if not drain.ended:
                raise
            raise _stopping(
                "the server stopped before it had an answer: try again", executed="maybe"
            ) from None
        finally:
            request.app[BODIES].release(request)


def is_authorised(request: web.Request) -> bool:
    """Whether the request has the server's token, or the server has none."""
    token = request.app[TOKEN]
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return not token or (scheme.lower() == "bearer" and same)


def _stopping(why: str, executed: str) -> web.HTTPException:
    headers = {"Retry-After": str(RETRY_AFTER_S), EXECUTED: executed}
    error = json_error(web.HTTPServiceUnavailable, why, headers)
    error.force_close()
    return error


@web.middleware
async def say_errors_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors that no tool answered into `{"error": ...}`; answers of tools stay as they
    are."""
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
            return f"no {request.path} here: the paths are {', '.join(_paths(request.app))}"
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
