"""How long an event loop stands still when the process that holds the limiter's lock is stopped.

    /tmp/limiter-peers/bin/python -m benchmarks.loop_stall

64 coroutines ask for calls, one more only ticks. After half a second another process takes the lock
and is stopped (SIGSTOP) for a second. Printed is the longest time between two ticks.
"""

import asyncio
import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from filelock import AsyncFileLock, FileLock

from rate_limit.file_limiter import FileRateLimiter

COROUTINES = 64
BEFORE_S, STOPPED_S = 0.5, 1.0
GOAL_MS = 50

Acquire = Callable[[], Awaitable[object]]


def ours(path: Path) -> Acquire:
    return FileRateLimiter(path, per_minute=6e7, burst=1000).acquire_async


def async_file_lock(path: Path) -> Acquire:
    lock = AsyncFileLock(str(path))

    async def acquire() -> None:
        async with lock:
            pass

    return acquire


def file_lock(path: Path) -> Acquire:
    lock = FileLock(str(path))

    async def acquire() -> None:
        with lock:
            pass
        await asyncio.sleep(0)

    return acquire


KINDS = {
    "ours": ours,
    "filelock.AsyncFileLock": async_file_lock,
    "filelock.FileLock in a coroutine": file_lock,
}


def hold_and_stop(path: Path) -> None:
    """Take the lock, and let oneself be stopped."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGSTOP)


async def longest_gap_ms(acquire: Acquire, path: Path) -> float:
    """The longest time between two ticks."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def ask() -> None:
        while True:
            await acquire()

    tasks = [asyncio.ensure_future(work) for work in (tick(), *(ask() for _ in range(COROUTINES)))]
    await asyncio.sleep(BEFORE_S)
    holder = multiprocessing.get_context("fork").Process(target=hold_and_stop, args=(path,))
    holder.start()
    pid = holder.pid
    assert pid is not None
    release = multiprocessing.get_context("fork").Process(target=kill_later, args=(pid,))
    release.start()
    await asyncio.sleep(STOPPED_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for process in (release, holder):
        process.join()
    return 1000 * max(gaps)


def kill_later(pid: int) -> None:
    """End the stopped process from outside: a loop that stands still could not."""
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Print the table."""
    gaps_ms: dict[str, float] = {}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "limit"
            gaps_ms[name] = asyncio.run(longest_gap_ms(kind(path), path))
    print("| | longest stall |\n|---|---|")
    for name, gap_ms in gaps_ms.items():
        print(f"| {name} | {gap_ms:,.0f} ms |")
    met = "met" if gaps_ms["ours"] <= GOAL_MS else "missed"
    print(f"\ngoal: at most {GOAL_MS} ms; seen {gaps_ms['ours']:.0f} ms: {met}")


if __name__ == "__main__":
    main()
