"""Writes files in a thread of its own, so that no step waits for a disk."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_WAITING = 4
"""Writes that may wait. With more, `submit` waits: a slow disk slows the run instead of filling the
memory."""


class FileWriter:
    """Runs functions that write files, one after the other.

    An error of a write is raised by the next call of `submit` or `flush`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mixed-files")
        self._waiting: deque[Future[Any]] = deque()

    def submit(self, write: Callable[..., Any], *args: Any) -> None:
        """Call `write(*args)` in the thread, after the writes before it."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(write, *args))

    def flush(self) -> None:
        """Wait until everything is on disk."""
        while self._waiting:
            self._waiting.popleft().result()

    def shutdown(self) -> None:
        """Finish what waits. An error is not raised, because another one may have ended the run."""
        self._thread.shutdown()
