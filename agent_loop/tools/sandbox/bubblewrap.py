"""Isolation by namespaces: zygotes in bubblewrap, and for each run namespaces of its own.

A zygote sees the interpreter and its libraries read-only, no network, no environment of ours. Each
run gets fresh pid, mount, network, ipc and uts namespaces on top, one small tmpfs, a user without
any capability, and a seccomp filter. The pid namespace dies with its first process, and with it
whatever the program started. See bwrap(1), namespaces(7).
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from agent_loop.tools.sandbox.host import (
    ENVIRONMENT,
    package_paths,
    program,
    readable_paths,
)
from agent_loop.tools.sandbox.program import Limits, SandboxUnavailable
from agent_loop.tools.sandbox.sandbox import Sandbox
from agent_loop.tools.sandbox.seccomp import build_filter
from agent_loop.tools.sandbox.zygote import Launch, Zygote

_UIDS = range(1000, 1064)
"""Whose programs are, inside, where root serves: the kernel counts processes by user, and no
root's."""

_HOST_UID = 61_936
"""Who the first of them is outside: nobody."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
_RUN_PROCESSES = 1
"""The one that sees a run through."""

_ZYGOTE_PROCESSES = 8
"""Its own, bubblewrap's and a spare's, which count too where they are the same user's."""

# Makes a user namespace, says so, and holds it until its input ends.
_HOLD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
os.write(1, b"1")
os.read(0, 1)
"""


class BubblewrapSandbox(Sandbox):
    """Programs in namespaces of their own."""

    name = "bubblewrap"
    has_processes = True

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        bwrap = program("bwrap")
        self._filter = build_filter(processes=True)
        paths = package_paths(packages)
        self._has_tmp = not any(
            path.startswith("/tmp/")
            for path in readable_paths(paths)  # they would be hidden
        )
        self._folders = list(dict.fromkeys(str(path.parent) for path in paths))
        self._argv = [
            bwrap,
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            "--clearenv",
            *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *_binds(readable_paths(paths)),
            *("--tmpfs", "/dev", "--dir", "/dev/shm", "--dir", "/box", "--dir", "/tmp"),
            # No ptys: one run would see those of another.
            *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
            # bwrap's own root and /dev are tmpfs too, without a size limit.
            *("--remount-ro", "/", "--remount-ro", "/dev"),
            *(word for name in _CAPABILITIES for word in ("--cap-add", name)),
        ]

    def launch(self, open_fds: ExitStack) -> Launch:
        is_root = os.geteuid() == 0
        users = user_namespace(open_fds) if is_root else None
        return Launch(
            plan={
                "namespaces": True,
                "landlock": False,
                "filter": self._filter.hex(),
                "uid": None,
                "uids": list(_UIDS) if is_root else [],
                "tmp": self._has_tmp,
                "packages": self._folders,
                "preload": self.preload(),
            },
            prefix=[
                *self._argv,
                *(["--unshare-user"] if users is None else ["--userns", str(users)]),
                "--",
            ],
            pass_fds=[] if users is None else [users],
        )

    def processes(self, zygote: Zygote, limits: Limits) -> int:
        if os.geteuid() == 0:  # a user of its own for each run
            return _RUN_PROCESSES + limits.processes
        return _ZYGOTE_PROCESSES + (zygote.active + 1) * (_RUN_PROCESSES + limits.processes)


def user_namespace(open_fds: ExitStack) -> int:
    """A new user namespace with root and one user more; only root can make one.

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
            words = holder.stderr.read().decode(errors="replace").strip()
            raise SandboxUnavailable(f"no user namespace ({words})")
        proc = Path(f"/proc/{holder.pid}")
        try:
            for what in ("uid", "gid"):
                (proc / f"{what}_map").write_text(
                    f"0 0 1\n{_UIDS.start} {_HOST_UID} {len(_UIDS)}\n"
                )
            users = os.open(proc / "ns" / "user", os.O_RDONLY)
        except OSError as error:
            raise SandboxUnavailable(f"no user namespace with two users ({error})") from error
        open_fds.callback(os.close, users)
        return users


def _binds(paths: list[str]) -> list[str]:
    """Read-only binds, and the links into /usr that most distributions have in the root."""
    argv = []
    for link in ("/bin", "/lib", "/lib64"):
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            argv += ["--ro-bind", link, link]
    above = {str(folder): None for path in paths for folder in reversed(Path(path).parents)}
    for folder in list(above)[1:]:  # all but the root; a private home's would stay private
        argv += ["--perms", "0755", "--dir", folder]
    for path in paths:
        argv += ["--ro-bind", path, path]
    return argv
