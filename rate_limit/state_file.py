"""The limiter's state in a file that all processes of a host share: a small checksummed record.

Changed only under `flock`, held for microseconds. A record that cannot be right (cut short,
garbage, of another boot, far in the future) is taken for an idle limiter and said so once; a
record of another configuration is refused, because two limits on one file would keep neither.

It does not reach across hosts, and holds only where `flock` reaches every sharer.
"""

import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from rate_limit.gcra import NS_PER_S, Arrivals, Rate

logger = logging.getLogger(__name__)

_MAGIC = b"GCRAREC1"
_RECORD = struct.Struct("<8s16sddQqqq")
_CHECKSUM = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECKSUM.size

_HORIZON_NS = 30 * 24 * 3600 * NS_PER_S
"""No honest arrival time is further ahead."""


class RateLimitConfigError(ValueError):
    """The file belongs to a limiter of another configuration."""


def _boot_id() -> bytes:
    """Which boot the clock of the record counts from."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.replace("-", ""))


class StateFile:
    """One limiter's record; usable by many threads and across fork.

    Args:
        path: the file; its folder must exist. Made when missing.
        rate: the configuration it must carry.
    """

    def __init__(self, path: str | os.PathLike[str], rate: Rate) -> None:
        self.path, self.rate = Path(path), rate
        self._boot = _boot_id()
        self._threads = threading.Lock()
        self._descriptor = -1
        self._owner = -1
        self._open()

    def close(self) -> None:
        """Give the descriptor back; the file stays."""
        if self._descriptor >= 0 and self._owner == os.getpid():
            os.close(self._descriptor)
        self._descriptor = -1

    def update(
        self,
        change: Callable[[Arrivals], tuple[int, Arrivals | None]],
        now_ns: int,
        *,
        blocking: bool = True,
    ) -> int:
        """Change the record under the lock.

        Args:
            change: state -> (result, state to write or None for none); quick, and raises to leave
                the record as it was.
            now_ns: the clock, to judge the record by.
            blocking: False raises BlockingIOError at once when another holder has the lock.

        Returns:
            The first value of `change`.

        Raises:
            BlockingIOError: the lock is taken and `blocking` is False.
            RateLimitConfigError: the file carries another configuration.
            OSError: the file cannot be read, locked or written.
        """
        with self._threads, self._locked(blocking) as descriptor:
            result, after = change(self._read(descriptor, now_ns))
            if after is not None:
                self._write(descriptor, after)
            return result

    @contextmanager
    def _locked(self, blocking: bool) -> Iterator[int]:
        flags = fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            if self._owner != os.getpid():
                self._open()  # a descriptor shared over fork shares its lock too
            fcntl.flock(self._descriptor, flags)
            if self._is_current():
                break
            os.close(self._descriptor)
            self._open()
        try:
            yield self._descriptor
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _is_current(self) -> bool:
        """Whether the path still names the file that we hold."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)

    def _open(self) -> None:
        with FileLock(f"{self.path}.lock"):
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        self._owner = os.getpid()

    def _read(self, descriptor: int, now_ns: int) -> Arrivals:
        content = os.pread(descriptor, _SIZE + 1, 0)
        if not content:
            return Arrivals()
        record = self._decode(content)
        if record is None:
            return self._start_anew("it is not a whole record", now_ns)
        boot, per_second, min_interval_s, burst, *moments = record
        theirs = Rate(per_second, burst, min_interval_s)
        if theirs != self.rate:
            raise RateLimitConfigError(
                f"cannot use state_file={str(self.path)!r}: it carries {theirs}, asked for "
                f"{self.rate}; processes that share a limit need the same configuration: use "
                "another file, or delete this one when no run uses it"
            )
        if boot != self._boot:
            return self._start_anew("it is of another boot", now_ns)
        if max(moments) > now_ns + _HORIZON_NS:
            return self._start_anew("it lies far in the future", now_ns)
        return Arrivals(*moments)

    @staticmethod
    def _decode(content: bytes) -> tuple[bytes, float, float, int, int, int, int] | None:
        if len(content) != _SIZE:
            return None
        body, (checksum,) = content[: _RECORD.size], _CHECKSUM.unpack(content[_RECORD.size :])
        magic, *fields = _RECORD.unpack(body)
        return None if magic != _MAGIC or checksum != zlib.crc32(body) else tuple(fields)  # pyright: ignore[reportReturnType]

    def _write(self, descriptor: int, arrivals: Arrivals) -> None:
        rate = self.rate
        body = _RECORD.pack(
            _MAGIC,
            self._boot,
            rate.per_second,
            rate.min_interval_s,
            rate.burst,
            arrivals.tat_ns,
            arrivals.next_ns,
            arrivals.not_before_ns,
        )
        os.pwrite(descriptor, body + _CHECKSUM.pack(zlib.crc32(body)), 0)

    def _start_anew(self, why: str, now_ns: int) -> Arrivals:
        """An empty bucket: what passed before is unknown, so no burst is given."""
        logger.warning("state_file=%s started anew: %s", self.path, why)
        os.ftruncate(self._descriptor, 0)
        return Arrivals(tat_ns=now_ns + self.rate.burst_tolerance_ns)
