"""A rate limit that all processes of a host keep together: reserve, let go, sleep once.

Each caller takes its place under a lock held for microseconds and then waits for it without the
lock; nobody polls, and the order of reservation is the order of service.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

from rate_limit.gcra import NS_PER_S, Arrivals, Rate, push_back, reserve
from rate_limit.state_file import StateFile

LOCK_RETRY_S = 0.001
"""How soon a coroutine comes back to a lock that another process holds."""


class LimiterTimeout(TimeoutError):
    """The wait would be longer than the caller allows; nothing was reserved."""


def boottime_ns() -> int:
    """Nanoseconds since boot; suspend counts, and no clock setting moves it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class FileRateLimiter:
    """At most `burst + per_minute / 60 * t` requests in any window of t seconds, over all sharers.

    It keeps the rate per state file: not per account, and not across hosts. A caller that is
    cancelled while it waits leaves its place unused.

    Args:
        path: state file; every process that shares the limit names the same.
        per_minute: sustained requests a minute.
        burst: requests that may pass back to back after an idle spell.
        min_interval_s: least time between two requests.
        clock: nanoseconds since boot.
        sleep, sleep_async: how to wait.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        per_minute: float,
        burst: int,
        min_interval_s: float = 0.0,
        *,
        clock: Callable[[], int] = boottime_ns,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.rate = Rate(per_minute / 60, burst, min_interval_s)
        self._state = StateFile(path, self.rate)
        self._clock, self._sleep, self._sleep_async = clock, sleep, sleep_async

    def acquire(self, n: int = 1, timeout_s: float | None = None) -> float:
        """Wait until n requests may pass.

        Returns:
            Seconds waited.

        Raises:
            LimiterTimeout: the wait would be longer than `timeout_s`; nothing was reserved.
        """
        wait_s = self._reserve(n, timeout_s, blocking=True)
        if wait_s > 0:
            self._sleep(wait_s)
        return wait_s

    async def acquire_async(self, n: int = 1, timeout_s: float | None = None) -> float:
        """`acquire` for coroutines: never blocks the loop, not on the lock either."""
        while True:
            try:
                wait_s = self._reserve(n, timeout_s, blocking=False)
                break
            except BlockingIOError:
                await self._sleep_async(LOCK_RETRY_S)
        await self._sleep_async(wait_s)  # yields even for 0
        return wait_s

    def try_acquire(self, n: int = 1) -> bool:
        """Pass now or not at all."""
        try:
            self._reserve(n, 0.0, blocking=True)
        except LimiterTimeout:
            return False
        return True

    def push_back(self, seconds: float) -> None:
        """Let no process pass for a while: a server said `Retry-After`.

        Places that were given out before are not taken back.
        """
        now = self._clock()
        pause = max(0, round(seconds * NS_PER_S))
        self._state.update(lambda arrivals: (0, push_back(arrivals, now, pause)), now)

    def _reserve(self, n: int, timeout_s: float | None, *, blocking: bool) -> float:
        now = self._clock()

        def change(arrivals: Arrivals) -> tuple[int, Arrivals]:
            wait_ns, after = reserve(arrivals, now, self.rate, n)
            if timeout_s is not None and wait_ns > timeout_s * NS_PER_S:
                raise LimiterTimeout(
                    f"no place for n={n} within timeout_s={timeout_s}: the wait is "
                    f"{wait_ns / NS_PER_S:.3f} s at {self.rate}; raise the rate or the timeout"
                )
            return wait_ns, after

        return self._state.update(change, now, blocking=blocking) / NS_PER_S
