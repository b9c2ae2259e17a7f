"""A clock that moves only when somebody sleeps on it, and can be told what happens meanwhile."""

import asyncio
import math
from collections.abc import Callable

SECOND_NS = 10**9


class FakeClock:
    """Nanoseconds that pass in sleeps; `meanwhile` runs once, at the start of the next sleep."""

    def __init__(self, now_s: float = 1000.0):
        self.now_ns = int(now_s * SECOND_NS)
        self.slept_s: list[float] = []
        self.meanwhile: Callable[[], object] | None = None

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s.append(seconds)
        event, self.meanwhile = self.meanwhile, None
        if event is not None:
            event()
        self.now_ns += math.ceil(seconds * SECOND_NS)

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)
        await asyncio.sleep(0)
