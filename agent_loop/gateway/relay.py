"""Passes connections of a sandbox on to the gateway's Unix socket, in the event loop.

The listening socket belongs to the sandbox's network, and is served by the worker. So an idle
session needs no process that listens, and the program cannot reach what passes its bytes on.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from config.compat import gather_all

CHUNK = 1 << 16
"""Bytes that each direction of a connection holds; a side that does not read stops the other."""

MAX_CONNECTIONS = 64
"""Of one session at once; more are closed at once. Each takes two descriptors of the worker."""


@asynccontextmanager
async def relayed(listener: socket.socket, path: str) -> AsyncIterator[None]:
    """While it is open, connections to `listener` reach the Unix socket `path`."""
    tasks = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            answers, there = await asyncio.open_unix_connection(path, limit=CHUNK)
            await gather_all([_pass_on(reader, there), _pass_on(answers, writer)])
        except OSError:  # one of the two has gone; the other notices
            pass
        finally:
            for each in (writer, there):
                if each is not None:
                    each.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # With `start_serving` this call could be cancelled, and nobody would have the server to close.
    server = await asyncio.start_server(accept, sock=listener, limit=CHUNK, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
