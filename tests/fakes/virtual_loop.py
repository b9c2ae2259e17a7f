"""An event loop whose clock jumps: hours of waiting take no time. For fakes of asyncio only."""

import asyncio
import selectors
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.DefaultSelector):
    """Moves the clock where a selector would wait. Answers of threads and sockets would be late."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and for nothing that has a time")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time()` starts at 0 and goes on to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def stand_still(self, seconds: float) -> None:
        """As if a callback ran so long: nothing else runs in the meantime."""
        self._clock.now += seconds


def run_virtual(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run to the end; returns the result and the virtual seconds. No task may be left behind."""
    loop = VirtualLoop()
    main = loop.create_task(work)
    try:
        result = loop.run_until_complete(main)
        assert not (left := asyncio.all_tasks(loop)), left
        return result, loop.time()
    finally:
        while left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_until_complete(asyncio.wait(left))
        if main.done() and not main.cancelled():
            main.exception()  # or asyncio logs an interrupt as never retrieved
        loop.close()
