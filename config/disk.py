"""Locks of folders, writes that survive a power cut, errors of files, and reads of files that
somebody sent. Standard library only."""

import errno
import fcntl
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

MOST_TEXT, MOST_LINE = 1 << 24, 1 << 28
"""Bytes of a small file that is read whole, and of a line; a trajectory of a million tokens with
all their values has less."""


class BrokenFile(OSError):
    """A file has not the content that it should have; the message says where and what to do."""


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file, or one that a link leads to, for reading.

    Raises:
        OSError: there is none. A device may never end, and a pipe may never begin.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def plain_text(path: Path) -> str:
    """A small regular file, without spaces at its ends.

    Raises:
        OSError: as `open_plain`.
        BrokenFile: it has more than `MOST_TEXT` bytes.
    """
    with open_plain(path) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise BrokenFile(f"cannot read {path}: it has more than {MOST_TEXT >> 20} MiB; remove it")
    return content.decode().strip()


def plain_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, with their newlines, as they are asked for.

    Raises:
        OSError: as `open_plain`.
        BrokenFile: a line has more than `MOST_LINE` bytes.
    """
    with open_plain(path) as file:
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise BrokenFile(
                    f"cannot read {path}: a line has more than {MOST_LINE >> 20} MiB; remove it"
                )
            yield line


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
