"""What the processes of a file limiter have done: counters in a file, read without any lock.

`<path>.<host>.stats` holds cells of one page. The first is common: a ring of (time, calls granted
until then), a sample a second while calls come. Every other belongs to the process that has locked
its byte, which counts in it through a memory map: a count costs 0.1 µs, readers see it at once, and
it outlives the process. Who takes over the cell of a dead process goes on with its sums.

The counters are told apart by source. A process knows 18 of them, the rest count as one.

Counting never stops a call: where the file cannot be used the process counts for itself, and one
warning says so. The total of granted calls and the penalties are those of the limiter's record.
"""

import glob
import logging
import mmap
import os
import socket
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rate_limit.gcra import FULL_PACE, SECOND_NS, pace_at
from rate_limit.line import ByteLocks
from rate_limit.snapshot import WAIT_BOUNDS_S, Snapshot, SourceSnapshot, wait_bucket
from rate_limit.state_file import WALL_CLOCK, Counts, StateFile, boottime_ns, peek

_log = logging.getLogger(__name__)

_CELL_BYTES = mmap.ALLOCATIONGRANULARITY
_CELL = 512
"""Numbers of 8 bytes in use of a cell: magic, abandoned slots, then a block per source."""

_MAGIC = int.from_bytes(b"mixstat1", "little")
_MOST_PROCESSES = 4096
_ABANDONED = 1
_NAME_BYTES = 64  # begins with 1 where the block is in use
_AT_ONCE, _AFTER_WAIT, _WAITED_NS, _REFUSED, _WAITING, _WAITS = range(8, 14)
_BLOCK = _WAITS + len(WAIT_BOUNDS_S) + 1
_BLOCKS = range(2, _CELL - _BLOCK + 1, _BLOCK)
_OTHERS = "(others)"
_RING = 64
_MINUTE_NS = 60 * SECOND_NS


class Stats:
    """This process's counters.

    The cell is taken at the first `sample`, which comes before anything is counted.

    Args:
        path: the limiter's state file.
    """

    def __init__(self, path: Path):
        self.path = _stats_path(path)
        self._mutex = threading.Lock()
        self._count_alone()
        _all_stats.add(self)

    def at_once(self, source: str) -> tuple[Counts, int]:
        """The number of calls that passed at once, for who holds the limiter's lock to count up."""
        at_once = self._at_once.get(source)
        return self._new_block(source) if at_once is None else at_once

    def begin_wait(self, source: str) -> None:
        """A caller has to wait."""
        counts, at = self._block(source)
        with self._mutex:
            counts[at + _WAITING] += 1

    def end_wait(self, source: str, passed: int, waited_s: float) -> None:
        """It waits no longer; `passed` calls, 0 where it was cancelled or refused."""
        counts, at = self._block(source)
        with self._mutex:
            counts[at + _WAITING] -= counts[at + _WAITING] > 0  # a forked child begins with 0
            if passed:
                counts[at + _AFTER_WAIT] += passed
                counts[at + _WAITED_NS] += int(waited_s * SECOND_NS) * passed
                counts[at + _WAITS + wait_bucket(waited_s)] += 1

    def refuse(self, source: str, n: int) -> None:
        """n calls were turned away."""
        counts, at = self._block(source)
        with self._mutex:
            counts[at + _REFUSED] += n

    def abandon(self, n: int) -> None:
        """n slots could be used by nobody."""
        with self._mutex:
            self._counts[_ABANDONED] += n

    def sample(self, now_ns: int, granted: int) -> None:
        """Note the calls granted until now, once a second; the limiter's lock must be held."""
        second = now_ns // SECOND_NS
        if second == self._sampled_s:
            return
        if self._sampled_s < 0:
            self._claim()
        self._sampled_s = second
        at = 2 * (second % _RING)
        self._ring[at + 1], self._ring[at] = granted, now_ns

    def close(self) -> None:
        """Leave the cell to the next process; what was counted stays."""
        self._count_alone()

    def after_fork(self) -> None:
        """The cell is the parent's."""
        self._mutex = threading.Lock()
        self.close()

    def _count_alone(self) -> None:
        self._locks: ByteLocks | None = None  # closes the file when it goes, and the cell is free
        self._counts: Counts = array("q", bytes(8 * _CELL))
        self._ring: Counts = array("q", bytes(16 * _RING))
        self._at_once: dict[str, tuple[Counts, int]] = {}
        self._sampled_s = -1

    def _claim(self) -> None:
        """Take a cell of the file, with the sums of who had it before."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            locks = ByteLocks(os.open(self.path, flags, 0o600))
            if os.fstat(locks.handle).st_uid != os.geteuid():
                raise PermissionError("it is another user's")
            cell = next((c for c in range(1, _MOST_PROCESSES) if locks.lock(c)), None)
            if cell is None:
                raise OSError(f"{_MOST_PROCESSES} processes count in it")
            ring, counts = _map(locks.handle, 0)[2:], _map(locks.handle, cell)
        except OSError as error:
            _log.warning(
                "stats_file=%s cannot be used, what this process does is not shown: %s",
                self.path,
                error,
            )
            return
        known: dict[str, tuple[Counts, int]] = {}
        for at, name in _names(counts):
            known[name] = counts, at + _AT_ONCE
            counts[at + _WAITING] = 0
        with self._mutex:
            self._locks, self._ring, self._counts, self._at_once = locks, ring, counts, known

    def _block(self, source: str) -> tuple[Counts, int]:
        counts, at_once = self.at_once(source)
        return counts, at_once - _AT_ONCE

    def _new_block(self, source: str) -> tuple[Counts, int]:
        with self._mutex:
            counts = self._counts
            known = {at for _, at in self._at_once.values()}
            at = _BLOCKS[min(len(known), len(_BLOCKS) - 1)]
            name = source if at != _BLOCKS[-1] else _OTHERS
            if source not in self._at_once:
                self._at_once[source] = counts, at + _AT_ONCE
                text = (b"\1" + name.encode()[: _NAME_BYTES - 1]).ljust(_NAME_BYTES, b"\0")
                for i in range(_NAME_BYTES // 8):
                    counts[at + i] = int.from_bytes(text[8 * i : 8 * i + 8], "little", signed=True)
            return self._at_once[source]


def reset(path: Path) -> None:
    """Begin anew: an empty bucket, the full rate, no pause, nothing counted. Who waits waits anew.

    Raises:
        OSError: no such file, or it cannot be used.
        ValueError: it is no state file of a limiter.
    """
    found = peek(path)
    clock_ns = _clock_of(found.clock_id)
    clock_id = WALL_CLOCK if clock_ns is time.time_ns else None
    file = StateFile(path, found.rate, clock_ns, clock_id=clock_id)
    file.lock(blocking=True)
    try:
        file.read()
        file.reset()
        _Cells(path).clear()
    finally:
        file.unlock()
        file.close()


def snapshot_of(path: Path, clock_ns: Callable[[], int] | None = None) -> Snapshot:
    """What the limiter with this state file has done; takes no lock and disturbs nobody.

    Raises:
        OSError: no such file, or it cannot be read.
        ValueError: it is no state file of a limiter.
    """
    rate, clock_id, _, terms, state = peek(path)
    now_ns = (clock_ns or _clock_of(clock_id))()
    cells = _Cells(path)
    allowed = rate.per_minute * _MINUTE_NS / (60 * SECOND_NS)
    return Snapshot(
        per_minute=rate.per_minute,
        burst=rate.burst,
        granted=state.granted,
        utilisation=cells.granted_since(now_ns - _MINUTE_NS, state.granted) / allowed,
        penalties=terms.penalties,
        rate_factor=pace_at(terms, now_ns) / FULL_PACE,
        paused_s=max(0, terms.paused_ns - now_ns) / SECOND_NS,
        abandoned=cells.abandoned,
        sources=cells.sources(),
    )


def _stats_path(path: Path) -> Path:
    """Per host: memory maps of a shared folder's file would not be of one mind."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.stats")


def _clock_of(clock_id: bytes) -> Callable[[], int]:
    return time.time_ns if clock_id == WALL_CLOCK else boottime_ns


class _Cells:
    """The cells of all processes, the dead ones' too, as they are now.

    Args:
        path: the limiter's state file.
    """

    def __init__(self, path: Path):
        self._ring: list[tuple[int, int]] = []
        self._sums: dict[str, Counter[int]] = {}
        self.abandoned = 0
        self._files = list(path.parent.glob(f"{glob.escape(path.name)}.*.stats"))
        for file in self._files:
            with suppress(OSError):
                self._read(ByteLocks(os.open(file, os.O_RDONLY | os.O_CLOEXEC)))

    def granted_since(self, then_ns: int, granted: int) -> int:
        """Calls granted from `then_ns` until now, when there were `granted` of them in all."""
        seen = [before for at_ns, before in self._ring if at_ns >= then_ns and before <= granted]
        return granted - min(seen, default=granted)

    def sources(self) -> dict[str, SourceSnapshot]:
        return {
            name: SourceSnapshot(
                granted=sums[_AT_ONCE] + sums[_AFTER_WAIT],
                waiting=sums[_WAITING],
                waited_s=sums[_WAITED_NS] / SECOND_NS,
                waits=tuple(sums[i] for i in range(_WAITS, _BLOCK)),
                refused=sums[_REFUSED],
            )
            for name, sums in sorted(self._sums.items())
        }

    def clear(self) -> None:
        """Count from nothing; who waits now stays counted."""
        zero = bytes(8)
        for path in self._files:
            with path.open("r+b", buffering=0) as file:
                handle, size = file.fileno(), path.stat().st_size
                os.pwrite(handle, zero * 2 * _RING, 16)
                for at in range(_CELL_BYTES, size, _CELL_BYTES):
                    os.pwrite(handle, zero, at + 8 * _ABANDONED)
                    for block in _BLOCKS:
                        for i in range(_AT_ONCE, _BLOCK):
                            if i != _WAITING:
                                os.pwrite(handle, zero, at + 8 * (block + i))

    def _read(self, locks: ByteLocks) -> None:
        handle = locks.handle
        common = _numbers(os.pread(handle, 8 * _CELL, 0))
        self._ring += list(zip(common[2 : 2 + 2 * _RING : 2], common[3::2], strict=False))
        for cell in range(1, os.fstat(handle).st_size // _CELL_BYTES):
            counts = _numbers(os.pread(handle, 8 * _CELL, cell * _CELL_BYTES))
            if len(counts) != _CELL or counts[0] != _MAGIC:
                continue
            self.abandoned += counts[_ABANDONED]
            is_alive = locks.other(cell, cell + 1) is not None
            for at, name in _names(counts):
                sums = self._sums.setdefault(name, Counter())
                for i in range(_AT_ONCE, _BLOCK):
                    if i != _WAITING or is_alive:
                        sums[i] += counts[at + i]


def _numbers(content: bytes) -> Counts:
    return array("q", content[: len(content) // 8 * 8])


def _names(counts: Counts) -> Iterator[tuple[int, str]]:
    """Where the blocks in use begin, and their sources."""
    for at in _BLOCKS:
        text = array("q", counts[at : at + _NAME_BYTES // 8]).tobytes()
        if text[0]:
            yield at, text[1:].rstrip(b"\0").decode(errors="replace")


def _map(handle: int, cell: int) -> Counts:
    """A cell in memory; there is room for it on the disk, or writing to it would kill."""
    os.posix_fallocate(handle, cell * _CELL_BYTES, _CELL_BYTES)
    page = mmap.mmap(handle, _CELL_BYTES, offset=cell * _CELL_BYTES)
    counts = memoryview(page).cast("q")
    if counts[0] != _MAGIC:
        for i in range(_CELL):
            counts[i] = 0
        counts[0] = _MAGIC
    return counts


_all_stats: weakref.WeakSet[Stats] = weakref.WeakSet()


def _after_fork() -> None:
    for stats in list(_all_stats):
        stats.after_fork()


os.register_at_fork(after_in_child=_after_fork)
