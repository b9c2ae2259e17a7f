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

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """Equal for calls with the same tool and the same JSON payload, in whatever key order."""
    text = json.dumps([call.tool, call.payload], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """Work under way."""

    task: "asyncio.Task[T]"
    waiting: int = 0
    """Callers that it is done for."""


class SingleFlightCache(Generic[T]):
    """Keeps finished values; joins callers of one that is under way.

    Args:
        capacity: values kept, >= 1.
        keep: whether a finished value may serve later callers too.
    """

    def __init__(self, capacity: int, keep: Callable[[T], bool] = lambda _: True) -> None:
        self._capacity, self._keep = capacity, keep
        self._values: OrderedDict[str, T] = OrderedDict()
        self._under_way: dict[str, _Flight[T]] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The value of a key, made at most once at a time.

        A caller that is cancelled leaves the others waiting. Is it the last one, the work is
        cancelled with it, and has ended when it leaves; who comes meanwhile has work of its own.

        Returns:
            (value, True when no new work was started for this caller).

        Raises:
            Exception: whatever `make` raised; the next caller tries again.
        """
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key], True
        flight = self._under_way.get(key)
        joined = flight is not None
        if flight is None:
            flight = self._start(key, make)
        flight.waiting += 1
        try:
            await asyncio.wait([flight.task])
        except asyncio.CancelledError:
            flight.waiting -= 1
            if not flight.waiting:
                await self._give_up(key, flight)
            raise
        return flight.task.result(), joined

    def _start(self, key: str, make: Callable[[], Awaitable[T]]) -> _Flight[T]:
        flight = self._under_way[key] = _Flight(asyncio.ensure_future(_run(make)))
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


async def _run(make: Callable[[], Awaitable[T]]) -> T:
    return await make()
