"""Runs a generator that says when to sleep: one description of a wait, for threads and tasks."""

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[float, None, T]
"""Yields seconds to sleep; returns what was waited for."""


def run(steps: Steps[T], sleep: Callable[[float], None]) -> T:
    """Go through the steps, sleeping in this thread."""
    while True:
        try:
            sleep_s = next(steps)
        except StopIteration as done:
            return done.value
        try:
            sleep(sleep_s)
        except BaseException:
            steps.close()  # it cleans up now, not when it is collected
            raise


async def run_async(steps: Steps[T], sleep: Callable[[float], Awaitable[None]]) -> T:
    """Go through the steps, sleeping in this task."""
    while True:
        try:
            sleep_s = next(steps)
        except StopIteration as done:
            return done.value
        try:
            await sleep(sleep_s)
        except BaseException:
            steps.close()
            raise
