"""A throttle for an event loop: at most so many callers start their work in one pass of the loop.

If a thousand calls start in one pass, their first steps of some tens of microseconds add up to
almost a second before the loop can send or read anything. With the throttle, callers start in
portions, and the loop sends and reads between two portions.
"""

import asyncio
from collections import deque


class LoopThrottle:
    """Admits `portion` (>= 1) callers per pass of the event loop, in the order of arrival.

    It belongs to one event loop. A caller waits only for passes of the loop.
    """

    def __init__(self, portion: int) -> None:
        self._portion = portion
        self._admitted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait until the caller is admitted; at once if this pass has room."""
        loop = asyncio.get_running_loop()
        if self._admitted < self._portion:
            if not self._admitted:
                loop.call_soon(self._next_pass)
            self._admitted += 1
            return
        admission = loop.create_future()
        self._waiting.append(admission)
        await admission

    def _next_pass(self) -> None:
        self._admitted = 0
        while self._waiting and self._admitted < self._portion:
            admission = self._waiting.popleft()
            if not admission.done():  # a done one was cancelled
                admission.set_result(None)
                self._admitted += 1
        if self._admitted:
            asyncio.get_running_loop().call_soon(self._next_pass)
