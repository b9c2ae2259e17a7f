"""Parts of a line of bubblewrap: its users, what it binds, and what it asks of the kernel.

The sandbox of the tool server and that of agent programs are built of these. See bwrap(1),
namespaces(7).
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import program

UIDS = range(1000, 1512)
"""Users of programs inside the sandbox if root serves. The kernel limits processes by user and does
not limit root, so each run at the same time has its own user."""

_LINUX_WITH_OWN_COUNTS = (5, 14)
"""Since this version the kernel counts processes by user and user namespace. If an ordinary user
serves, all programs have this user, so each gets a user namespace of its own."""

_HOST_UID = 61_936
"""User of the host to which the first of these users is mapped; no account has this number."""

# Creates a user namespace, writes "1", and keeps the namespace until its input ends.
_HOLD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
os.write(1, b"1")
os.read(0, 1)
"""


def require_own_counts() -> None:
    """Raises SandboxUnavailable: the kernel cannot limit the processes of each program apart."""
    if os.geteuid() != 0 and _linux() < _LINUX_WITH_OWN_COUNTS:
        raise SandboxUnavailable(
            f"Linux {os.uname().release} counts the processes of all programs of this user "
            f"together; it needs {'.'.join(map(str, _LINUX_WITH_OWN_COUNTS))}, or root"
        )


def _linux() -> tuple[int, ...]:
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))


def user_namespace(open_fds: ExitStack) -> int:
    """A new user namespace with root and the users of programs; only root can create one.

    Returns its descriptor, closed with `open_fds`.

    Raises:
        SandboxUnavailable: the kernel refuses.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.read(1) != b"1":
            reason = holder.stderr.read().decode(errors="replace").strip()
            raise SandboxUnavailable(f"no user namespace ({reason})")
        proc = Path(f"/proc/{holder.pid}")
        try:
            for kind in ("uid", "gid"):
                (proc / f"{kind}_map").write_text(f"0 0 1\n{UIDS.start} {_HOST_UID} {len(UIDS)}\n")
            users = os.open(proc / "ns" / "user", os.O_RDONLY)
        except OSError as error:
            raise SandboxUnavailable(f"no user namespace with further users ({error})") from error
        open_fds.callback(os.close, users)
        return users


def line(readable: list[str], before: Sequence[str] = ()) -> list[str]:
    """bwrap with namespaces of processes, network, ipc and names, and these paths read-only.

    Args:
        before: options for what lies below the paths, such as a tmpfs that has some of them.

    Raises:
        SandboxUnavailable: there is no bwrap.
    """
    namespaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    return [program("bwrap"), *namespaces, *before, *_binds(readable)]


def _binds(paths: list[str]) -> list[str]:
    """Options of bwrap that bind paths read-only, and the links from the root into /usr."""
    argv = []
    for link in ("/bin", "/lib", "/lib64"):
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            argv += ["--ro-bind", link, link]
    above = {str(folder): None for path in paths for folder in reversed(Path(path).parents)}
    # All but the root are made readable, because a home folder is often private.
    for folder in list(above)[1:]:
        argv += ["--perms", "0755", "--dir", folder]
    for path in paths:
        argv += ["--ro-bind", path, path]
    return argv
