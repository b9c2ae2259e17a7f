"""Results of pure tools by content, with single flight: equal calls at once become one request.

One cache per event loop, bounded, least recently used out first. Failures are never kept. What the
processes share is below it (`result_store`): work starts with a look there.
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

from agent_loop.tools.protocol import ToolCall
from agent_loop.watchdog import SharedWait

T = TypeVar("T")


def content_key(call: ToolCall) -> str:
    """Equal for calls with the same tool and the same JSON payload, in whatever key order."""
    content = [call.tool, call.payload]
    try:
        text = msgspec.json.encode(content, order="sorted")
    except UnicodeEncodeError:  # half a character
        text = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """Work under way."""

    task: "asyncio.Task[T]"
    company: SharedWait
    waiting: int = 0
    """Callers that it is done for."""


class _Kept(NamedTuple):
    value: Any
    size: int
    until: float


class SingleFlightCache(Generic[T]):
    """Keeps finished values; joins callers of one that is under way.

    Args:
        capacity: values kept, >= 1.
        keep: whether a finished value may serve later callers too.
        again: whether a caller that joined work which failed so, with these seconds left to it,
            goes on with newer work instead.
        size_of: of a value, in the unit of `capacity_bytes`.
        capacity_bytes: of all values kept.
        ttl_s: seconds that a value is kept.
        clock: monotonic seconds, for `ttl_s`.
    """

    def __init__(
        self,
        capacity: int,
        keep: Callable[[T], bool] = lambda _: True,
        again: Callable[[BaseException, float], bool] = lambda _, __: False,
        *,
        size_of: Callable[[T], int] = lambda _: 0,
        capacity_bytes: float = math.inf,
        ttl_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity, self._keep, self._again = capacity, keep, again
        self._size_of, self._capacity_bytes = size_of, capacity_bytes
        self._ttl_s, self._clock = ttl_s, clock
        self._values: OrderedDict[str, _Kept] = OrderedDict()
        self._under_way: dict[str, _Flight[T]] = {}
        self.size_bytes = 0
        """Of the values that are kept."""

    async def get(
        self, key: str, make: Callable[[float], Coroutine[Any, Any, T]], timeout_s: float
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
        """The value that is kept for a key."""
        found = self._values.get(key)
        if found is None:
            return None
        if found.until <= self._clock():
            self._drop(key)
            return None
        self._values.move_to_end(key)
        return found.value

    def put(self, key: str, value: T) -> None:
        """Keep a value that was made elsewhere, if it may be kept."""
        if not self._keep(value):
            return
        size = self._size_of(value)
        self._drop(key)
        self._values[key] = _Kept(value, size, self._clock() + self._ttl_s)
        self.size_bytes += size
        while len(self._values) > self._capacity or self.size_bytes > self._capacity_bytes:
            self._drop(next(iter(self._values)))

    def _drop(self, key: str) -> None:
        kept = self._values.pop(key, None)
        if kept is not None:
            self.size_bytes -= kept.size

    async def _wait(self, key: str, flight: _Flight[T], timeout_s: float | None) -> None:
        """Until it is done; the last one to leave before cancels it."""
        flight.waiting += 1
        try:
            with flight.company.joined():
                done = await _done(flight.task, timeout_s)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                await self._give_up(key, flight)
        if not done:
            raise TimeoutError

    def _start(
        self, key: str, make: Callable[[float], Coroutine[Any, Any, T]], timeout_s: float
    ) -> _Flight[T]:
        company = SharedWait()
        flight = self._under_way[key] = _Flight(company.start(make(timeout_s)), company)
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
        if not task.cancelled() and task.exception() is None:
            self.put(key, task.result())

    def _land(self, key: str, flight: _Flight[T]) -> None:
        """Nobody may join it any more; newer work under the same key is another matter."""
        if self._under_way.get(key) is flight:
            del self._under_way[key]


async def _done(task: "asyncio.Task[Any]", timeout_s: float | None) -> bool:
    """Wait for a task, but not longer; whether it has ended. As `asyncio.wait`, in fewer steps."""
    if task.done():
        return True
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: Any = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        task.remove_done_callback(wake)
    return task.done()
