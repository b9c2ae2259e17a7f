"""One rate for all processes of a host: reserve a slot in the shared file, let go, sleep until it.

Nobody polls for permission and nobody holds the file while sleeping. Order of reservation is order
of service. What is promised is the granted instant: a process that the system wakes late passes
late.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rate_limit.gcra import LimiterTimeout, Rate, push_back, reserve
from rate_limit.state_file import StateFile
from rate_limit.waiting import Steps, run, run_async

__all__ = ["FileRateLimiter", "LimiterTimeout", "boottime_ns"]

_SECOND_NS = 10**9
_LOCK_GRACE_NS = _SECOND_NS // 50
"""How long a caller that will not wait for a slot still waits for the file."""
_FIRST_RETRY_S = 0.0002
_LAST_RETRY_S = 0.02

_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_ns() -> int:
    """Nanoseconds since boot, suspension included: the same for all processes, never set back."""
    return time.clock_gettime_ns(_BOOT_CLOCK)


class FileRateLimiter:
    """A rate limit that every process with the same `path` shares.

    Safe with threads, in asyncio (the loop is never blocked on the file), after fork, and pickled
    to other processes of this host. A cancelled or killed waiter leaves its slot unused.

    Args:
        path: the state file; the limit is kept per file.
        per_minute: sustained calls a minute.
        burst: calls that may pass back to back after an idle spell.
        min_interval_s: least time between two calls, bursts included.
        clock_ns: the time; one clock for all sharers.
        sleep: waits, for threads.
        sleep_async: waits, for coroutines.

    Raises:
        ValueError: a limit is out of range, or the file belongs to other limits.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        per_minute: float,
        burst: int,
        min_interval_s: float = 0.0,
        *,
        clock_ns: Callable[[], int] = boottime_ns,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.rate = Rate(per_minute=per_minute, burst=burst, min_interval_s=min_interval_s)
        self._clock_ns, self._sleep, self._sleep_async = clock_ns, sleep, sleep_async
        self._file = StateFile(path, self.rate)
        self.path = self._file.path
        self._file.lock(blocking=True)
        try:
            self._file.read(clock_ns())  # another rate is told now, not at the first call
        finally:
            self._file.unlock()

    def acquire(self, n: int = 1, timeout_s: float | None = None) -> float:
        """Wait until n calls may pass together.

        Args:
            n: calls, 1 .. burst.
            timeout_s: longest wait; None waits as long as it takes.

        Returns:
            Seconds waited; 0.0 when there was nothing to wait for.

        Raises:
            LimiterTimeout: the slot lies beyond `timeout_s`; it was not reserved.
            ValueError: n is below 1 or above the burst.
        """
        return run(self._acquire(n, timeout_s, blocking=timeout_s is None), self._sleep)

    async def acquire_async(self, n: int = 1, timeout_s: float | None = None) -> float:
        """`acquire` for coroutines."""
        steps = self._acquire(n, timeout_s, blocking=False)
        return await run_async(steps, self._sleep_async)

    def try_acquire(self, n: int = 1) -> bool:
        """Let n calls pass if they may now; waits for nothing but the file, 20 ms at most."""
        try:
            self.acquire(n, timeout_s=0.0)
        except LimiterTimeout:
            return False
        return True

    def push_back(self, seconds: float) -> None:
        """Let nobody pass for `seconds`, those who wait already included: a server's `Retry-After`.

        After it, calls come at the sustained rate without a burst.

        Args:
            seconds: from now, >= 0; a pause shorter than the one in force changes nothing.
        """
        run(self._push_back(seconds, blocking=True), self._sleep)

    async def push_back_async(self, seconds: float) -> None:
        """`push_back` for coroutines."""
        await run_async(self._push_back(seconds, blocking=False), self._sleep_async)

    def close(self) -> None:
        """Close the state file; the next call opens it again."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        rate = self.rate
        return type(self), (self.path, rate.per_minute, rate.burst, rate.min_interval_s)

    def _acquire(self, n: int, timeout_s: float | None, *, blocking: bool) -> Steps[float]:
        """Returns seconds waited."""
        if not 1 <= n <= self.rate.burst:
            raise ValueError(
                f"cannot acquire n={n} from {self.path}: n must be 1 to burst={self.rate.burst}"
            )
        entered_ns = self._clock_ns()
        deadline_ns = None if timeout_s is None else entered_ns + int(timeout_s * _SECOND_NS)
        start_ns, epoch, waited = 0, None, False
        while True:
            lock_deadline_ns = None if deadline_ns is None else max(deadline_ns, start_ns)
            waited = (yield from self._lock(lock_deadline_ns, blocking)) or waited
            try:
                now_ns = self._clock_ns()
                arrivals = self._file.read(now_ns)
                if arrivals.epoch != epoch:  # no reservation yet, or it is void
                    start_ns, reserved = reserve(arrivals, now_ns, n, self.rate)
                    if deadline_ns is not None and start_ns > max(deadline_ns, now_ns):
                        raise LimiterTimeout(
                            f"no slot for n={n} calls from {self.path}: the next is "
                            f"{(start_ns - entered_ns) / _SECOND_NS:.3f} s away, beyond "
                            f"timeout_s={timeout_s}; wait longer or raise the rate"
                        )
                    self._file.write(reserved)
                    epoch = reserved.epoch
            finally:
                self._file.unlock()
            if start_ns <= now_ns:
                return (now_ns - entered_ns) / _SECOND_NS if waited else 0.0
            waited = True
            while (left_ns := start_ns - self._clock_ns()) > 0:  # a sleep may end a little early
                yield left_ns / _SECOND_NS

    def _push_back(self, seconds: float, *, blocking: bool) -> Steps[None]:
        if not 0 <= seconds <= 86400:
            raise ValueError(f"cannot push back by seconds={seconds}: must be from 0 to 86400")
        yield from self._lock(None, blocking)
        try:
            now_ns = self._clock_ns()
            arrivals = self._file.read(now_ns)
            pushed = push_back(arrivals, now_ns, int(seconds * _SECOND_NS), self.rate)
            if pushed != arrivals:
                self._file.write(pushed)
        finally:
            self._file.unlock()

    def _lock(self, deadline_ns: int | None, blocking: bool) -> Steps[bool]:
        """Take the file's lock: at once, by waiting in the kernel, or by coming back.

        Returns:
            Whether somebody else had it first.
        """
        if self._file.lock(blocking=False):
            return False
        if blocking:
            return self._file.lock(blocking=True)
        retry_s = _FIRST_RETRY_S
        while True:
            yield retry_s
            if self._file.lock(blocking=False):
                return True
            if deadline_ns is not None and self._clock_ns() > deadline_ns + _LOCK_GRACE_NS:
                raise LimiterTimeout(
                    f"cannot lock {self.path} in time: another process holds it; look for a "
                    "stopped one (fuser names them)"
                )
            retry_s = min(2 * retry_s, _LAST_RETRY_S)
