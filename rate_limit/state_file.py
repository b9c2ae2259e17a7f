"""The limiter's shared state: one small checksummed record in a file, changed under `flock`.

The record, little endian: header (magic, version, the clock's identity, the rate and its weights),
throttle (`Throttle`), serial number, state (`GcraState`, or `SharedState` if the rate has weights),
CRC-32 of all. The serial number grows with each write. It starts at the time in nanoseconds, so
that a new record has a larger one than all earlier records.

docs/limiter.md has what happens when the file is damaged, deleted or replaced. At each lock, a
process compares the file that it has open with the file at the path, and at each read the serial
number with the last one that it saw. If it knows more than the file has, it adds that (`_add`).
`.<name>.made` shows that a file was deleted. A new file is complete before it gets its name.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import UUID

from filelock import FileLock, Timeout

from rate_limit import gcra, shares
from rate_limit.forks import after_fork
from rate_limit.gcra import (
    FULL_PACE,
    SECOND_NS,
    SLOWEST_PACE,
    YEAR_NS,
    GcraState,
    Rate,
    Throttle,
)
from rate_limit.own_file import make_complete, named, open_own
from rate_limit.shares import SharedState

_log = logging.getLogger(__name__)

OnConfigChange = Literal["refuse", "adopt"]
State = GcraState | SharedState
"""The state that every call changes; a `SharedState` if the rate has weights."""

_MAGIC = b"mix-rate"
_VERSION = 4
_HEADER = struct.Struct("<8sH16sdQdH")  # the last is the length of the weights as JSON
_THROTTLE = struct.Struct("<qqqqqqq")
_GCRA = struct.Struct("<qqqqq")  # the serial number first
_SHARED_BYTES = 16  # bytes of each number
_MOST_BYTES = 4096
_WHOLE = 0x2144DF1C  # CRC-32 of any bytes with their own CRC-32 behind them
_MOST_COUNTED = 2**62
_ANY_SERIAL = _MOST_COUNTED  # above all others: what has it is added to any record
_OPEN_TIMEOUT_S = 30.0
_MOST_FOREIGN_BOOTS = 2
_MOST_PEEKS = 100

MOST_SKEW_NS = SECOND_NS
"""Largest difference between the clock of hosts that share a file and the time of its folder."""

FARTHEST_NS = YEAR_NS
"""A TAT farther ahead than this time plus a burst comes from another clock."""

_LOCK, _LOCK_NOW, _UNLOCK = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN


class StateFile:
    """The record at `path`; one reader and writer at a time, over all processes and threads.

    Args:
        path: the file; it is created with its folder if it is missing.
        rate: the limits, the same for all processes.
        clock_ns: the clock, the same for all processes.
        on_config_change: if the file has another rate: refuse it, or write the new one.
        clock_id: identity of the clock; None for the clock of this boot.

    Raises:
        ValueError: the file belongs to another rate.
        OSError: the file cannot be used, or is not safe to use (see `open_own`).
        RuntimeError: this host's clock differs from the time of the shared folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rate: Rate,
        clock_ns: Callable[[], int],
        on_config_change: OnConfigChange = "refuse",
        clock_id: bytes | None = None,
    ):
        self.path: Path = Path(path).absolute()
        self.rate: Rate = rate
        self.throttle: Throttle = Throttle()
        """The throttle of the last read record."""

        self.now_ns: int = 0
        """The time at which the lock was taken."""

        self._clock_ns = clock_ns
        self._clock_id = _boot_id() if clock_id is None else clock_id
        self._foreign_boots = 0
        self._handle = -1
        self._opened: tuple[int, int] | None = None  # device and number of the open file
        self._prefix = b""  # header and throttle of the last read record
        self._prefix_crc = 0
        self._serial = 0  # of the last read record
        self._seen: _Seen | None = None
        self._mutex = threading.Lock()  # flock does not exclude threads of one process
        _open_files.add(self)
        self._open(on_config_change)

    def lock(self, *, blocking: bool) -> bool:
        """Take the lock, for some microseconds; `unlock` must follow.

        Returns:
            False if another process has the lock and `blocking` is false.

        Raises:
            ValueError: the file was replaced by one with another rate.
            OSError: the file was deleted and cannot be created again, or cannot be locked.
        """
        if not self._mutex.acquire(blocking=blocking):
            return False
        try:
            if self._flock(blocking):
                return True
        except BaseException:
            self._mutex.release()
            raise
        self._mutex.release()
        return False

    def unlock(self) -> None:
        try:
            fcntl.flock(self._handle, _UNLOCK)
        finally:
            self._mutex.release()

    def read(self) -> State:
        """The state; the lock must be held. A damaged record is replaced first.

        Afterwards `rate` and `throttle` are those of the record.

        Raises:
            RuntimeError: another host writes to the file.
        """
        record = os.pread(self._handle, _MOST_BYTES, 0)
        state = self._state_in(record)
        if state is None:
            state = self._start_anew(record)
        seen = self._seen
        if seen is not None and self._serial < seen.serial:
            return self._add(seen, state)
        self._seen = _Seen(self._serial, state, self.throttle)
        return state

    def write(self, state: State, throttle: Throttle | None = None) -> None:
        """Store the state; the lock must be held."""
        at = len(self._prefix)
        if throttle is not None and throttle != self.throttle:
            self._know(self._prefix[: -_THROTTLE.size] + _THROTTLE.pack(*throttle))
            at = 0
        self._serial += 1
        record = self._prefix + _sealed(self._serial, state, self._prefix_crc)
        try:
            os.pwrite(self._handle, record[at:], at)
        except OSError as error:
            raise named(error, "write", "state_file", self.path) from error
        self._seen = _Seen(self._serial, state, self.throttle)

    def still(self, epoch: int) -> bool:
        """Whether reservations of this epoch are still valid; without the lock.

        False may also mean that another process is writing; check again under the lock.
        """
        handle = self._handle
        if handle < 0 or epoch != self.throttle.epoch or not self._has_its_name():
            return False
        return os.pread(handle, len(self._prefix), 0) == self._prefix

    def reset(self) -> None:
        """Start again with an empty bucket: no pause, no penalties, the full rate, nothing granted.

        The lock must be held. Waiting callers reserve again.
        """
        self.write(arithmetic_of(self.rate).drained(self._clock_ns(), self.rate), _new_throttle())

    def close(self) -> None:
        """Close the file; the next `lock` opens it again."""
        with self._mutex:
            self._close()

    def _after_fork(self) -> None:
        """Take a mutex and a handle of one's own, because a child shares its parent's flock."""
        self._mutex = threading.Lock()
        self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._close()

    def _flock(self, blocking: bool) -> bool:
        while True:
            if self._handle < 0 and not self._open("refuse", blocking):
                return False
            try:
                fcntl.flock(self._handle, _LOCK if blocking else _LOCK_NOW)
            except BlockingIOError:
                return False
            except OSError as error:
                raise named(error, "lock", "state_file", self.path) from error
            # The time before the check of the name: a file that is made after a deletion is empty
            # from a later time on, so it counts all calls that pass now.
            self.now_ns = self._clock_ns()
            if self._has_its_name():
                return True
            seen, throttle = self._seen, self.throttle
            state = self._state_in(os.pread(self._handle, _MOST_BYTES, 0))
            if state is None:
                state = arithmetic_of(self.rate).drained(self.now_ns, self.rate)
            elif seen is not None and self._serial < seen.serial:
                state, throttle = self._joined(seen, state), seen.throttle
            self._seen = _Seen(_ANY_SERIAL, state, throttle)
            self._close()
            _log.warning("state_file=%s was deleted or replaced; opening it again", self.path)

    def _has_its_name(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._opened

    def _state_in(self, record: bytes) -> State | None:
        """The state of a valid record of this boot; its rate, throttle and serial are adopted."""
        prefix = self._prefix
        if prefix and record.startswith(prefix) and _is_whole(record):
            unpacked = _unpacked(record[len(prefix) : -4], self.rate)
        else:
            found = _found_in(record)
            if found is None or found.clock_id != self._clock_id:
                return None
            if found.rate != self.rate:
                _log.warning("state_file=%s changed to %s", self.path, found.rate)
                self._follow(found.rate)
            self._know(record[: found.prefix_bytes])
            unpacked = found.serial, found.state
        if unpacked is None:
            return None
        serial, state = unpacked
        rate = self.rate
        latest_ns = max(arithmetic_of(rate).latest_ns(state, rate), self.throttle.paused_ns)
        if latest_ns > self.now_ns + FARTHEST_NS + rate.burst_ns:
            return None
        self._serial = serial
        return state

    def _follow(self, rate: Rate) -> None:
        """Use another rate; what passed at the earlier rate counts as a burst until now."""
        self.rate = rate
        if self._seen is not None:
            drained = arithmetic_of(rate).drained(self.now_ns, rate)
            self._seen = self._seen._replace(state=drained)

    def _know(self, prefix: bytes) -> None:
        self._prefix, self._prefix_crc = prefix, zlib.crc32(prefix)
        self.throttle = Throttle(*_THROTTLE.unpack(prefix[-_THROTTLE.size :]))

    def _record(self, state: State) -> bytes:
        """A new record with this object's rate, new throttle and a new serial number."""
        rate = self.rate
        weights = json.dumps(rate.weights).encode() if rate.weights else b""
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._clock_id,
            float(rate.per_minute),
            rate.burst,
            float(rate.min_interval_s),
            len(weights),
        )
        self._know(header + weights + _THROTTLE.pack(*_new_throttle()))
        self._serial = max(self._serial + 1, self._clock_ns())
        return self._prefix + _sealed(self._serial, state, self._prefix_crc)

    def _open(self, on_config_change: OnConfigChange, blocking: bool = True) -> bool:
        """Open the file; False if another process is creating it and `blocking` is false."""
        made = self.path.with_name(f".{self.path.name}.made")
        guard = self.path.with_name(f"{self.path.name}.lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_own(guard, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise named(error, "open", "state_file", guard) from error
        try:
            with FileLock(guard, timeout=_OPEN_TIMEOUT_S if blocking else 0):
                self._handle = self._opened_or_made(made)
        except Timeout as error:
            if not blocking:
                return False
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"another process has held {guard} for {_OPEN_TIMEOUT_S:.0f} s; look for a "
                "stopped one (fuser names them)",
            ) from error
        except OSError as error:
            raise named(error, "open", "state_file", self.path) from error
        found = os.fstat(self._handle)
        self._opened = found.st_dev, found.st_ino
        if self._clock_id == WALL_CLOCK:
            self._refuse_wrong_clock()
        self._settle_rate(on_config_change)
        return True

    def _opened_or_made(self, made: Path) -> int:
        """A handle of the file, which is made if it is missing; `made` shows that it existed."""
        try:
            handle = open_own(self.path, os.O_RDWR)
        except FileNotFoundError:
            arithmetic, state = arithmetic_of(self.rate), None
            if made.exists():
                state = arithmetic.drained(self._clock_ns(), self.rate)
            make_complete(self.path, self._record(state or arithmetic.idle(self.rate)))
            handle = open_own(self.path, os.O_RDWR)
        try:
            if not made.exists():
                if os.pread(handle, len(_MAGIC), 0) not in (b"", _MAGIC):
                    raise FileExistsError(
                        errno.EEXIST, "it is no limiter's file; choose another path"
                    )
                os.close(open_own(made, os.O_RDWR | os.O_CREAT))
        except OSError:
            os.close(handle)
            raise
        return handle

    def _refuse_wrong_clock(self) -> None:
        """Compare this host's clock with the time that the folder's file system writes."""
        os.utime(self._handle)
        ahead_ns = self._clock_ns() - os.fstat(self._handle).st_mtime_ns
        if abs(ahead_ns) > MOST_SKEW_NS:
            self._close()
            raise RuntimeError(
                f"cannot share state_file={str(self.path)!r} with other hosts: this host's clock "
                f"is {ahead_ns / SECOND_NS:.1f} s ahead of the folder's; set the clock (NTP), or "
                "use mixed.rate_limit.backend=ray"
            )

    def _settle_rate(self, on_config_change: OnConfigChange) -> None:
        """Refuse or change a valid record with another rate. Reading needs no lock."""
        asked = self.rate
        theirs = self._found_of_this_boot()
        if theirs is None or theirs.rate == asked:
            return
        if on_config_change == "refuse":
            self._close()
            raise ValueError(
                f"cannot share state_file={str(self.path)!r}: it limits to {theirs.rate}, "
                f"asked for is {asked}; give every process the same limits, or change "
                'it for all with on_config_change="adopt"'
            )
        fcntl.flock(self._handle, _LOCK)
        try:
            theirs = self._found_of_this_boot()
            if theirs is None or theirs.rate == asked:
                return
            self._serial = theirs.serial
            # The other file may have passed a burst just now, so this bucket is empty until that is
            # over.
            empty_ns = self._clock_ns() + max(0, theirs.rate.burst_ns - asked.burst_ns)
            state = arithmetic_of(asked).drained(empty_ns, asked, theirs.state.granted)
            os.ftruncate(self._handle, os.pwrite(self._handle, self._record(state), 0))
        except OSError as error:
            raise named(error, "write", "state_file", self.path) from error
        finally:
            fcntl.flock(self._handle, _UNLOCK)
        _log.warning("state_file=%s changed from %s to %s", self.path, theirs.rate, asked)

    def _found_of_this_boot(self) -> "Found | None":
        found = _found_in(os.pread(self._handle, _MOST_BYTES, 0))
        return found if found and found.clock_id == self._clock_id else None

    def _start_anew(self, record: bytes) -> State:
        found = _found_in(record)
        if found is not None and found.clock_id != self._clock_id:
            self._foreign_boots += 1
            if self._foreign_boots > _MOST_FOREIGN_BOOTS:
                raise RuntimeError(
                    f"cannot share state_file={str(self.path)!r}: another host, or a container "
                    "with another boot id, writes to it; a file limits the processes of one host, "
                    "so choose another path for each (tool_config.rate_limit_file), or one limit "
                    "for all (mixed.rate_limit.backend=ray)"
                )
            why = "is from another boot"
        else:
            why = "is not whole"
        _log.warning("state_file=%s %s; starting with an empty bucket", self.path, why)
        state = arithmetic_of(self.rate).drained(self._clock_ns(), self.rate)
        try:
            os.ftruncate(self._handle, os.pwrite(self._handle, self._record(state), 0))
        except OSError as error:
            raise named(error, "write", "state_file", self.path) from error
        return state

    def _add(self, seen: "_Seen", state: State) -> State:
        """Add what this process saw to a state that lacks it; waiting reservations become void."""
        _log.warning("state_file=%s has an earlier state; adding what is known", self.path)
        now_ns, arithmetic = self.now_ns, arithmetic_of(self.rate)
        joined = self._joined(seen, state)
        throttle = max(self.throttle, seen.throttle, key=lambda throttle: throttle.penalties)
        pause_ns = max(0, self.throttle.paused_ns - now_ns, seen.throttle.paused_ns - now_ns)
        before_pause = throttle._replace(paused_ns=0)
        joined, paused = arithmetic.penalise(joined, before_pause, now_ns, pause_ns, self.rate)
        self._serial = self._serial if seen.serial == _ANY_SERIAL else seen.serial
        epoch = secrets.randbits(62)
        self.write(joined, paused._replace(epoch=epoch, penalties=throttle.penalties))
        return joined

    def _joined(self, seen: "_Seen", state: State) -> State:
        """A state that allows no more than a record's and the one that this process saw."""
        arithmetic, old = arithmetic_of(self.rate), seen.state
        if type(old) is not type(state):
            old = arithmetic.drained(self.now_ns, self.rate, old.granted)
        return arithmetic.joined(state, old, self.now_ns, self.rate)


class _Seen(NamedTuple):
    """What a process remembers of the last record that it read or wrote."""

    serial: int
    state: State
    throttle: Throttle


def peek(path: Path) -> "Found":
    """The content of the file, read without its lock.

    Raises:
        OSError: no such file, or it cannot be read.
        ValueError: the file is not a limiter's state.
    """
    if stat.S_ISREG(path.stat().st_mode):
        for _ in range(_MOST_PEEKS):  # another process may be writing
            with path.open("rb") as file:
                found = _found_in(file.read(_MOST_BYTES))
            if found is not None:
                return found
    raise ValueError(
        f"cannot read state_file={str(path)!r}: it is no record of a limiter, or not whole; the "
        "next call of a process that uses it would begin anew"
    )


class Found(NamedTuple):
    """The content of a complete record, of any boot."""

    rate: Rate
    clock_id: bytes
    prefix_bytes: int
    throttle: Throttle
    serial: int
    state: State


def _found_in(record: bytes) -> Found | None:
    if len(record) < _HEADER.size + _THROTTLE.size or not _is_whole(record):
        return None
    header = _HEADER.unpack_from(record)
    magic, version, clock_id, per_minute, burst, min_interval_s, weights_bytes = header
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    throttle_at = _HEADER.size + weights_bytes
    try:
        rate = _rate_of(per_minute, burst, min_interval_s, record[_HEADER.size : throttle_at])
        throttle = Throttle(*_THROTTLE.unpack_from(record, throttle_at))
    except (ValueError, TypeError, RecursionError, struct.error):
        return None  # the checksum is right, but the limiter did not write it
    if (
        not SLOWEST_PACE <= throttle.pace <= FULL_PACE
        or not 0 <= throttle.penalties < _MOST_COUNTED
    ):
        return None
    prefix_bytes = throttle_at + _THROTTLE.size
    unpacked = _unpacked(record[prefix_bytes:-4], rate)
    return None if unpacked is None else Found(rate, clock_id, prefix_bytes, throttle, *unpacked)


@lru_cache(maxsize=16)
def _rate_of(per_minute: float, burst: int, min_interval_s: float, weights: bytes) -> Rate:
    return Rate(
        per_minute=per_minute,
        burst=burst,
        min_interval_s=min_interval_s,
        shares=dict(json.loads(weights)) if weights else None,
    )


def _is_whole(record: bytes) -> bool:
    return zlib.crc32(record) == _WHOLE


def _sealed(serial: int, state: State, prefix_crc: int) -> bytes:
    if isinstance(state, GcraState):
        payload = _GCRA.pack(serial, *state)
    else:
        own, *others = state
        payload = b"".join(
            n.to_bytes(_SHARED_BYTES, "little", signed=True) for n in (serial, *own, *others)
        )
    return payload + zlib.crc32(payload, prefix_crc).to_bytes(4, "little")


def _unpacked(payload: bytes, rate: Rate) -> tuple[int, State] | None:
    """The serial number and the state; None if the limiter did not write them."""
    if not rate.weights:
        if len(payload) != _GCRA.size:
            return None
        serial, *numbers = _GCRA.unpack(payload)
        state = GcraState(*numbers)
        is_sound = numbers[1] < rate.parts_per_ns
    else:
        sources = len(rate.weights)
        if len(payload) != _SHARED_BYTES * (1 + sources + len(SharedState._fields) - 1):
            return None
        serial, *numbers = (
            int.from_bytes(payload[at : at + _SHARED_BYTES], "little", signed=True)
            for at in range(0, len(payload), _SHARED_BYTES)
        )
        state = SharedState(tuple(numbers[:sources]), *numbers[sources:])
        is_sound = True
    is_sound = is_sound and min(numbers) >= 0 and state.granted < _MOST_COUNTED
    return (serial, state) if is_sound and 0 <= serial < _MOST_COUNTED else None


def arithmetic_of(rate: Rate) -> Any:
    """The module with the arithmetic for this rate: `shares` if it has weights, else `gcra`."""
    return shares if rate.weights else gcra


def _new_throttle() -> Throttle:
    return Throttle(epoch=secrets.randbits(62))


WALL_CLOCK = b"the wall clock.."
"""The `clock_id` of hosts that share a file, because each host has its own boot."""


def _boot_id() -> bytes:
    """Identity of the running boot; zeros if the system has none."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except OSError:
        return bytes(16)


_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _namespace_offset_ns() -> int:
    """The offset that a time namespace (time_namespaces(7)) adds to the clock of a container."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return 0
    for clock, seconds, nanoseconds in (line.split() for line in lines):
        if clock == "boottime":
            return int(seconds) * SECOND_NS + int(nanoseconds)
    return 0


_OFFSET_NS = _namespace_offset_ns()


def boottime_ns() -> int:
    """Nanoseconds since boot, with suspension; the same for all processes, and never set back."""
    return time.clock_gettime_ns(_BOOT_CLOCK) - _OFFSET_NS


def wall_clock() -> Callable[[], int]:
    """The time of the wall clock, which goes on as the boot clock: a later jump has no effect."""
    ahead_ns = time.time_ns() - boottime_ns()
    return lambda: boottime_ns() + ahead_ns


_open_files = after_fork(StateFile._after_fork)  # pyright: ignore[reportPrivateUsage]
