"""Results of pure tools by content, with single flight: equal calls at once become one request.

One cache per process, bounded, least recently used out first. Failures are never kept.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent_loop.tools.protocol import ToolCall
from agent_loop.watchdog import Company

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """Equal for calls with the same tool and the same JSON payload, in whatever key order."""
    text = json.dumps([call.tool, call.payload], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """Work under way."""

    task: "asyncio.Task[T]"
    company: Company
    waiting: int = 0
    """Callers that it is done for."""


class SingleFlightCache(Generic[T]):
    """Keeps finished values; joins callers of one that is under way.

    Args:
        capacity: values kept, >= 1.
        keep: whether a finished value may serve later callers too.
        again: whether a caller that joined work which failed so, with these seconds left to it,
            goes on with newer work instead.
    """

    def __init__(
        self,
        capacity: int,
        keep: Callable[[T], bool] = lambda _: True,
        again: Callable[[BaseException, float], bool] = lambda _, __: False,
    ) -> None:
        self._capacity, self._keep, self._again = capacity, keep, again
        self._values: OrderedDict[str, T] = OrderedDict()
        self._under_way: dict[str, _Flight[T]] = {}

    async def get(
        self, key: str, make: Callable[[float], Awaitable[T]], timeout_s: float
    ) -> tuple[T, bool]:
        """The value of a key, made at most once at a time.

        A caller that is cancelled leaves the others waiting. Is it the last one, the work is
        cancelled with it, and has ended when it leaves; who comes meanwhile has work of its own.

        Args:
            key: which value.
            make: makes it, within the seconds given; runs in no caller's context.
            timeout_s: seconds that this caller has. Another's work may end earlier: see `again`.

        Returns:
            (value, True when no new work was started for this caller).

        Raises:
            TimeoutError: the work that this caller joined is not done in time.
            Exception: whatever `make` raised; the next caller tries again.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while key not in self._values:
            left_s = deadline - now()
            flight = self._under_way.get(key)
            if flight is None:
                flight = self._start(key, make, left_s)
                await self._wait(key, flight, None)
                return flight.task.result(), False
            await self._wait(key, flight, left_s)
            error = flight.task.exception()
            if error is None or not self._again(error, deadline - now()):
                return flight.task.result(), True
        self._values.move_to_end(key)
        return self._values[key], True

    async def _wait(self, key: str, flight: _Flight[T], timeout_s: float | None) -> None:
        """Until it is done; the last one to leave before cancels it."""
        flight.waiting += 1
        try:
            with flight.company.joined():
                done, _ = await asyncio.wait([flight.task], timeout=timeout_s)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                await self._give_up(key, flight)
        if not done:
            raise TimeoutError

    def _start(
        self, key: str, make: Callable[[float], Awaitable[T]], timeout_s: float
    ) -> _Flight[T]:
        company = Company()
        flight = self._under_way[key] = _Flight(company.start(_run(make, timeout_s)), company)
        flight.task.add_done_callback(lambda _: self._finish(key, flight))
        return flight

    async def _give_up(self, key: str, flight: _Flight[T]) -> None:
        """Cancel work that nobody waits for, and see it end."""
        self._land(key, flight)
        flight.task.cancel()
        await asyncio.wait([flight.task])

    def _finish(self, key: str, flight: _Flight[T]) -> None:
        self._land(key, flight)
        task = flight.task
        if task.cancelled() or task.exception() is not None or not self._keep(task.result()):
            return
        self._values[key] = task.result()
        while len(self._values) > self._capacity:
            self._values.popitem(last=False)

    def _land(self, key: str, flight: _Flight[T]) -> None:
        """Nobody may join it any more; newer work under the same key is another matter."""
        if self._under_way.get(key) is flight:
            del self._under_way[key]


async def _run(make: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    return await make(timeout_s)
