"""Cache in memory for results of pure tools, with single flight: equal calls share one request.

There is one cache per event loop. Its size is bounded, and the least recently used result is
dropped first. Failures are never kept. `result_store` shares results between processes.
"""

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from agent_loop.watchdog import SharedWait
from tool_server.wire.protocol import ToolCall

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """A hash that is equal for calls of one tool with equal JSON payloads, in any order of keys."""
    content = [call.tool, call.payload]
    try:
        text = msgspec.json.encode(content, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """Work under way for one key."""

    task: "asyncio.Task[T]"
    shared_wait: SharedWait
    waiting: int = 0
    """Callers that wait for the task."""


class _Entry(NamedTuple):
    value: Any
    size_bytes: int
    expires_at: float


class SingleFlightCache(Generic[T]):
    """Keeps finished values, and lets equal callers share the work that is under way.

    Args:
        capacity: most values kept, >= 1.
        keep: whether a finished value may serve later callers too.
        is_current: whether a kept value may still serve a caller; if not, it is dropped.
        again: decides for a caller whose shared work failed: given the error and the caller's
            remaining seconds, True starts or joins newer work.
        size_of: size of a value in bytes.
        capacity_bytes: largest sum of the sizes of all values.
        ttl_s: seconds that a value is kept.
        clock: monotonic seconds, for `ttl_s`.
    """

    def __init__(
        self,
        capacity: int,
        keep: Callable[[T], bool] = lambda _: True,
        again: Callable[[BaseException, float], bool] = lambda _, __: False,
        *,
        is_current: Callable[[T], bool] = lambda _: True,
        size_of: Callable[[T], int] = lambda _: 0,
        capacity_bytes: float = math.inf,
        ttl_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity, self._keep, self._again = capacity, keep, again
        self._is_current = is_current
        self._size_of, self._capacity_bytes = size_of, capacity_bytes
        self._ttl_s, self._clock = ttl_s, clock
        self._values: OrderedDict[str, _Entry] = OrderedDict()
        self._under_way: dict[str, _Flight[T]] = {}
        self.size_bytes = 0
        """Sum of the sizes of all values."""

    async def get(
        self, key: str, make: Callable[[float], Coroutine[Any, Any, T]], timeout_s: float
    ) -> tuple[T, bool]:
        """The value of a key; at most one task makes it at a time.

        If a caller is cancelled, the other callers go on waiting. If the last caller is cancelled,
        the task is cancelled too and has ended when `get` returns; a caller that comes in between
        starts a new task.

        Args:
            key: key of the value.
            make: makes the value within the given seconds; it does not run in a caller's context.
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
        while (kept := self.kept(key)) is None:
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
        return kept, True

    def kept(self, key: str) -> T | None:
        """The cached value of a key; None if there is none, or it is not current any more."""
        entry = self._values.get(key)
        if entry is None:
            return None
        if entry.expires_at <= self._clock() or not self._is_current(entry.value):
            self._drop(key)
            return None
        self._values.move_to_end(key)
        return entry.value

    def put(self, key: str, value: T) -> None:
        """Cache a value, if `keep` allows it."""
        if not self._keep(value):
            return
        size = self._size_of(value)
        self._drop(key)
        self._values[key] = _Entry(value, size, self._clock() + self._ttl_s)
        self.size_bytes += size
        while len(self._values) > self._capacity or self.size_bytes > self._capacity_bytes:
            self._drop(next(iter(self._values)))

    def _drop(self, key: str) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes

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

    def _start(
        self, key: str, make: Callable[[float], Coroutine[Any, Any, T]], timeout_s: float
    ) -> _Flight[T]:
        shared_wait = SharedWait()
        flight = self._under_way[key] = _Flight(shared_wait.start(make(timeout_s)), shared_wait)
        flight.task.add_done_callback(lambda _: self._finish(key, flight))
        return flight

    def _finish(self, key: str, flight: _Flight[T]) -> None:
        self._land(key, flight)
        task = flight.task
        if not task.cancelled() and task.exception() is None:
            self.put(key, task.result())

    def _land(self, key: str, flight: _Flight[T]) -> None:
        """Remove the flight, so that nobody joins it; newer work of the same key stays."""
        if self._under_way.get(key) is flight:
            del self._under_way[key]
