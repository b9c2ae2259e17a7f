"""The limiter's shared state: one small checksummed record in a file, changed under `flock`.

Record, little endian: header (magic, boot id, the rate, version, CRC-32), then body (`Arrivals`,
CRC-32). The header never changes while the rate does not, so the hot path compares its bytes and
unpacks the body alone.

What can happen to the file, and what follows:

- holder killed: the kernel lets go of its flock; the record is whole or its checksum says no.
- record cut short or overwritten: the next reader starts anew with the burst used up, so the rate
  holds; one warning is logged. Reservations that still wait are void and made again (`epoch`).
- file deleted: those who have it open notice, make it again and bring their state along. A process
  that first comes after the deletion, before any of them calls, knows nothing of it.
- host rebooted: the clock began again; the state starts idle.
- another rate in the file: an error that names both. Whether a run still uses it, only people know.

A file is made under `filelock`, complete before it gets its name; the hot path pays only for flock.
The lock reaches the processes of one host (and of several only on a file system whose flock does).
"""

import fcntl
import logging
import os
import secrets
import struct
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any
from uuid import UUID

from filelock import FileLock

from rate_limit.gcra import Arrivals, Rate, drained, idle

_log = logging.getLogger(__name__)

_MAGIC = b"mix-rate"
_VERSION = 1
_HEADER = struct.Struct("<8s16sdQdH")
_BODY = struct.Struct("<qqqq")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size
_RECORD_BYTES = _HEADER_BYTES + _BODY.size + _CRC.size
_OPEN_TIMEOUT_S = 10.0


class StateFile:
    """The record at `path`; one reader and writer at a time over all processes and threads.

    Args:
        path: the file; made with its folder where missing.
        rate: the limits that every sharer must have.

    Raises:
        ValueError: the file belongs to another rate.
        OSError: it cannot be made, opened or written.
    """

    def __init__(self, path: str | os.PathLike[str], rate: Rate):
        self.path = Path(path).absolute()
        self._rate = rate
        self._header_values = (
            _MAGIC,
            _boot_id(),
            float(rate.per_minute),
            rate.burst,
            float(rate.min_interval_s),
            _VERSION,
        )
        self._header = _sealed(_HEADER.pack(*self._header_values))
        self._handle = -1
        self._carried: Arrivals | None = None
        self._mutex = threading.Lock()  # flock does not tell threads apart
        _open_files.add(self)
        self._open()

    def lock(self, *, blocking: bool) -> bool:
        """Take the lock, for microseconds; `unlock` must follow.

        Returns:
            False when somebody else has it and `blocking` is false.
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
        """Let go of the lock."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def read(self, now_ns: int) -> Arrivals:
        """The state; the lock must be held. A record that is not whole is replaced first.

        Raises:
            ValueError: the record belongs to another rate.
        """
        record = os.pread(self._handle, _RECORD_BYTES, 0)
        arrivals = self._arrivals_in(record) or self._restart(record, now_ns)
        return arrivals if self._carried is None else self._merge(arrivals, now_ns)

    def write(self, arrivals: Arrivals) -> None:
        """Store the state; the lock must be held."""
        os.pwrite(self._handle, _sealed(_BODY.pack(*arrivals)), _HEADER_BYTES)

    def close(self) -> None:
        """Close the file; the next `lock` opens it again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def _flock(self, blocking: bool) -> bool:
        mode = fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            if self._handle < 0:
                self._open()
            try:
                fcntl.flock(self._handle, mode)
            except BlockingIOError:
                return False
            if os.fstat(self._handle).st_nlink:
                return True
            record = os.pread(self._handle, _RECORD_BYTES, 0)  # deleted: bring its state along
            self._carried = self._arrivals_in(record)
            self.close()
            _log.warning("state_file=%s was deleted; making it again", self.path)

    def _arrivals_in(self, record: bytes) -> Arrivals | None:
        """The state in a whole record of this rate and boot; else None."""
        if not record.startswith(self._header):
            return None
        body = _unsealed(_BODY, record[_HEADER_BYTES:])
        return None if body is None else Arrivals(*body)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=_OPEN_TIMEOUT_S):
            if not self.path.exists():
                draft = self.path.with_name(f"{self.path.name}.tmp")
                draft.write_bytes(self._header + _sealed(_BODY.pack(*idle(_new_epoch()))))
                os.replace(draft, self.path)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def _restart(self, record: bytes, now_ns: int) -> Arrivals:
        found = _unsealed(_HEADER, record[:_HEADER_BYTES])
        arrivals = drained(now_ns, self._rate, _new_epoch())
        if found is None or found[0] != _MAGIC or found[1:] == self._header_values[1:]:
            _log.warning("state_file=%s is not whole; starting with the burst used up", self.path)
        elif found[1] != self._header_values[1]:
            _log.warning("state_file=%s is from another boot; starting idle", self.path)
            arrivals = idle(_new_epoch())
        else:
            theirs, ours = (
                f"per_minute={per_minute} burst={burst} min_interval_s={interval_s} "
                f"(record version {version})"
                for _, _, per_minute, burst, interval_s, version in (found, self._header_values)
            )
            raise ValueError(
                f"cannot share state_file={str(self.path)!r}: it limits to {theirs}, asked for is "
                f"{ours}; give every process the same limits, or delete the file if no run is "
                "using it"
            )
        os.pwrite(self._handle, self._header + _sealed(_BODY.pack(*arrivals)), 0)
        os.ftruncate(self._handle, _RECORD_BYTES)
        return arrivals

    def _merge(self, arrivals: Arrivals, now_ns: int) -> Arrivals:
        """Add what passed under the deleted file; reservations there are void."""
        carried, self._carried = self._carried, None
        assert carried is not None
        limit = drained(now_ns, self._rate, arrivals.epoch)
        floor_ns = carried.paused_ns + self._rate.burst_tolerance_ns if carried.paused_ns else 0
        merged = Arrivals(
            max(arrivals.tat_ns, min(carried.tat_ns, limit.tat_ns), floor_ns),
            max(arrivals.spaced_ns, min(carried.spaced_ns, limit.spaced_ns)),
            max(arrivals.paused_ns, carried.paused_ns),
            arrivals.epoch,
        )
        if merged != arrivals:
            merged = merged._replace(epoch=_new_epoch())
            self.write(merged)
        return merged


def _sealed(payload: bytes) -> bytes:
    return payload + _CRC.pack(zlib.crc32(payload))


def _unsealed(layout: struct.Struct, sealed: bytes) -> tuple[Any, ...] | None:
    """The values; None when they are not whole."""
    payload, crc = sealed[: layout.size], sealed[layout.size :]
    return layout.unpack(payload) if crc == _CRC.pack(zlib.crc32(payload)) else None


def _new_epoch() -> int:
    return secrets.randbits(62)


def _boot_id() -> bytes:
    """Identity of the running boot; zeros where the system has none to tell."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except OSError:
        return bytes(16)


_open_files: weakref.WeakSet[StateFile] = weakref.WeakSet()


def _reopen_after_fork() -> None:
    """A forked child shares its parent's flock: it needs files, and mutexes, of its own."""
    for file in list(_open_files):
        file._mutex = threading.Lock()  # pyright: ignore[reportPrivateUsage]
        file.close()


os.register_at_fork(after_in_child=_reopen_after_fork)
