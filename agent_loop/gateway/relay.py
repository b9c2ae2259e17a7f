"""Passes connections of a sandbox on to the gateway's Unix socket, in the event loop.

The listening socket belongs to the sandbox's network, and is served by the worker. So an idle
session needs no process that listens, and the program cannot reach what passes its bytes on.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from agent_loop.calls.child_process import uninterrupted
from agent_loop.gateway.pace import Pace
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
            if there is not None:
                there.close()

    async def accept() -> None:
        # Not by `asyncio.start_server`, which takes all connections that come, a hundred in a pass.
        loop, pace = asyncio.get_running_loop(), Pace()
        while True:
            await asyncio.sleep(pace.wait_s(loop.time()))
            with suppress(OSError):  # no descriptor is left, or the program has hung up
                connection, _ = await loop.sock_accept(listener)
                if len(tasks) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                try:
                    reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
                except BaseException:
                    connection.close()
                    raise
                task = asyncio.ensure_future(serve(reader, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                # here, because a task that is cancelled before its first step runs no `finally`
                task.add_done_callback(lambda _, writer=writer: writer.close())

    async def ended() -> None:
        await asyncio.gather(accepting, *tasks, return_exceptions=True)

    listener.setblocking(False)
    accepting = asyncio.ensure_future(accept())
    try:
        yield
    finally:
        accepting.cancel()
        for task in tasks:
            task.cancel()
        try:
            await uninterrupted(ended())
        finally:
            listener.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
