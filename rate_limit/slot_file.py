"""The file of `FileSlots`: it is created completely, opened safely, and its bytes are locked."""

import logging
import os
from pathlib import Path

from rate_limit.forks import after_fork
from rate_limit.own_file import make_complete, named, open_own
from rate_limit.queues import ByteLocks, ProcessQueue

_log = logging.getLogger(__name__)

_GATE = 1 << 39  # the byte that a process locks while it repairs the file


class SlotFile:
    """An open slots file, the slots that are held through it, and its queue.

    The owner must let only one thread at a time use it.
    """

    def __init__(self, path: Path, slots: int):
        self._slots = slots
        self._next = os.getpid() % slots  # the first byte to try, another one in each process
        self.held: set[int] = set()
        try:
            self._locks = ByteLocks(_open(path, _content(slots)))
            if self._locks.lock(_GATE):  # fails if the file system has no locks
                self._locks.unlock(_GATE)
        except OSError as error:
            raise named(error, "open", "slots_file", path) from error
        self.queue: ProcessQueue = ProcessQueue(self._locks)
        _all_files.add(self)
        if os.pread(self._locks.handle, 64, 0) != _content(slots):
            self._mend(path)

    def take(self, tries: int) -> int | None:
        """Take a slot if one of the next `tries` bytes is free; returns its byte."""
        for offset in range(tries):
            byte = (self._next + offset) % self._slots
            if byte in self.held:
                continue
            self.held.add(byte)  # before the lock, so that a signal handler does not take it too
            if self._locks.lock(byte):
                self._next = byte
                return byte
            self.held.discard(byte)
        self._next = (self._next + tries) % self._slots
        return None

    def free(self, byte: int) -> None:
        """Free a slot; in a forked child the parent keeps it."""
        self._locks.unlock(byte)
        self.held.discard(byte)
        self._next = byte

    def has_free(self) -> bool:
        """Whether a slot could be taken now."""
        return any(
            byte not in self.held and self._locks.other(byte, byte + 1) is None
            for byte in range(self._slots)
        )

    def is_at(self, path: Path) -> bool:
        """Whether the file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._locks.handle), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the handle without giving anything back: what a forked child does."""
        self._locks.close()

    def _mend(self, path: Path) -> None:
        """Rewrite a damaged number of slots in place, so that held slots stay held."""
        self._locks.wait_and_lock(_GATE)
        try:
            handle = self._locks.handle
            found, own = os.pread(handle, 64, 0), _content(self._slots)
            number = found.removeprefix(b"slots=").removesuffix(b"\n")
            if found == b"slots=" + number + b"\n" and number.isdigit():
                if found != own:
                    raise ValueError(
                        f"cannot share slots={self._slots} at {path}: the file is for "
                        f"slots={int(number)}; give every process the same number, or delete the "
                        "file if no run is using it"
                    )
                return
            _log.warning("slots_file=%s is not whole; writing slots=%d", path, self._slots)
            os.ftruncate(handle, os.pwrite(handle, own, 0))
        finally:
            self._locks.unlock(_GATE)


def _content(slots: int) -> bytes:
    return b"slots=%d\n" % slots


def _open(path: Path, content: bytes) -> int:
    """A handle of the file; a new file is written completely before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            return open_own(path, os.O_RDWR)
        except FileNotFoundError:
            if path.is_symlink():  # a link without a target
                raise
            make_complete(path, content)


# Closing frees no slot, because the parent has the same open file.
_all_files = after_fork(SlotFile.close)
