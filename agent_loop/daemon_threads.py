"""Threads for functions of users, which may never return."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Threads for one kind of work, because what never returns would block other work. Unlike those
    of `ThreadPoolExecutor`, they do not keep a process alive that ends.

    Args:
        name: of the threads.
        most: threads, so calls at once; they are started as they are needed.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._left = name, most
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._idle = Semaphore(0)

    async def run(self, function: Callable[[], T]) -> T:
        """What a function returns or raises in a thread, which runs on if this is cancelled."""
        future: Future[tuple[T, BaseException | None]] = Future()
        self._calls.put((future, function))
        if not self._idle.acquire(blocking=False) and self._left:
            self._left -= 1
            Thread(target=self._work, name=self._name, daemon=True).start()
        value, error = await asyncio.wrap_future(future)
        if error is not None:
            raise error
        return value

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result((function(), None))
                except BaseException as error:  # as a result: `StopIteration` never leaves a future
                    future.set_result((None, error))
            self._idle.release()
