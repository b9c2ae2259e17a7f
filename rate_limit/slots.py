"""Global concurrency: at most `slots` holders at once over all processes of a host.

Each slot is one byte of a file, held by an open-file-description lock. The kernel frees it when
its holder dies, so there is nothing to renew and nothing to clean up. Waiters come back on a timer
with a random part; they are served in no strict order.
"""

import asyncio
import fcntl
import os
import random
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

F_OFD_SETLK = 37
"""Linux: a lock that the open file description owns, see fcntl(2)."""

_FLOCK = struct.Struct("hhqqi4x")
_RETRY_S = (0.002, 0.01)


class SlotTimeout(TimeoutError):
    """No slot came free in time."""


class FileSlots:
    """A semaphore in a file; it does not reach across hosts.

    Args:
        path: every process that shares the slots names the same file; made when missing.
        slots: holders at once, >= 1; the same for all.
    """

    def __init__(self, path: str | os.PathLike[str], slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots} must be >= 1")
        self.path, self.slots = Path(path), slots

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[int]:
        """Hold one slot; gives its number.

        Raises:
            SlotTimeout: none came free within `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (held := self._try()) is None:
            time.sleep(self._pause(deadline))
        try:
            yield held[1]
        finally:
            os.close(held[0])

    @asynccontextmanager
    async def hold_async(self, timeout_s: float | None = None) -> AsyncIterator[int]:
        """`hold` for coroutines."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (held := self._try()) is None:
            await asyncio.sleep(self._pause(deadline))
        try:
            yield held[1]
        finally:
            os.close(held[0])

    def _pause(self, deadline: float | None) -> float:
        if deadline is not None and time.monotonic() >= deadline:
            raise SlotTimeout(
                f"no free slot of {self.slots} in {self.path}; raise max_workers or the timeout"
            )
        return random.uniform(*_RETRY_S)

    def _try(self) -> tuple[int, int] | None:
        """(descriptor that holds the slot, its number), or None when all are taken."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        first = random.randrange(self.slots)
        for offset in range(self.slots):
            slot = (first + offset) % self.slots
            record = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
            try:
                fcntl.fcntl(descriptor, F_OFD_SETLK, record)
            except OSError as error:
                if isinstance(error, BlockingIOError | PermissionError):
                    continue
                os.close(descriptor)
                raise
            return descriptor, slot
        os.close(descriptor)
        return None
