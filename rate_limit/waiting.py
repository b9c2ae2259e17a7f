"""Waits that are written once: for both limiters, and for threads as well as tasks."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from typing import TypeVar

from rate_limit.gcra import LimiterTimeout

T = TypeVar("T")

Steps = Generator[float, None, T]
"""A generator that yields seconds to sleep and returns the result."""


def run(steps: Steps[T], sleep: Callable[[float], None]) -> T:
    """Run the steps, sleeping in this thread."""
    with closing(steps):  # after an error in the sleep: clean up now, not at garbage collection
        while True:
            try:
                sleep_s = next(steps)
            except StopIteration as done:  # of the steps; one of `sleep` is an error
                return done.value
            sleep(sleep_s)


async def run_async(steps: Steps[T], sleep: Callable[[float], Awaitable[None]]) -> T:
    """Run the steps, sleeping in this task."""
    with closing(steps):
        while True:
            try:
                sleep_s = next(steps)
            except StopIteration as done:
                return done.value
            await sleep(sleep_s)


class RateLimiter(ABC):
    """`with limiter:` and `async with limiter:` wait until one call may pass."""

    @abstractmethod
    def acquire(self, n: int = 1, timeout_s: float | None = None, source: str = "") -> float:
        """Wait until n calls may pass together.

        Args:
            n: calls, >= 1. More calls than the burst pass one by one, and the caller waits for the
                last.
            timeout_s: longest wait; None for no limit.
            source: the source of the calls, for `shares` and the statistics.

        Returns:
            Seconds waited; 0.0 if the calls passed at once.

        Raises:
            LimiterTimeout: the slot is beyond `timeout_s`; nothing was reserved.
            ValueError: n is below 1.
        """

    @abstractmethod
    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        """`acquire` for coroutines; other coroutines always run meanwhile."""

    def try_acquire(self, n: int = 1, source: str = "") -> bool:
        """Let n calls pass if they may pass now; waits at most 20 ms for a file, or until an actor
        answers."""
        try:
            self.acquire(n, timeout_s=0.0, source=source)
        except LimiterTimeout:
            return False
        return True

    def __enter__(self) -> float:
        return self.acquire()

    def __exit__(self, *error: object) -> None:  # noqa: B027 (a call uses its slot up)
        pass

    async def __aenter__(self) -> float:
        return await self.acquire_async()

    async def __aexit__(self, *error: object) -> None:  # noqa: B027
        pass
