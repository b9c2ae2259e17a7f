"""Proxies before a real tool server that make requests go wrong now and then.

`ChaosProxy` is a real HTTP server, which fails, hangs or answers garbage. `TcpChaosProxy` works on
the bytes: it resets, stalls and cuts what a sound server said.
"""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType

import aiohttp
from aiohttp import web


class ChaosProxy:
    """Passes requests on, but for a share of the POSTs.

    Args:
        upstream: URL of the tool server.
        share: of the POSTs that go wrong: a third each fails, hangs and is answered with garbage.
        seed: of the choice.
        delays_s: path -> seconds before a request is passed on.
    """

    def __init__(
        self,
        upstream: str,
        share: float,
        seed: int = 0,
        delays_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.upstream, self.share, self.delays_s = upstream, share, delays_s
        self.did: Counter[str] = Counter()
        """passed, failed, hung, garbled; and left: hung requests whose client closed them."""

        self.url = ""
        self._rng = random.Random(seed)

    async def _handle(self, request: web.Request) -> web.Response:
        if request.method == "POST" and self._rng.random() < self.share:
            return await self._misbehave()
        self.did["passed"] += 1
        await asyncio.sleep(self.delays_s.get(request.path, 0.0))
        body = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                self.upstream + request.path,
                data=body,
                headers={"Content-Type": "application/json"},
            ) as answer,
        ):
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type
            )

    async def _misbehave(self) -> web.Response:
        kind = self._rng.choice(("failed", "hung", "garbled"))
        self.did[kind] += 1
        if kind == "failed":
            return web.Response(status=500, text="the chaos proxy failed this request")
        if kind == "garbled":
            return web.Response(
                text=self._rng.choice(("{", "[]", "{}", '{"result": null}', "\x00\xff", '"text"')),
                content_type="application/json",
            )
        try:
            await asyncio.Event().wait()
        finally:
            self.did["left"] += 1
        raise AssertionError("unreachable")

    @contextmanager
    def serving(self) -> Iterator["ChaosProxy"]:
        """Serve from a thread of its own."""
        loop = asyncio.new_event_loop()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()


class TcpChaosProxy:
    """Passes one HTTP/1.1 connection's requests on, each with the fault that `fault_of` names.

    The faults, by when they strike. Before the tool server hears of the request: `reset at once`,
    `status CODE [Retry-After]`, `refused CODE [Retry-After]` (with `X-Executed: no`), `html`. After
    it has answered: `no first byte` and `half a body` (the rest never comes), `reset mid-body`,
    `cut json` (a whole answer, of half the JSON), `plain` (the answer under another content type).
    Anything else passes.

    Args:
        upstream: port of the tool server on loopback; may change.
        fault_of: names the next request's fault.
    """

    def __init__(self, upstream: int, fault_of: Callable[[], str]) -> None:
        self.upstream, self.fault_of = upstream, fault_of
        self.did: Counter[str] = Counter()
        """Fault -> how often it struck."""

        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["TcpChaosProxy"]:
        connections: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # either side went away
        finally:
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection is good for another."""
        request = b"".join(await _message(reader))
        fault = self.fault_of()
        self.did[fault] += 1
        if fault == "reset at once":
            _reset(writer)
            return False
        if fault == "html":
            writer.write(_answer("200 OK", b"<html>sign in</html>", "Content-Type: text/html"))
            return True
        if fault.startswith(("status ", "refused ")):
            kind, status, *retry_after = fault.split(" ", 2)
            headers = [f"Retry-After: {x}" for x in retry_after]
            if kind == "refused":
                headers.append("X-Executed: no")
            writer.write(_answer(f"{status} X", b"no", *headers))
            return True
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            up_writer.write(request)
            head, body = await _message(up_reader)
        finally:
            up_writer.close()
        half = body[: len(body) // 2]
        if fault in ("no first byte", "half a body", "reset mid-body"):
            writer.write(b"" if fault == "no first byte" else head + half)
            await writer.drain()
            if fault == "reset mid-body":
                _reset(writer)
            else:
                await reader.read()  # until the client hangs up
            return False
        if fault == "cut json":
            writer.write(_answer("200 OK", half, "Content-Type: application/json"))
        elif fault == "plain":
            writer.write(_answer("200 OK", body, "Content-Type: text/plain"))
        else:
            writer.write(head + body)
        return True


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a request or an answer that tells its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head, await reader.readexactly(length)


def _answer(status: str, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as the kernel does for a program that died."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
