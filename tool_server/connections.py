"""Limits on the connections of a server: their number, and the time that a slow peer may take.

Bodies are limited in `tool_server.http`. This is an adapter of aiohttp's connection
class, whose private `_request_count` and `_waiter` it reads.
"""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

from aiohttp import web

MOST_FILES = 1 << 16
"""Descriptors that are enough for any load of this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What the peers of a server may take."""

    count: int
    """Connections at once."""

    header_s: float = 10.0
    """From a connection's start, or from the first byte of a later request, to the request's last
    header."""

    keepalive_s: float = 75.0
    """From an answer to the next request. The tool client closes an unused connection after 60 s,
    so that no request is sent into a connection that the server is about to close."""

    answer_s: float = 60.0
    """Time in which a peer must read an answer, from the moment at which it is too slow for the
    server's buffers."""


def limits_of_process() -> ConnectionLimits:
    """Limits for a server that runs programs too: connections take half of the descriptors.

    Raises the soft limit of open files, at most to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MOST_FILES:  # RLIM_INFINITY is -1
        soft = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return ConnectionLimits(count=min(soft, MOST_FILES) // 2)


class Connection(web.RequestHandler):
    """A connection that is cut if its peer is too slow."""

    __slots__ = ("_answer_timer", "_header_timer", "_server", "_timed")

    def __init__(self, server: "GuardedServer", **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._header_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._timed = 0
        """Number of the request whose answer is timed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_header_timer()
        self._server.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.leave(self)
        self._header_timer = _stopped(self._header_timer)
        self._answer_timer = _stopped(self._answer_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        super().data_received(data)
        if self._request_count > requests:  # its headers are complete
            self._header_timer = _stopped(self._header_timer)
        elif self._header_timer is None and self._is_waiting:
            self._start_header_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None or self._timed != self._request_count:
            _stopped(self._answer_timer)
            self._timed = self._request_count
            self._answer_timer = self._loop.call_later(self._server.limits.answer_s, self._cut_late)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_waiting:  # else pieces of the answer are still to come
            self._answer_timer = _stopped(self._answer_timer)

    def _cut_late(self) -> None:
        self._answer_timer = None
        is_under_way = not self._is_waiting and self._timed == self._request_count
        if is_under_way or self.writing_paused:
            self.cut()

    def cut(self) -> None:
        """Close the connection at once; what is not yet sent is dropped."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def _start_header_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._server.limits.header_s, self.cut)

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is under way, nor is one parsed whose handler has not begun."""
        return self._waiter is not None and not self._waiter.done()

    def note_admitted(self) -> None:
        """A request of this connection had the token."""
        self._server.admitted(self)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    """Stop a timer; the result takes its place."""
    if timer is not None:
        timer.cancel()


class GuardedServer(web.Server):
    """Makes connections, and makes room for new ones.

    Above `limits.count`, the oldest connection of which no request was admitted yet is cut. A peer
    that sends its request at once is therefore served, however many silent connections there are.
    If every other connection was admitted, the new one is cut.
    """

    def __init__(self, handler: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(handler, **options)
        self.limits = limits
        self._strangers: dict[Connection, None] = {}
        self._admitted: set[Connection] = set()

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)

    def enter(self, connection: Connection) -> None:
        self._strangers[connection] = None
        if len(self._strangers) + len(self._admitted) > self.limits.count:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cut()

    def admitted(self, connection: Connection) -> None:
        if self._strangers.pop(connection, connection) is None:
            self._admitted.add(connection)

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._admitted.discard(connection)


class GuardedRunner(web.AppRunner):
    """Serves an application with limits on its connections.

    The work of a request is cancelled when its client goes away. Bodies are not decompressed.
    """

    def __init__(self, app: web.Application, limits: ConnectionLimits, shutdown_s: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_s)
        self._limits = limits

    async def _make_server(self) -> GuardedServer:
        made = await super()._make_server()
        return GuardedServer(
            made.request_handler,
            self._limits,
            request_factory=made.request_factory,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._limits.keepalive_s,
        )
