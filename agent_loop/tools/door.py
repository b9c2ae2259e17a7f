"""So many at once into work that an event loop has to do before it can look at its sockets again.

A thousand calls made in one turn of the loop would each do their first steps, tens of microseconds
that make a second together, before the first request leaves. Behind a door they come in portions,
and the loop sends and reads in between.
"""

import asyncio
from collections import deque


class Door:
    """Lets a portion in per turn of the event loop, in the order of arrival.

    For one event loop. Nobody waits for anything but turns of the loop.

    Args:
        portion: callers per turn, >= 1.
    """

    def __init__(self, portion: int) -> None:
        self._portion = portion
        self._let_in = 0
        self._line: deque[asyncio.Future[None]] = deque()

    def try_enter(self) -> bool:
        """Whether one may go in at once; otherwise `enter`."""
        if self._let_in >= self._portion:
            return False
        if not self._let_in:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._let_in += 1
        return True

    async def enter(self) -> None:
        """Wait for one's portion."""
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        await place

    def _next_turn(self) -> None:
        self._let_in = 0
        while self._line and self._let_in < self._portion:
            place = self._line.popleft()
            if not place.done():  # else cancelled
                place.set_result(None)
                self._let_in += 1
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._next_turn)
