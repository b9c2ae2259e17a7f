"""Results of pure tools: kept in memory, with single flight: equal calls share one request.

There is one cache per event loop. Its size is bounded, and the least recently used result is
dropped first. Failures are never kept. `result_store` shares results between processes.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from cachetools import LRUCache

from agent_loop.watchdog import SharedWait
from tool_server.wire.protocol import ToolCall, ToolResult

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """A hash that is equal for calls of one tool with equal JSON payloads, in any order of keys."""
    content = [call.tool, call.payload]
    try:
        text = msgspec.json.encode(content, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


class Results:
    """Results in memory, by key.

    Args:
        entries: most results, >= 1.
        max_bytes: largest sum of their sizes as JSON.
        ttl_s: seconds that a result is kept.
        clock: monotonic seconds.
    """

    def __init__(
        self, entries: int, max_bytes: float, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        least = max_bytes / entries  # so that the bound of bytes bounds the number too

        def size_of(kept: tuple[float, ToolResult]) -> float:
            return max(least, len(msgspec.json.encode(kept[1].body)))

        self._ttl_s, self._clock = ttl_s, clock
        self._kept: LRUCache[str, tuple[float, ToolResult]] = LRUCache(max_bytes, size_of)
        """Each result with the time until which it is kept; `TTLCache` takes twice as long."""

    def get(self, key: str) -> ToolResult | None:
        until, result = self._kept.get(key, (0.0, None))
        return result if self._clock() < until else None

    def put(self, key: str, result: ToolResult) -> None:
        """Keep a result, if there is room."""
        try:
            self._kept[key] = self._clock() + self._ttl_s, result
        except ValueError:  # larger than all results may be
            self._kept.pop(key, None)


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """Work under way for one key."""

    task: "asyncio.Task[T]"
    shared_wait: SharedWait
    waiting: int = 0
    """Callers that wait for the task."""


class SingleFlight(Generic[T]):
    """Lets callers of one key share the work that is under way.

    Args:
        again: decides for a caller whose shared work failed: given the error and the caller's
            remaining seconds, True starts or joins newer work.
    """

    def __init__(self, again: Callable[[BaseException, float], bool]) -> None:
        self._again = again
        self._under_way: dict[str, _Flight[T]] = {}

    async def get(
        self, key: str, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float
    ) -> tuple[T, bool]:
        """The value of a key; at most one task makes it at a time.

        If a caller is cancelled, the other callers go on waiting. If the last caller is cancelled,
        the task is cancelled too and has ended when `get` returns; a caller that comes in between
        starts a new task.

        Args:
            key: key of the value.
            make: makes the value, within a deadline of its own; it does not run in a caller's
                context.
            timeout_s: seconds that this caller has. Work that it joins may have an earlier
                deadline: see `again`.

        Returns:
            (value, True when no new work was started for this caller).

        Raises:
            TimeoutError: the work that this caller joined is not done in time.
            Exception: the exception of `make`; the next caller tries again.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while True:
            left_s = deadline - now()
            flight = self._under_way.get(key)
            if flight is None:
                flight = self._start(key, make)
                await self._wait(key, flight, None)
                return flight.task.result(), False
            await self._wait(key, flight, left_s)
            error = flight.task.exception()
            if error is None:
                return flight.task.result(), True
            if not self._again(error, deadline - now()):
                raise copy(error) from error  # one that several tasks raise grows with each

    async def _wait(self, key: str, flight: _Flight[T], timeout_s: float | None) -> None:
        """Wait for the task; the last caller that leaves before it is done cancels it."""
        flight.waiting += 1
        try:
            with flight.shared_wait.joined():
                done, _ = await asyncio.wait([flight.task], timeout=timeout_s)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._land(key, flight)
                flight.task.cancel()
                await asyncio.wait([flight.task])
        if not done:
            raise TimeoutError

    def _start(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> _Flight[T]:
        shared_wait = SharedWait()
        flight = self._under_way[key] = _Flight(shared_wait.start(make()), shared_wait)
        flight.task.add_done_callback(lambda _: self._land(key, flight))
        return flight

    def _land(self, key: str, flight: _Flight[T]) -> None:
        """Remove the flight, so that nobody joins it; newer work of the same key stays."""
        if self._under_way.get(key) is flight:
            del self._under_way[key]
