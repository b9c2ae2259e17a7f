"""Our file limiter and its peers behind one small interface, for `rate_limiter.py` to measure.

Each limiter here holds one rate over all processes that open it in the same place. A peer is used
the way its own project documents it, and as lean as that allows; where it does less work than ours,
its `note` says so.
"""

import asyncio
import fcntl
import math
import os
import struct
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The rate to hold."""

    per_second: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the processes of one measurement meet; nobody was there before."""

    folder: Path
    redis_port: int | None


class Limiter(ABC):
    """One limiter, opened by one process.

    Args:
        place: shared with the other processes.
        limit: the same in all of them.
    """

    label: ClassVar[str]
    """Name in the tables."""

    package: ClassVar[str | None]
    """Distribution whose version is printed."""

    library: ClassVar[str]
    """Module to import before the clock starts; a limiter whose module is absent is left out."""

    note: ClassVar[str]
    """What a reader of the tables must know of it."""

    needs_redis: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, place: Place, limit: Limit): ...

    def acquire(self) -> object:
        """Wait until one call may pass."""
        raise NotImplementedError(f"{self.label} is measured in asyncio only")

    async def acquire_async(self) -> object:
        """`acquire` for coroutines."""
        raise NotImplementedError(f"{self.label} is not measured in asyncio")


class Floor(Limiter):
    label = "floor: flock, pread, pwrite, unlock"
    package = None
    library = "fcntl"
    note = "limits nothing: four system calls and 16 bytes, in Python, nothing between them"

    def __init__(self, place: Place, limit: Limit):
        self._handle = os.open(place.folder / "state", os.O_RDWR | os.O_CREAT)
        os.pwrite(self._handle, bytes(16), 0)

        def acquire(
            flock=fcntl.flock,
            pread=os.pread,
            pwrite=os.pwrite,
            handle=self._handle,
            exclusive=fcntl.LOCK_EX,
            unlocked=fcntl.LOCK_UN,
        ) -> None:
            flock(handle, exclusive)
            pwrite(handle, pread(handle, 16, 0), 0)
            flock(handle, unlocked)

        self.acquire = acquire


class Ours(Limiter):
    label = "ours: FileRateLimiter"
    package = None
    library = "rate_limit.file_limiter"
    note = "survives a killed process and a damaged file; asyncio never blocks on the file"

    def __init__(self, place: Place, limit: Limit):
        from rate_limit.file_limiter import FileRateLimiter

        limiter = FileRateLimiter(place.folder / "state", 60 * limit.per_second, limit.burst)
        self.acquire = limiter.acquire
        self.acquire_async = limiter.acquire_async


class GcraFile:
    """The same algorithm as ours over 8 bytes of a file; the lock around it is the peer's.

    It checks nothing: no checksum, no reboot, no deleted file.
    """

    _TAT = struct.Struct("<q")

    def __init__(self, path: Path, limit: Limit):
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT)
        self._interval_ns = math.ceil(10**9 / limit.per_second)
        self._tolerance_ns = (limit.burst - 1) * self._interval_ns

    def reserve(self) -> float:
        """Take the next slot, with the lock held.

        Returns:
            seconds until it.
        """
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        record = os.pread(self._handle, 8, 0)
        tat_ns = self._TAT.unpack(record)[0] if record else 0
        start_ns = max(now_ns, tat_ns - self._tolerance_ns)
        tat_ns = max(tat_ns, start_ns) + self._interval_ns
        os.pwrite(self._handle, self._TAT.pack(tat_ns), 0)
        return (start_ns - now_ns) / 1e9


class LockedGcra(Limiter):
    """`GcraFile` under a peer's lock, which the subclass makes."""

    note = "the same algorithm in a file of 8 bytes without checks; a busy lock is polled"

    def __init__(self, place: Place, limit: Limit):
        self._lock = self._make_lock(place.folder / "lock")
        self._gcra = GcraFile(place.folder / "state", limit)

    @abstractmethod
    def _make_lock(self, path: Path) -> AbstractContextManager[object]: ...

    def acquire(self) -> None:
        with self._lock:
            wait_s = self._gcra.reserve()
        if wait_s > 0:
            time.sleep(wait_s)


class FastenersGcra(LockedGcra):
    label = "fasteners: InterProcessLock + GCRA"
    package = "fasteners"
    library = "fasteners"

    def _make_lock(self, path: Path) -> AbstractContextManager[object]:
        import fasteners  # pyright: ignore[reportMissingImports]

        return fasteners.InterProcessLock(path)


class FilelockGcra(LockedGcra):
    label = "filelock: FileLock + GCRA"
    package = "filelock"
    library = "filelock"

    def _make_lock(self, path: Path) -> AbstractContextManager[object]:
        from filelock import FileLock

        return FileLock(path)


class Pyrate(Limiter):
    label = "pyrate-limiter: SQLite + FileLock"
    package = "pyrate-limiter"
    library = "pyrate_limiter"
    note = (
        "a log of the last second: `per_second` calls in any window of one, `burst` unused; "
        "stores every call, so it costs more the more calls its second holds"
    )

    def __init__(self, place: Place, limit: Limit):
        from pyrate_limiter import (  # pyright: ignore[reportMissingImports]
            Duration,
            Rate,
            SQLiteBucket,
        )
        from pyrate_limiter import Limiter as Peer  # pyright: ignore[reportMissingImports]

        bucket = SQLiteBucket.init_from_file(
            [Rate(int(limit.per_second), Duration.SECOND)],
            db_path=str(place.folder / "bucket.sqlite"),
            use_file_lock=True,
        )
        self._limiter = Peer(bucket)

    def acquire(self) -> None:
        if not self._limiter.try_acquire("calls"):
            raise RuntimeError("pyrate-limiter refused a call that may wait")


class LimitsRedis(Limiter):
    label = "limits: fixed window on Redis"
    package = "limits"
    library = "limits"
    note = (
        "its cheapest strategy; it only says no, so it is not measured where calls must wait; "
        "the CPU of the Redis server is extra"
    )
    needs_redis = True

    def __init__(self, place: Place, limit: Limit):
        from limits import RateLimitItemPerSecond  # pyright: ignore[reportMissingImports]
        from limits.storage import RedisStorage  # pyright: ignore[reportMissingImports]
        from limits.strategies import (  # pyright: ignore[reportMissingImports]
            FixedWindowRateLimiter,
        )

        storage = RedisStorage(f"redis://127.0.0.1:{place.redis_port}/0")
        self._limiter = FixedWindowRateLimiter(storage)
        self._item = RateLimitItemPerSecond(int(limit.per_second))
        self._key = str(place.folder)

    def acquire(self) -> None:
        if not self._limiter.hit(self._item, self._key):
            raise RuntimeError("limits refused a call at a rate that nobody reaches")


class ThrottledRedis(Limiter):
    label = "throttled-py: GCRA on Redis"
    package = "throttled-py"
    library = "throttled"
    note = (
        "the same algorithm; a waiter reserves nothing and asks again after 0.2 s or more; "
        "the CPU of the Redis server is extra"
    )
    needs_redis = True

    def __init__(self, place: Place, limit: Limit):
        from throttled import (  # pyright: ignore[reportMissingImports]
            RateLimiterType,
            Throttled,
            rate_limiter,
            store,
        )

        self._limiter = Throttled(
            key=str(place.folder),
            timeout=3600,
            using=RateLimiterType.GCRA.value,
            quota=rate_limiter.per_sec(int(limit.per_second), burst=limit.burst),
            store=store.RedisStore(server=f"redis://127.0.0.1:{place.redis_port}/0"),
        )

    def acquire(self) -> None:
        while self._limiter.limit().limited:
            pass


class FilelockAsync(Limiter):
    label = "filelock: AsyncFileLock + GCRA"
    package = "filelock"
    library = "filelock"
    note = (
        "as documented, the file is locked in a thread; an asyncio.Lock lets the coroutines of a "
        "process come one by one, which is cheaper than a file lock for each of them"
    )
    run_in_executor: ClassVar[bool] = True

    def __init__(self, place: Place, limit: Limit):
        from filelock import AsyncFileLock

        self._lock = AsyncFileLock(
            place.folder / "lock", thread_local=False, run_in_executor=self.run_in_executor
        )
        self._turn = asyncio.Lock()
        self._gcra = GcraFile(place.folder / "state", limit)

    async def acquire_async(self) -> None:
        async with self._turn, self._lock:
            wait_s = self._gcra.reserve()
        if wait_s > 0:
            await asyncio.sleep(wait_s)


class FilelockAsyncNoThread(FilelockAsync):
    label = "filelock: AsyncFileLock without executor + GCRA"
    note = "the same without the thread: the loop stands still while the file is opened and locked"
    run_in_executor = False


class AioLimiter(Limiter):
    label = "aiolimiter: AsyncLimiter"
    package = "aiolimiter"
    library = "aiolimiter"
    note = "shares nothing: each process has the whole rate for itself"

    def __init__(self, place: Place, limit: Limit):
        from aiolimiter import AsyncLimiter  # pyright: ignore[reportMissingImports]

        self.acquire_async = AsyncLimiter(limit.burst, limit.burst / limit.per_second).acquire


BLOCKING = [
    Floor,
    Ours,
    Pyrate,
    FastenersGcra,
    FilelockGcra,
    LimitsRedis,
    ThrottledRedis,
]
"""Measured for CPU per acquire."""

ASYNCIO = [Ours, FilelockAsync, FilelockAsyncNoThread, AioLimiter]
"""Measured with many coroutines in each process."""

PACED = [Ours, Pyrate, ThrottledRedis]
"""Measured for accuracy and fairness."""

WAITING = [Ours, Pyrate]
"""Measured for what waiting costs."""

KINDS: dict[str, type[Limiter]] = {
    kind.label: kind for kind in [*BLOCKING, *ASYNCIO, *PACED, *WAITING]
}
