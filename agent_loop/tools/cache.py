"""Results of pure tools by content, with single flight: equal calls at once become one request.

One cache per process, bounded, least recently used out first. Failures are never kept.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from agent_loop.tools.protocol import ToolCall

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """Equal for calls with the same tool and the same JSON payload, in whatever key order."""
    text = json.dumps([call.tool, call.payload], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class SingleFlightCache(Generic[T]):
    """Keeps finished values; joins callers of one that is under way.

    Args:
        capacity: values kept, >= 1.
        keep: whether a finished value may serve later callers too.
    """

    def __init__(self, capacity: int, keep: Callable[[T], bool] = lambda _: True) -> None:
        self._capacity, self._keep = capacity, keep
        self._values: OrderedDict[str, T] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[T]] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The value of a key, made at most once at a time.

        A caller that is cancelled leaves the others waiting; the work goes on to its end.

        Returns:
            (value, True when no new work was started for this caller).

        Raises:
            Exception: whatever `make` raised; the next caller tries again.
        """
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key], True
        task = self._under_way.get(key)
        joined = task is not None
        if task is None:
            task = asyncio.ensure_future(_run(make))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(task), joined

    def _finish(self, key: str, task: "asyncio.Task[T]") -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None or not self._keep(task.result()):
            return
        self._values[key] = task.result()
        while len(self._values) > self._capacity:
            self._values.popitem(last=False)


async def _run(make: Callable[[], Awaitable[T]]) -> T:
    return await make()
