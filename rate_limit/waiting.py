"""Runs a generator that yields sleeps, in a thread or in a task, so that a wait is written once."""

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[float, None, T]
"""A generator that yields seconds to sleep and returns the result."""


def run(steps: Steps[T], sleep: Callable[[float], None]) -> T:
    """Run the steps, sleeping in this thread."""
    try:
        while True:
            sleep(next(steps))
    except StopIteration as done:
        return done.value
    finally:
        steps.close()  # after an error in the sleep: clean up now, not at garbage collection


async def run_async(steps: Steps[T], sleep: Callable[[float], Awaitable[None]]) -> T:
    """Run the steps, sleeping in this task."""
    try:
        while True:
            await sleep(next(steps))
    except StopIteration as done:
        return done.value
    finally:
        steps.close()
