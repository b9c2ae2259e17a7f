"""Isolation by namespaces: zygotes run in bubblewrap, and each run has its own namespaces.

A zygote sees the interpreter and its libraries read-only, and neither the network nor the server's
environment. Each run adds fresh pid, mount, network, ipc and uts namespaces, one small tmpfs, a
user without capabilities, and a seccomp filter. When the first process of the pid namespace ends,
the kernel kills everything that the program started. See bwrap(1), namespaces(7).

Two points are weaker than they could be. Runs share the host's devices, so that two programs that
run at the same time can exchange bits by record locks on /dev/null. And memory of processes that
live for a few milliseconds is not always counted.
"""

import os
from contextlib import ExitStack

from tool_server.isolation.bubblewrap import UIDS, line, require_own_counts, user_namespace
from tool_server.isolation.host import ENVIRONMENT, package_paths, readable_paths
from tool_server.isolation.seccomp import build_filter
from tool_server.sandbox.program import Limits
from tool_server.sandbox.sandbox import Sandbox
from tool_server.sandbox.zygote import READABLE, Launch

# Without /dev/zero, because a shared mapping of it is memory that no limit counts.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")

_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
_RUN_PROCESSES = 1
"""The first process of a run, which starts and watches the program."""


class BubblewrapSandbox(Sandbox):
    """Sandbox with Linux namespaces, created by bubblewrap."""

    name = "bubblewrap"
    has_processes = True

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        require_own_counts()
        self._filter = build_filter(processes=True)
        paths = package_paths(packages)
        readable = readable_paths([*READABLE, *paths])
        # A run's own /tmp is mounted over the host's, so packages below /tmp would disappear.
        self._has_tmp = not any(path.startswith("/tmp/") for path in readable)
        self._paths = paths
        self._argv = [
            *line(readable),
            "--clearenv",
            *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
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
