"""Folders that one process holds, and files that are on the disk before anything that comes after.

Standard library only.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def claimed(folder: Path) -> Generator[bool]:
    """Hold a folder while the block lasts; yields whether it is ours.

    It is not where another process holds it, or removed or renamed it as we came.

    Args:
        folder: one that is there.
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
    """Make a file, or a folder's new and renamed names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush(file: IO[Any]) -> None:
    """Make what was written to an open file survive a power cut."""
    file.flush()
    os.fsync(file.fileno())
