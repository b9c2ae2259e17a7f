"""A real HTTP server before a real tool server: it fails, hangs or answers garbage now and then."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web


class ChaosProxy:
    """Passes requests on, but for a share of the POSTs.

    Args:
        upstream: URL of the tool server.
        share: of the POSTs that go wrong: a third each fails, hangs and is answered with garbage.
        seed: of the choice.
    """

    def __init__(self, upstream: str, share: float, seed: int = 0) -> None:
        self.upstream, self.share = upstream, share
        self.did: Counter[str] = Counter()
        """passed, failed, hung, garbled; and left: hung requests whose client closed them."""

        self.url = ""
        self._rng = random.Random(seed)

    async def _handle(self, request: web.Request) -> web.Response:
        if request.method == "POST" and self._rng.random() < self.share:
            return await self._misbehave()
        self.did["passed"] += 1
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
