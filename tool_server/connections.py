"""A limit on the connections of a server, so that silent peers keep nobody out.

This is an adapter of aiohttp's `Server`, which it makes and whose two callbacks it extends.
"""

import asyncio
import resource

from aiohttp import web

MOST_FILES = 1 << 16
"""Descriptors that are enough for any load of this server."""

KEEPALIVE_S = 75.0
"""From an answer to the next request. Longer than a client of ours keeps an unused connection, so
no request is sent into a connection that the server is about to close."""


def most_connections() -> int:
    """Connections of a server that runs programs too: half of the process's descriptors.

    Raises the soft limit of open files, at most to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MOST_FILES:  # RLIM_INFINITY is -1
        soft = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(soft, MOST_FILES) // 2


class Connections:
    """The connections of a server, of which there are at most `most`.

    For a new one above this number, the oldest connection of which no request was admitted yet is
    cut. A peer that sends its request at once is therefore served, however many silent connections
    there are. If every other connection was admitted, the new one is cut.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._strangers: dict[web.RequestHandler, asyncio.Transport] = {}
        self._admitted: set[web.RequestHandler] = set()

    def enter(self, connection: web.RequestHandler, transport: asyncio.Transport) -> None:
        self._strangers[connection] = transport
        if len(self._strangers) + len(self._admitted) > self.most:
            self._strangers.pop(next(iter(self._strangers))).abort()

    def admit(self, connection: web.RequestHandler) -> None:
        """A request of this connection had the token."""
        if self._strangers.pop(connection, None) is not None:
            self._admitted.add(connection)

    def leave(self, connection: web.RequestHandler) -> None:
        self._strangers.pop(connection, None)
        self._admitted.discard(connection)


CONNECTIONS = web.AppKey("connections", Connections)


class _Server(web.Server):
    connections_of_app: Connections

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.connections_of_app.enter(handler, transport)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self.connections_of_app.leave(handler)


class GuardedRunner(web.AppRunner):
    """Serves an application that has `CONNECTIONS`.

    The work of a request is cancelled when its client goes away. Bodies are not decompressed.
    """

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
        )
        server.connections_of_app = self.app[CONNECTIONS]
        return server
