"""Counters of the processes that share a file limiter, in a file that is read without a lock.

`<path>.stats` holds cells of one page. The first cell is common: the number of resets, and a ring
of (time, calls granted until then) with one sample a second while calls come. Every other cell
belongs to the process that has locked the cell's byte; the next process continues its sums. A
process counts 18 sources separately and the others as one. It writes its cell when calls wait or
are refused, and each 10 ms while calls pass at once. The counters are behind by the calls of the
last 10 ms, until the next call.

Counting never stops a call. If the file cannot be used, the process counts in memory and logs one
warning. The total of granted calls and the penalties come from the limiter's record.
"""

import atexit
import logging
import os
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from rate_limit.forks import after_fork
from rate_limit.gcra import FULL_PACE, SECOND_NS, pace_at
from rate_limit.own_file import open_own
from rate_limit.queues import ByteLocks
from rate_limit.snapshot import ABANDONED, COUNTERS, GRANTED, WAITING, Snapshot, SourceSnapshot
from rate_limit.state_file import WALL_CLOCK, StateFile, boottime_ns, peek

_log = logging.getLogger(__name__)

Counts: TypeAlias = "array[int]"

_CELL = 512
"""Layout of a cell in numbers of 8 bytes: magic, a free one, then a block for each source, which is
its name and its counters."""

_CELL_BYTES = 8 * _CELL
_MAGIC = int.from_bytes(b"mixstat2", "little")
_MOST_PROCESSES = 4096
_RESETS = 1  # index in the common cell
_NAME = 8  # numbers; the first byte of a name is 1 if the block is used
_BLOCK = _NAME + COUNTERS
_BLOCKS = range(2, _CELL - _BLOCK + 1, _BLOCK)
_OTHERS = "(others)"
_RING = 64
_WRITE_NS = SECOND_NS // 100
_MINUTE_NS = 60 * SECOND_NS


class Stats:
    """The counters of this process.

    Callers hold the limiter's lock, except when they count waits and refusals. The cell is taken at
    the first `sample`, before anything is counted.

    Args:
        path: the limiter's state file.
        across_hosts: several hosts share the folder; the counters are those of this host.
    """

    def __init__(self, path: Path, across_hosts: bool = False):
        self.path: Path = _stats_path(path, across_hosts)
        self._mutex = threading.Lock()
        self._count_alone()
        _all_stats.add(self)

    def count(self, calls: Mapping[str, int]) -> None:
        """Count calls of these sources that passed at once, after `sample`; writes each 10 ms."""
        is_due = self._now_ns - self._written_ns >= _WRITE_NS
        if is_due:
            self._written_ns = self._now_ns
        with self._changing() if is_due else self._mutex:
            for source, n in calls.items():
                counts, at = self._blocks.get(source) or self._add_block(source)
                counts[at + GRANTED] += n

    def add(self, source: str, changes: Mapping[int, int]) -> None:
        """Change counters of a source, and write them."""
        with self._changing():
            counts, at = self._blocks.get(source) or self._add_block(source)
            for i, n in changes.items():
                # A forked child counts 0 waiting callers when a caller of its parent ends its wait.
                counts[at + i] = max(0, counts[at + i] + n)

    def sample(self, now_ns: int, granted: int, epoch: int) -> None:
        """Write a sample of the calls granted until now, once a second.

        A reset begins a new epoch. The next `count` writes, so that the reset clears no later call.
        """
        self._now_ns = now_ns
        if epoch != self._epoch:
            self._epoch, self._written_ns = epoch, 0
        second = now_ns // SECOND_NS
        if second == self._sampled_s:
            return
        locks = self._locks
        if self._sampled_s < 0 or (locks is not None and os.fstat(locks.handle).st_nlink == 0):
            self._claim()
        self._sampled_s = second
        at = 8 * (2 + 2 * (second % _RING))
        self._try_to_write(array("q", (now_ns, granted)), at)

    def write(self) -> None:
        with self._changing():
            pass  # calls that pass at once can be counted without the file

    def close(self) -> None:
        """Free the cell for the next process; its counts stay."""
        self.write()
        with self._mutex:
            self._count_alone()

    def after_fork(self) -> None:
        """Forget the cell in a forked child, because it belongs to the parent."""
        self._mutex = threading.Lock()
        self._count_alone()

    @contextmanager
    def _changing(self) -> Generator[None]:
        """Apply a pending reset first, and write the counters at the end."""
        with self._mutex:
            if self._locks is not None:
                resets = _resets_in(self._locks.handle)
                if resets != self._resets:
                    self._resets = resets
                    _clear(self._counts)
            yield
            self._try_to_write(self._counts, self._cell * _CELL_BYTES)

    def _count_alone(self) -> None:
        self._locks: ByteLocks | None = None  # closing it closes the file and frees the cell
        self._cell = 0
        self._resets = b""
        self._counts: Counts = array("q", bytes(_CELL_BYTES))
        self._counts[0] = _MAGIC
        self._blocks: dict[str, tuple[Counts, int]] = {}  # source -> where its counters start
        self._sampled_s = -1
        self._now_ns = self._written_ns = 0
        self._epoch: int = 0

    def _claim(self) -> None:
        """Take a cell of the file with its previous sums."""
        try:
            locks = ByteLocks(open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            cell = next((c for c in range(1, _MOST_PROCESSES) if locks.lock(c)), None)
            if cell is None:
                raise OSError(f"{_MOST_PROCESSES} processes count in it")
            before = _numbers(os.pread(locks.handle, _CELL_BYTES, cell * _CELL_BYTES))
            with self._mutex:
                self._locks, self._cell, self._resets = locks, cell, _resets_in(locks.handle)
                if len(before) == _CELL and before[0] == _MAGIC:
                    self._take_over(before)
            self._try_to_write(array("q", (_MAGIC,)), 0)
        except OSError as error:
            self._go_on_alone(error)

    def _take_over(self, before: Counts) -> None:
        for name, at in _blocks_in(before):
            before[at + WAITING] = 0
            counts, own_at = self._add_block(name)
            for i in range(COUNTERS):
                counts[own_at + i] += before[at + i]

    def _try_to_write(self, numbers: Counts, at: int) -> None:
        locks = self._locks
        try:
            if locks is not None:
                os.pwrite(locks.handle, numbers, at)
        except OSError as error:
            self._go_on_alone(error)

    def _go_on_alone(self, error: OSError) -> None:
        self._locks = None
        _log.warning(
            "stats_file=%s cannot be used, what this process does is not shown: %s",
            self.path,
            error,
        )

    def _add_block(self, source: str) -> tuple[Counts, int]:
        text = b"\1" + str(source).encode(errors="replace")[: 8 * _NAME - 1]
        name = text[1:].decode(errors="replace")
        if name not in self._blocks:
            taken = {at for _, at in self._blocks.values()}
            at = _BLOCKS[min(len(taken), len(_BLOCKS) - 1)]
            if at == _BLOCKS[-1]:
                text = b"\1" + _OTHERS.encode()
            self._counts[at : at + _NAME] = array("q", text.ljust(8 * _NAME, b"\0"))
            self._blocks[name] = self._counts, at + _NAME
        self._blocks[source] = self._blocks[name]
        return self._blocks[source]


def reset(path: Path) -> None:
    """Reset a limiter: empty bucket, full rate, no pause, counters 0. Waiting calls reserve again.

    Raises:
        OSError: the file is missing or cannot be used.
        ValueError: the file is not a limiter's state.
    """
    found = peek(path)
    across_hosts = found.clock_id == WALL_CLOCK
    clock_ns = time.time_ns if across_hosts else boottime_ns
    clock_id = found.clock_id if across_hosts else None
    file = StateFile(path, found.rate, clock_ns, clock_id=clock_id)
    file.lock(blocking=True)
    try:
        file.read()
        file.reset()
        _clear_cells(_stats_path(path, across_hosts))
    finally:
        file.unlock()
        file.close()


def snapshot_of(path: Path, clock_ns: Callable[[], int] | None = None) -> Snapshot:
    """What the limiter with this state file has done so far; takes no lock.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is not a limiter's state.
    """
    found = peek(path)
    rate, throttle, state = found.rate, found.throttle, found.state
    across_hosts = found.clock_id == WALL_CLOCK
    now_ns = (clock_ns or (time.time_ns if across_hosts else boottime_ns))()
    cells = _Cells(_stats_path(path, across_hosts))
    granted = cells.granted_since(now_ns - _MINUTE_NS, now_ns, state.granted)
    sums = sorted(cells.sums.items())
    return Snapshot(
        per_minute=rate.per_minute,
        burst=rate.burst,
        granted=state.granted,
        utilisation=granted / rate.per_minute,
        penalties=throttle.penalties,
        rate_factor=pace_at(throttle, now_ns) / FULL_PACE,
        paused_s=max(0, throttle.paused_ns - now_ns) / SECOND_NS,
        abandoned=sum(counts[ABANDONED] for _, counts in sums),
        sources={name: SourceSnapshot.of(counts) for name, counts in sums},
    )


def _stats_path(path: Path, across_hosts: bool) -> Path:
    host = f".{socket.gethostname()}" if across_hosts else ""
    return path.with_name(f"{path.name}{host}.stats")


def _resets_in(handle: int) -> bytes:
    return os.pread(handle, 8, 8 * _RESETS).ljust(8, b"\0")


def _clear(counts: Counts) -> None:
    """Set the counters to 0, except the number of waiting callers."""
    for at in _BLOCKS:
        for i in range(COUNTERS):
            if i != WAITING:
                counts[at + _NAME + i] = 0


def _clear_cells(path: Path) -> None:
    """Clear all cells; living processes notice it and start from 0."""
    with suppress(OSError):  # a failure of the statistics must not prevent the reset
        locks = ByteLocks(open_own(path, os.O_RDWR | os.O_NOFOLLOW))
        common = _numbers(os.pread(locks.handle, _CELL_BYTES, 0))
        if len(common) < 2 or common[0] != _MAGIC:
            return
        cleared = array("q", (_MAGIC, common[_RESETS] + 1, *[0] * (2 * _RING)))
        os.pwrite(locks.handle, cleared, 0)
        for at in range(_CELL_BYTES, os.fstat(locks.handle).st_size, _CELL_BYTES):
            counts = _numbers(os.pread(locks.handle, _CELL_BYTES, at))
            if len(counts) == _CELL and counts[0] == _MAGIC:
                _clear(counts)
                os.pwrite(locks.handle, counts, at)


class _Cells:
    """The current cells of all processes, including ended ones."""

    def __init__(self, path: Path):
        self._ring: list[tuple[int, int]] = []
        self.sums: dict[str, Counter[int]] = {}
        with suppress(OSError):
            self._read(ByteLocks(open_own(path, os.O_RDONLY | os.O_NOFOLLOW)))

    def granted_since(self, then_ns: int, now_ns: int, granted: int) -> int:
        """Calls granted from `then_ns` until now, given `granted` calls in total."""
        seen = [
            before
            for at_ns, before in self._ring
            if then_ns <= at_ns <= now_ns and before <= granted
        ]
        return granted - min(seen, default=granted)

    def _read(self, locks: ByteLocks) -> None:
        handle = locks.handle
        common = _numbers(os.pread(handle, _CELL_BYTES, 0))
        self._ring = list(zip(common[2 : 2 + 2 * _RING : 2], common[3::2], strict=False))
        for cell in range(1, 1 + os.fstat(handle).st_size // _CELL_BYTES):
            counts = _numbers(os.pread(handle, _CELL_BYTES, cell * _CELL_BYTES))
            if len(counts) != _CELL or counts[0] != _MAGIC:
                continue
            is_alive = locks.other(cell, cell + 1) is not None
            for name, at in _blocks_in(counts):
                sums = self.sums.setdefault(name, Counter())
                for i in range(COUNTERS):
                    if i != WAITING or is_alive:
                        sums[i] += counts[at + i]


def _numbers(content: bytes) -> Counts:
    return array("q", content[: len(content) // 8 * 8])


def _blocks_in(counts: Counts) -> Iterator[tuple[str, int]]:
    """The sources in a cell: (name, where its counters start)."""
    for at in _BLOCKS:
        text = array("q", counts[at : at + _NAME]).tobytes()
        if text[0]:
            yield text[1:].rstrip(b"\0").decode(errors="replace"), at + _NAME


_all_stats = after_fork(Stats.after_fork)


def _write_all() -> None:
    for stats in list(_all_stats):
        stats.write()


atexit.register(_write_all)
