"""Runs a generator that yields sleeps, in a thread or in a task, so that a wait is written once."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from typing import TypeVar

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
