"""The file of `FileSlots`: it is created completely, opened safely, and its bytes are locked."""

import errno
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from rate_limit.forks import after_fork
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
            cause = _CAUSES.get(error.errno or 0, error.strerror)
            raise OSError(error.errno, f"cannot open slots_file={path}: {cause}") from error
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

    def in_use(self) -> int:
        """Slots that are held by all processes."""
        return len(self.held) + self._locks.count(0, self._slots)

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


_CAUSES = {
    errno.ELOOP: "it is a symbolic link in a folder that anyone may write to; use another folder",
    errno.EACCES: "this user may not write there; use a folder of its own",
    errno.EPERM: "it belongs to another user; use a file of this user's own",
    errno.EROFS: "the file system is read-only; use another folder",
    errno.ENOSPC: "the disk is full; make room or use another folder",
    errno.EDQUOT: "the disk quota is used up; make room or use another folder",
    errno.ENOLCK: "the file system has no locks; use a folder on a local disk",
}


def _open(path: Path, content: bytes) -> int:
    """A handle of the file; a new file is written completely before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    anyones = os.stat(path.parent).st_mode & stat.S_IWOTH
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if anyones else 0)
    while True:
        try:
            handle = os.open(path, flags)
        except FileNotFoundError:
            if path.is_symlink():  # a link without a target
                raise
            _make(path, content)
            continue
        if os.fstat(handle).st_uid != os.geteuid():
            os.close(handle)
            raise OSError(errno.EPERM, "another user's file")
        return handle


def _make(path: Path, content: bytes) -> None:
    prefix = f"{path.name}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, buffering=0) as draft:
        draft.write(content)
        with suppress(FileExistsError):  # another process created it
            os.link(draft.name, path)


# Closing frees no slot, because the parent has the same open file.
_all_files = after_fork(SlotFile.close)
