"""Locks of folders, writes that survive a power cut, errors of files. Standard library only."""

import errno
import fcntl
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class BrokenFile(OSError):
    """A file has not the content that it should have; the message says where and what to do."""


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Name a file in the errors of the block that name none, as those of a write or a lock."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def claimed(folder: Path) -> Generator[bool]:
    """Lock an existing folder for the time of the block; yields whether this process has the lock.

    It has no lock if another process holds the folder, or removed or renamed the folder meanwhile.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            with naming(folder):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(handle), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        yield is_ours
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Write a file, or the new and renamed entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush(file: IO[Any]) -> None:
    """Write the content of an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, blocks: Iterable[bytes]) -> None:
    """Replace a file at once: readers see the old file or the new one, never a part.

    A link stays; the file that it leads to is replaced.

    Raises:
        OSError: it cannot be written, or is a folder, a device or a pipe; the old file stays, and
            no draft is left.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    draft = path.with_name(path.name + ".tmp")
    try:
        with naming(path), draft.open("wb") as file:
            file.writelines(blocks)
            flush(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
