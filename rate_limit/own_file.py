"""Opens a shared file safely: a regular file of this user, and no other thing at its path."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_CAUSES = {
    errno.ELOOP: "it is a symbolic link in a folder that anyone may write to; use a folder of your "
    "own",
    errno.EACCES: "this user may not write there; use a folder of your own",
    errno.EROFS: "the file system is read-only; use a folder that can be written to",
    errno.ENOSPC: "the disk is full; make room or use another folder",
    errno.EDQUOT: "the disk quota is used up; make room or use another folder",
    errno.ENOLCK: "the file system has no locks; use a folder on a local disk",
    errno.EISDIR: "it is a folder; use another path",
    errno.ENXIO: "it is not a regular file (a socket or a device); use another path",
}


def open_own(path: Path, flags: int) -> int:
    """A handle of the file. It does not wait, not even for the other end of a FIFO.

    Raises:
        OSError: the path is a folder, FIFO, socket or device; another user's file; a symbolic link
            in a folder that anyone may write to; or it cannot be opened.
    """
    if os.stat(path.parent).st_mode & stat.S_IWOTH:
        flags |= os.O_NOFOLLOW
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except PermissionError:
        _refuse_others(os.stat(path))
        raise
    try:
        _refuse_others(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return handle


def _refuse_others(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a FIFO" if stat.S_ISFIFO(found.st_mode) else "not a regular file"
        raise OSError(errno.EINVAL, f"it is {kind}; use another path")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"it belongs to uid={found.st_uid}, this process runs as uid={os.geteuid()}; use "
            "another path, or run both as one user",
        )


def make_complete(path: Path, content: bytes) -> None:
    """Make the file, which has its whole content when it gets its name; keeps one that exists."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", buffering=0) as draft:
        draft.write(content)
        os.fsync(draft)  # allocates the block: later writes are a third faster
        with suppress(FileExistsError):  # another process made it
            os.link(draft.name, path)


def named(error: OSError, verb: str, kind: str, path: Path) -> OSError:
    """The same error with the file's name and, where it is known, the cause and the remedy."""
    cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
    return OSError(error.errno, f"cannot {verb} {kind}={str(path)!r}: {cause}")
