"""Folders that one process locks, and writes that survive a power cut. Standard library only."""

import fcntl
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def claimed(folder: Path) -> Generator[bool]:
    """Lock an existing folder for the time of the block; yields whether this process has the lock.

    It has no lock if another process holds the folder, or removed or renamed the folder meanwhile.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
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

    Raises:
        OSError: it cannot be written; the old file stays, and no draft is left.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.writelines(blocks)
            flush(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
