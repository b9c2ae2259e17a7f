"""The limiter's shared state: one small checksummed record in a file, changed under `flock`.

The record, little endian: header (magic, version, the clock's identity, the rate and its weights),
terms (`Terms`), arrivals (`Arrivals`, or `Spread` if the rate has weights), CRC-32 of all. Header
and terms change rarely, so `pass_now` reads only the arrivals.

- The process with the lock is killed: the kernel frees the lock; the record is complete, or its
  checksum is wrong.
- The record is damaged, or the host has rebooted: the next reader starts with an empty bucket, so
  the rate is kept. Waiting reservations become void and are made again (`epoch`).
- The file is deleted or replaced: processes that have it open notice this within `CHECK_NS` and add
  their state to the new file. A file that replaces a deleted one lets no call pass before that;
  `<path>.made` shows whether a missing file was deleted or never existed.

A new file is complete before it gets its name.
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
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

from filelock import FileLock, Timeout

from rate_limit import gcra, shares
from rate_limit.forks import after_fork
from rate_limit.gcra import (
    FULL_PACE,
    SECOND_NS,
    SLOWEST_PACE,
    YEAR_NS,
    Arrivals,
    Rate,
    Terms,
)
from rate_limit.shares import Spread

_log = logging.getLogger(__name__)

Counts: TypeAlias = "array[int]"
OnConfigChange = Literal["refuse", "adopt"]
State = Arrivals | Spread
"""The state that every call changes; a `Spread` if the rate has weights."""

_MAGIC = b"mix-rate"
_VERSION = 3
_HEADER = struct.Struct("<8sH16sdQdH")  # the last is the length of the weights as JSON
_TERMS = struct.Struct("<qqqqqqq")
_ARRIVALS = struct.Struct("<qqqq")
_SEALED = struct.Struct("<qqqqI")
_SPREAD_BYTES = 16  # bytes of each number
_MOST_BYTES = 4096
_MOST_COUNTED = 2**62
_OPEN_TIMEOUT_S = 30.0
_MOST_FOREIGN_BOOTS = 2
_MOST_PEEKS = 100

CHECK_NS = SECOND_NS // 100
"""Time on the limiter's clock after which the file's name is checked again."""

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
        OSError: the file cannot be created, opened, locked or written; or it is unsafe (a link in a
            folder that others may write to, or another user's file).
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
        self.terms: Terms = Terms()
        """The terms of the last read record."""

        self._clock_ns = clock_ns
        self._clock_id = _boot_id() if clock_id is None else clock_id
        self._foreign_boots = 0
        self._handle = -1
        self._name_is_known_until_ns = 0
        self._prefix = b""  # header and terms of the last read record
        self._prefix_crc = 0
        self._may_pass_now = False  # the prefix is known, with the full rate and without weights
        self._moved_from: tuple[State, Terms] | None = None
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

        Afterwards `rate` and `terms` are those of the record.

        Raises:
            RuntimeError: another host writes to the file.
        """
        record = os.pread(self._handle, _MOST_BYTES, 0)
        state = self._state_in(record)
        if state is None:
            state = self._start_anew(record)
        return state if self._moved_from is None else self._merge_deleted(state)

    def write(self, state: State, terms: Terms | None = None) -> None:
        """Store the state; the lock must be held."""
        at = len(self._prefix)
        if terms is not None and terms != self.terms:
            self._know(self._prefix[: -_TERMS.size] + _TERMS.pack(*terms))
            at = 0
        record = self._prefix + _sealed(state, self._prefix_crc)
        with self._named_errors("write"):
            os.pwrite(self._handle, record[at:], at)

    def still(self, epoch: int) -> bool:
        """Whether reservations of this epoch are still valid; without the lock.

        False may also mean that another process is writing; check again under the lock.
        """
        handle = self._handle
        if handle < 0 or epoch != self.terms.epoch or not self._has_its_name():
            return False
        return os.pread(handle, len(self._prefix), 0) == self._prefix

    def pass_now(self, blocking: bool, count: tuple[Counts, int]) -> bool:
        """Let one call pass if it may pass now and nothing unusual happened; the common case.

        It is `lock`, `read`, `gcra.reserve` and `write` in few steps. Only the arrivals are read.
        Their checksum covers header and terms too, so it is wrong if another process changed them.

        Args:
            blocking: whether to wait for the lock.
            count: (counts, at): the call is added to counts[at].

        Returns:
            False, and nothing is taken, if `lock`, `read` and `write` are needed.
        """
        if not self._mutex.acquire(blocking):
            return False
        try:
            handle, at = self._handle, len(self._prefix)
            if handle < 0 or not self._may_pass_now:
                return False
            try:
                fcntl.flock(handle, _LOCK if blocking else _LOCK_NOW)
            except OSError:
                return False
            try:
                record, now_ns = os.pread(handle, _SEALED.size, at), self._clock_ns()
                if len(record) != _SEALED.size or now_ns > self._name_is_known_until_ns:
                    return False
                tat_ns, tat_parts, spaced_ns, granted, crc = _SEALED.unpack(record)
                if crc != zlib.crc32(record[:-4], self._prefix_crc):
                    return False
                rate, parts = self.rate, self.rate.parts_per_ns
                now = now_ns * parts
                tat = max(now, tat_ns * parts + tat_parts) + rate.interval_parts
                if spaced_ns > now_ns or tat - now > rate.burst * rate.interval_parts:
                    return False
                spaced_ns = now_ns + rate.min_interval_ns
                record = _ARRIVALS.pack(tat // parts, tat % parts, spaced_ns, granted + 1)
                crc = zlib.crc32(record, self._prefix_crc)
                os.pwrite(handle, record + crc.to_bytes(4, "little"), at)
                counts, place = count
                counts[place] += 1
                return True
            finally:
                fcntl.flock(handle, _UNLOCK)
        finally:
            self._mutex.release()

    def reset(self) -> None:
        """Start again with an empty bucket: no pause, no penalties, the full rate, nothing granted.

        The lock must be held. Waiting callers reserve again.
        """
        self.write(arithmetic_of(self.rate).drained(self._clock_ns(), self.rate), _new_terms())

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
                with self._named_errors("lock"):
                    fcntl.flock(self._handle, _LOCK if blocking else _LOCK_NOW)
            except BlockingIOError:
                return False
            now_ns = self._clock_ns()
            if now_ns <= self._name_is_known_until_ns:
                return True
            if self._has_its_name():
                self._name_is_known_until_ns = now_ns + CHECK_NS
                return True
            state = self._state_in(os.pread(self._handle, _MOST_BYTES, 0))
            if state is not None:
                self._moved_from = state, self.terms
            self._close()
            _log.warning("state_file=%s was deleted or replaced; opening it again", self.path)

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def _state_in(self, record: bytes) -> State | None:
        """The state of a valid record of this boot; its rate and terms are adopted."""
        found = _found_in(record)
        if found is None or found.clock_id != self._clock_id:
            return None
        prefix = record[: found.prefix_bytes]
        if prefix != self._prefix:
            if found.rate != self.rate:
                _log.warning("state_file=%s changed to %s", self.path, _words(found.rate))
                self.rate = found.rate
            self._know(prefix)
        latest_ns = self._clock_ns() + FARTHEST_NS + self.rate.burst_ns
        farthest_ns = arithmetic_of(self.rate).latest_ns(found.state, self.rate)
        return found.state if max(farthest_ns, self.terms.paused_ns) <= latest_ns else None

    def _know(self, prefix: bytes) -> None:
        self._prefix, self._prefix_crc = prefix, zlib.crc32(prefix)
        self.terms = Terms(*_TERMS.unpack(prefix[-_TERMS.size :]))
        self._may_pass_now = self.terms.pace == FULL_PACE and not self.rate.weights

    def _record(self, state: State) -> bytes:
        """A new record with this object's rate and new terms."""
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
        self._know(header + weights + _TERMS.pack(*_new_terms()))
        return self._prefix + _sealed(state, self._prefix_crc)

    def _open(self, on_config_change: OnConfigChange, blocking: bool = True) -> bool:
        """Open the file; False if another process is creating it and `blocking` is false."""
        made = self.path.with_name(f"{self.path.name}.made")
        with self._named_errors("open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            guard = self.path.with_name(f"{self.path.name}.lock")
            for place in (self.path, made, guard):
                self._refuse_unsafe(place)
            try:
                with FileLock(guard, timeout=_OPEN_TIMEOUT_S if blocking else 0):
                    if not self.path.exists():
                        arithmetic = arithmetic_of(self.rate)
                        state = arithmetic.idle(self.rate)
                        if made.exists():  # others may use the deleted file for CHECK_NS
                            empty_ns = self._clock_ns() + 2 * CHECK_NS
                            state = arithmetic.drained(empty_ns, self.rate)
                        self._make(state)
                        made.touch(mode=0o600)
                    if not made.exists():
                        self._refuse_another_kind()
                    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW * self._is_public()
                    self._handle = os.open(self.path, flags)
                    self._name_is_known_until_ns = 0
            except Timeout as error:
                if not blocking:
                    return False
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another process has held {guard} for {_OPEN_TIMEOUT_S:.0f} s; look for a "
                    "stopped one (fuser names them)",
                ) from error
        self._settle_rate(on_config_change)
        return True

    def _refuse_another_kind(self) -> None:
        """Refuse to overwrite a file that is not a limiter's state."""
        with self.path.open("rb") as file:
            begins = file.read(len(_MAGIC))
        if begins and begins != _MAGIC:
            raise FileExistsError(
                errno.EEXIST, f"{self.path} is no limiter's file; choose another path"
            )

    def _make(self, state: State) -> None:
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        draft.unlink(missing_ok=True)
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, self._record(state))
                os.fsync(handle)  # allocates the block: later writes are a third faster
            finally:
                os.close(handle)
            os.replace(draft, self.path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _settle_rate(self, on_config_change: OnConfigChange) -> None:
        """Refuse or change a valid record with another rate. Reading needs no lock.

        Raises:
            ValueError: the rate differs, and `on_config_change` is "refuse".
        """
        asked = self.rate
        theirs = self._found_of_this_boot()
        if theirs is None or theirs.rate == asked:
            return
        if on_config_change == "refuse":
            self._close()
            raise ValueError(
                f"cannot share state_file={str(self.path)!r}: it limits to {_words(theirs.rate)}, "
                f"asked for is {_words(asked)}; give every process the same limits, or change "
                'it for all with on_config_change="adopt"'
            )
        with self._named_errors("lock"):
            fcntl.flock(self._handle, _LOCK)
        try:
            theirs = self._found_of_this_boot()
            if theirs is None or theirs.rate == asked:
                return
            # The other file may have passed a burst just now, so this bucket is empty until that is
            # over.
            empty_ns = self._clock_ns() + max(0, theirs.rate.burst_ns - asked.burst_ns)
            state = arithmetic_of(asked).drained(empty_ns, asked, theirs.state.granted)
            with self._named_errors("write"):
                os.ftruncate(self._handle, os.pwrite(self._handle, self._record(state), 0))
        finally:
            fcntl.flock(self._handle, _UNLOCK)
        _log.warning(
            "state_file=%s changed from %s to %s", self.path, _words(theirs.rate), _words(asked)
        )

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
        whole = self._record(state)
        with self._named_errors("write"):
            os.pwrite(self._handle, whole, 0)
            os.ftruncate(self._handle, len(whole))
        return state

    def _merge_deleted(self, state: State) -> State:
        """Add the state of a deleted file to the new one; its reservations become void."""
        assert self._moved_from is not None
        old, old_terms = self._moved_from
        self._moved_from = None
        now_ns = self._clock_ns()
        arithmetic = arithmetic_of(self.rate)
        if type(old) is not type(state):
            old = arithmetic.drained(now_ns, self.rate, old.granted)
        joined = arithmetic.joined(state, old, now_ns, self.rate)
        terms = self.terms._replace(penalties=max(self.terms.penalties, old_terms.penalties) - 1)
        pause_ns = max(0, old_terms.paused_ns - now_ns)
        joined, terms = arithmetic.penalise(joined, terms, now_ns, pause_ns, self.rate)
        self.write(joined, terms._replace(epoch=secrets.randbits(62)))
        return joined

    def _is_public(self) -> bool:
        """Whether other users may put files into the folder."""
        return bool(os.stat(self.path.parent).st_mode & stat.S_IWOTH)

    def _refuse_unsafe(self, path: Path) -> None:
        """Refuse a file that another user may have put there."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(found.st_mode):
            if self._is_public():
                raise OSError(
                    errno.ELOOP,
                    f"{path} is a symbolic link in a folder that every user may write to; choose a "
                    "folder of your own",
                )
            found = os.stat(path)
        if found.st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM,
                f"{path} belongs to uid={found.st_uid}, this process runs as uid={os.geteuid()}; "
                "choose another path, or run both as one user",
            )

    @contextmanager
    def _named_errors(self, verb: str) -> Generator[None]:
        """Add the file's name and a remedy to errors of the system."""
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise type(error)(
                error.errno,
                f"cannot {verb} state_file={str(self.path)!r}: {error.strerror or error}{remedy}",
            ) from error


_REMEDIES = {
    errno.EROFS: "; choose a folder that can be written to (tool_config.rate_limit_file)",
    errno.EACCES: "; choose a folder of your own (tool_config.rate_limit_file)",
    errno.ENOSPC: "; make room, or choose a path on another disk (tool_config.rate_limit_file)",
    errno.ENOLCK: "; this file system has no locks, choose a local one "
    "(tool_config.rate_limit_file)",
}


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
    terms: Terms
    state: State


def _found_in(record: bytes) -> Found | None:
    if len(record) < _HEADER.size + _TERMS.size or not _is_whole(record):
        return None
    header = _HEADER.unpack_from(record)
    magic, version, clock_id, per_minute, burst, min_interval_s, weights_bytes = header
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    terms_at = _HEADER.size + weights_bytes
    try:
        rate = _rate_of(per_minute, burst, min_interval_s, record[_HEADER.size : terms_at])
        terms = Terms(*_TERMS.unpack_from(record, terms_at))
    except (ValueError, TypeError, RecursionError, struct.error):
        return None  # the checksum is right, but the limiter did not write it
    if not SLOWEST_PACE <= terms.pace <= FULL_PACE or not 0 <= terms.penalties < _MOST_COUNTED:
        return None
    prefix_bytes = terms_at + _TERMS.size
    state = _unpacked(record[prefix_bytes:-4], rate)
    return None if state is None else Found(rate, clock_id, prefix_bytes, terms, state)


@lru_cache(maxsize=16)
def _rate_of(per_minute: float, burst: int, min_interval_s: float, weights: bytes) -> Rate:
    return Rate(
        per_minute=per_minute,
        burst=burst,
        min_interval_s=min_interval_s,
        shares=dict(json.loads(weights)) if weights else None,
    )


def _is_whole(record: bytes) -> bool:
    return zlib.crc32(record[:-4]).to_bytes(4, "little") == record[-4:]


def _sealed(state: State, prefix_crc: int) -> bytes:
    if isinstance(state, Arrivals):
        payload = _ARRIVALS.pack(*state)
    else:
        own, *others = state
        payload = b"".join(
            n.to_bytes(_SPREAD_BYTES, "little", signed=True) for n in (*own, *others)
        )
    return payload + zlib.crc32(payload, prefix_crc).to_bytes(4, "little")


def _unpacked(payload: bytes, rate: Rate) -> State | None:
    if not rate.weights:
        if len(payload) != _ARRIVALS.size:
            return None
        arrivals = Arrivals(*_ARRIVALS.unpack(payload))
        is_sound = min(arrivals) >= 0 and arrivals.tat_parts < rate.parts_per_ns
        return arrivals if is_sound and arrivals.granted < _MOST_COUNTED else None
    sources = len(rate.weights)
    if len(payload) != _SPREAD_BYTES * (sources + len(Spread._fields) - 1):
        return None
    numbers = [
        int.from_bytes(payload[at : at + _SPREAD_BYTES], "little", signed=True)
        for at in range(0, len(payload), _SPREAD_BYTES)
    ]
    spread = Spread(tuple(numbers[:sources]), *numbers[sources:])
    return spread if min(numbers) >= 0 and spread.granted < _MOST_COUNTED else None


def arithmetic_of(rate: Rate) -> Any:
    """The module with the arithmetic for this rate: `shares` if it has weights, else `gcra`."""
    return shares if rate.weights else gcra


def _new_terms() -> Terms:
    return Terms(epoch=secrets.randbits(62))


def _words(rate: Rate) -> str:
    return (
        f"per_minute={float(rate.per_minute)} burst={rate.burst} "
        f"min_interval_s={float(rate.min_interval_s)}"
        + (f" shares={dict(rate.weights)}" if rate.weights else "")
    )


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
    """The offset that a time namespace adds to the boot clock; without it, containers of a host
    agree.

    Source: time_namespaces(7), /proc/self/timens_offsets.
    """
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


_open_files = after_fork(StateFile._after_fork)  # pyright: ignore[reportPrivateUsage]
