"""Sandboxes of agent programs: bubblewrap's line, and what is hidden of the folders that they see.

See bwrap(1), namespaces(7). `inside` runs in it before the program.
"""

import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tool_server.isolation.bubblewrap import UIDS, line, require_own_counts, user_namespace
from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import interpreter, memory_file
from tool_server.isolation.seccomp import build_filter

INSIDE = str(Path(__file__).with_name("inside.py"))

FOLDER, HOME, ROW = "/tmp/session", "/tmp/home", "/row.json"
"""Of a program in a sandbox, which can write to /tmp and /dev/shm alone."""

FILES_MB = 512
"""Largest size of /tmp of one sandbox, and of /dev/shm. Files there take the host's memory."""

_SYSTEM = (
    *("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/localtime", "/etc/mime.types"),
)
"""Of /etc only what programs need; what names users or machines is written anew."""

_ETC = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nagent:x:{uid}:{uid}::" + HOME + ":/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:{uid}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

ENVIRONMENT = {
    **{"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh"},
    **{"MIXED_SESSION_DIR": FOLDER, "MIXED_ROW_FILE": ROW},
}
"""Variables that replace those of the worker."""


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is the folder or below it, whatever links lead there."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _masks(shown: Mapping[str, str], hidden: Sequence[str]) -> list[str]:
    """Options of bwrap that put something empty over what is hidden of the shown folders.

    Args:
        shown: each with the folder that it leads to.
    """
    masked, argv = list[str](), list[str]()
    for path in sorted({os.path.realpath(each) for each in hidden}):  # a folder before its files
        if not os.path.exists(path) or any(path.startswith(f"{folder}/") for folder in masked):
            continue
        masked.append(path)
        for folder, there in shown.items():
            if not path.startswith(f"{there}/"):
                continue
            at = folder + path.removeprefix(there)
            if os.path.isdir(path):
                argv += ["--tmpfs", at, "--remount-ro", at]
            else:
                argv += ["--ro-bind", os.devnull, at]
    return argv


class AgentSandbox:
    """Sandboxes with the same readable files and limits.

    Args:
        hidden: files and folders that are empty in it, also where a readable folder has them.

    Raises:
        SandboxUnavailable: there is no bwrap, or the kernel refuses what it needs.
    """

    def __init__(
        self, readable: Sequence[str], hidden: Sequence[str], memory_mb: int, processes: int
    ) -> None:
        require_own_counts()
        self._memory_bytes, self._processes = memory_mb << 20, processes
        self._filter = build_filter(processes=True, agent=True)
        open_fds = ExitStack()
        weakref.finalize(self, open_fds.close)
        self._users = user_namespace(open_fds) if os.geteuid() == 0 else None
        # The kernel counts processes by user and does not limit root. So if the worker is root, the
        # sandboxes that run at the same time have different users.
        self._uids = deque(UIDS)
        interpreters = (sys.prefix, sys.base_prefix, interpreter(), INSIDE)
        paths = [path for path in (*_SYSTEM, *interpreters, *readable) if os.path.exists(path)]
        temporary = tempfile.gettempdir()  # with the folders of other sessions
        if not any(lies_in(path, temporary) for path in paths):
            hidden = [*hidden, temporary]
        self._shown = {path: os.path.realpath(path) for path in paths}
        self._hidden = hidden
        self._tmpfs = ("--size", str(FILES_MB << 20), "--perms", "1777", "--tmpfs")
        self._line = [
            *line([*self._shown], before=[*self._tmpfs, "/tmp"]),
            *("--die-with-parent", "--new-session", "--unshare-cgroup-try"),
        ]

    def command(
        self,
        open_fds: ExitStack,
        row: bytes,
        port: int,
        cwd: str | None,
        control: int,
        command: Sequence[str],
    ) -> tuple[list[str], list[int]]:
        """What runs a command in a sandbox, and the descriptors that it needs, `control` included.

        What it holds is free again when `open_fds` closes.
        """
        uid, fds = UIDS.start, [control]
        masks = _masks(self._shown, self._hidden)  # anew: checkpoints are made in the run
        options = [*masks, "--proc", "/proc", "--dev", "/dev", *self._tmpfs, "/dev/shm"]

        def data(content: bytes) -> str:
            fds.append(memory_file(open_fds, content))
            return str(fds[-1])

        if self._users is None:
            options += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
        else:
            if not self._uids:
                raise SandboxUnavailable(
                    f"{len(UIDS)} sessions run at once: there is no further user for a sandbox; "
                    "use more agent loop workers"
                )
            uid = self._uids.popleft()
            open_fds.callback(self._uids.append, uid)
            fds.append(self._users)
            # `inside` takes the user, and loses these by it
            options += ["--userns", str(self._users), "--cap-add", "CAP_SETUID"]
            options += ["--cap-add", "CAP_SETGID"]
        for path, text in _ETC.items():
            options += ["--perms", "0444", "--file", data(text.format(uid=uid).encode()), path]
        options += ["--perms", "0444", "--file", data(row), ROW]
        # The root and /dev are tmpfs without a limit.
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", data(self._filter)]
        numbers = (port, uid if self._users is not None else 0, self._memory_bytes, self._processes)
        inside = [interpreter(), "-I", "-S", INSIDE, str(control), FOLDER, cwd or FOLDER]
        return [*self._line, *options, *inside, *map(str, numbers), *command], fds
