"""Isolation by namespaces: zygotes run in bubblewrap, and each run has its own namespaces.

A zygote sees the interpreter and its libraries read-only, and neither the network nor the server's
environment. Each run adds fresh pid, mount, network, ipc and uts namespaces, one small tmpfs, a
user without capabilities, and a seccomp filter. When the first process of the pid namespace ends,
the kernel kills everything that the program started. See bwrap(1), namespaces(7).

Two points are weaker than they could be. Runs share the host's devices, so that two programs that
run at the same time can exchange bits by record locks on /dev/null. And without a cgroup, memory of
processes that live for a few milliseconds is not always counted.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from agent_loop.tools.sandbox.host import ENVIRONMENT, package_paths, program, readable_paths
from agent_loop.tools.sandbox.program import Limits, SandboxUnavailable
from agent_loop.tools.sandbox.sandbox import Sandbox
from agent_loop.tools.sandbox.seccomp import build_filter
from agent_loop.tools.sandbox.zygote import Launch

UIDS = range(1000, 1512)
"""Users of programs inside the sandbox if root serves. The kernel limits processes by user and does
not limit root, so each run at the same time has its own user."""

_LINUX_WITH_OWN_COUNTS = (5, 14)
"""Since this version the kernel counts processes by user and user namespace. If an ordinary user
serves, all programs have this user, so each gets a user namespace of its own."""

_HOST_UID = 61_936
"""User of the host to which the first of these users is mapped; no account has this number."""

# Without /dev/zero, because a shared mapping of it is memory that no limit counts.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")

_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
_RUN_PROCESSES = 1
"""The first process of a run, which starts and watches the program."""

# Creates a user namespace, writes "1", and keeps the namespace until its input ends.
_HOLD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
os.write(1, b"1")
os.read(0, 1)
"""


class BubblewrapSandbox(Sandbox):
    """Sandbox with Linux namespaces, created by bubblewrap."""

    name = "bubblewrap"
    has_processes = True

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        bwrap = program("bwrap")
        require_own_counts()
        self._filter = build_filter(processes=True)
        paths = package_paths(packages)
        readable = readable_paths(paths)
        # A run's own /tmp is mounted over the host's, so packages below /tmp would disappear.
        self._has_tmp = not any(path.startswith("/tmp/") for path in readable)
        self._paths = paths
        self._argv = [
            bwrap,
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            "--clearenv",
            *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *binds(readable),
            *("--tmpfs", "/dev", "--dir", "/dev/shm", "--dir", "/box", "--dir", "/tmp"),
            # No ptys, because a run would see those of another run.
            *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
            # bwrap's root and /dev are tmpfs without a size limit, so they become read-only.
            *("--remount-ro", "/", "--remount-ro", "/dev"),
            *(word for name in _CAPABILITIES for word in ("--cap-add", name)),
        ]

    def launch(self, open_fds: ExitStack) -> Launch:
        is_root = os.geteuid() == 0
        users = user_namespace(open_fds) if is_root else None
        return Launch(
            plan=self.plan(
                self._paths,
                namespaces=True,
                filter=self._filter.hex(),
                uids=list(UIDS) if is_root else [],
                own_user_namespace=not is_root,
                tmp=self._has_tmp,
                read_only=list(_DEVICES),
            ),
            prefix=[
                *self._argv,
                *(["--unshare-user"] if users is None else ["--userns", str(users)]),
                "--",
            ],
            pass_fds=[] if users is None else [users],
        )

    def processes(self, limits: Limits) -> int:
        return _RUN_PROCESSES + limits.processes


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


def binds(paths: list[str]) -> list[str]:
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
