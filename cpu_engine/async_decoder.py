"""`AsyncDecoder`: coroutines that share one `BatchDecoder`. No Ray, no verl."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from cpu_engine.decoder import BatchDecoder, Request

T = TypeVar("T")


class _Awaited(NamedTuple):
    """A request and its caller's future, which is done early if the caller was cancelled."""

    request: Request
    future: "asyncio.Future[Request]"


class AsyncDecoder:
    """Lets coroutines share one `BatchDecoder`: each awaits its own request.

    Model and decoder are used in one thread only, so that work given to `run` is done between
    decode steps.

    Args:
        decoder: must not be used otherwise.
        max_requests: decoded at the same time; further ones wait.
    """

    def __init__(self, decoder: BatchDecoder, max_requests: int = 256) -> None:
        self._decoder, self._max_requests = decoder, max_requests
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._waiting: list[_Awaited] = []
        self._running: dict[int, _Awaited] = {}  # by the request's id
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Request:
        """Decode a request to its end and return it.

        If the caller is cancelled, the request is dropped before the next step.

        Raises:
            ValueError: the decoder cannot decode it (see `BatchDecoder.check`).
            RuntimeError: a step failed; all requests fail with it.
        """
        self._decoder.check(request)
        future: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Awaited(request, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._decode())
        return await future

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` between two decode steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def abort_all(self) -> list[Request]:
        """End all requests after the current step, with `stop_reason="aborted"`, and return them.

        Callers get the tokens that were decoded until then. A request that finished in the current
        step is not returned.
        """
        under_way = [*self._running.values(), *self._waiting]
        self._waiting = []
        await self.run(lambda: self._decoder.drop([each.request for each in under_way]))
        aborted: list[Request] = []
        for request, future in under_way:
            self._running.pop(id(request), None)
            if not future.done():
                request.stop_reason = "aborted"
                future.set_result(request)
                aborted.append(request)
        return aborted

    async def _decode(self) -> None:
        """Step until no request waits or runs, and give finished requests to their callers."""
        try:
            while self._waiting or self._running:
                gone, new = self._drop_cancelled(), self._next_waiting()
                for request in await self.run(partial(self._advance, gone, new)):
                    future = self._running.pop(id(request)).future
                    if not future.done():
                        future.set_result(request)
        except Exception as error:
            # Otherwise the callers, and with them the training step, would wait for ever.
            futures = [awaited.future for awaited in [*self._waiting, *self._running.values()]]
            self._waiting, self._running = [], {}
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(f"decoding failed: {error}"))
            await self.run(self._decoder.drop_all)
            raise

    def _drop_cancelled(self) -> list[Request]:
        """Forget requests whose callers were cancelled; returns those that the decoder has."""
        self._waiting = [awaited for awaited in self._waiting if not awaited.future.done()]
        gone = [awaited.request for awaited in self._running.values() if awaited.future.done()]
        for request in gone:
            del self._running[id(request)]
        return gone

    def _next_waiting(self) -> list[Request]:
        room = max(0, self._max_requests - len(self._running))
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        self._running |= {id(awaited.request): awaited for awaited in new}
        return [awaited.request for awaited in new]

    def _advance(self, gone: list[Request], new: list[Request]) -> list[Request]:
        self._decoder.drop(gone)
        self._decoder.admit(new)
        return self._decoder.step() if len(self._decoder) else []
