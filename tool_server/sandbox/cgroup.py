"""A cgroup for each run, where a cgroup v2 is delegated to this server.

There the kernel itself limits the memory and the processes of each run, with shared memory, page
tables and buffers. It is not required: elsewhere the usage monitor measures runs. See the kernel's
Documentation/admin-guide/cgroup-v2.rst, "Delegation", and systemd's CGROUP_DELEGATION.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.proc import descendants
from tool_server.sandbox.program import Limits

CONTROLLERS = ("memory", "pids")
HOW = "`systemd-run --user --scope -p Delegate=yes verl-mixed serve-tools ...` delegates one"
_DELEGATED = ("user.delegate", "trusted.delegate")  # attributes that systemd sets
_LOOKS = 3
_MOVE_ROUNDS = 10  # a process can fork while its cgroup is emptied


def find_delegated(proc: Path = Path("/proc/self")) -> Path:
    """Folder of this process's cgroup, if it is delegated and has only this process and its
    descendants.

    Changes nothing.

    Raises:
        SandboxUnavailable: it is not; the message says why.
    """
    mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    places = [words for words in mounts if words[words.index("-") + 1] == "cgroup2"]
    own = [
        line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")
    ]
    if not places or not own:
        raise SandboxUnavailable("no cgroup v2 is mounted")
    folder = Path(places[0][4]) / os.path.relpath(own[0], places[0][3])
    try:
        here = (folder / "cgroup.controllers").read_text().split()
        others = _others(folder)
    except OSError as error:
        raise SandboxUnavailable(
            f"the cgroup v2 of this process is not visible ({error})"
        ) from error
    if missing := [name for name in CONTROLLERS if name not in here]:
        raise SandboxUnavailable(f"the cgroup v2 {folder} lacks {' and '.join(missing)}")
    if not any(_attribute(folder, name) == b"1" for name in _DELEGATED):
        raise SandboxUnavailable(f"the cgroup {folder} is not delegated; {HOW}")
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        raise SandboxUnavailable(f"the cgroup {folder} belongs to another user; {HOW}")
    if others:
        raise SandboxUnavailable(
            f"the cgroup {folder} has {len(others)} further processes; {HOW} to the server alone"
        )
    return folder


def _others(folder: Path) -> set[int]:
    """Processes in a cgroup that are neither this process nor its descendants."""
    own_pid, looks = os.getpid(), list[set[int]]()
    # A process that starts or ends during a look can seem to be no descendant.
    for _ in range(_LOOKS):
        processes = {*map(int, (folder / "cgroup.procs").read_text().split())}
        looks.append(processes - {own_pid, *descendants(own_pid)})
    return set.intersection(*looks)


def how_limited() -> str:
    """In words, how the memory and the processes of programs are limited here."""
    try:
        return f"memory and processes of each program by a cgroup below {find_delegated()}"
    except SandboxUnavailable as error:
        return f"memory of a program measured five times a second ({error})"


def _attribute(folder: Path, name: str) -> bytes:
    with suppress(OSError):
        return os.getxattr(folder, name)
    return b""


class Leaf:
    """The cgroup of one run."""

    def __init__(self, folder: Path, procs: int, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self.procs = procs
        """Descriptor of `cgroup.procs`. A process enters the cgroup by writing "0" to it; the
        kernel asks for the rights of the process that opened it, since Linux 5.16."""

    def excess(self) -> str:
        """The limit for which the kernel killed a process of the run; empty if none.

        Raises:
            SandboxUnavailable: the kernel killed one although the run kept its limit.
        """
        counts = dict(map(str.split, (self._folder / "memory.events").read_text().splitlines()))
        if not int(counts["oom_kill"]):
            return ""
        # `oom` counts failures at this cgroup's own limit. `oom_kill` counts killed processes, also
        # those that the kernel killed because the memory of the host was full.
        if not int(counts["oom"]):
            raise SandboxUnavailable(
                "the kernel killed a program because the host, or a cgroup above the server's, ran "
                "out of memory: the program's end says nothing; give the server more memory, or "
                "fewer sandbox_workers"
            )
        return f"its memory limit of {self._limits.memory_mb} MB"


class Cgroups:
    """Cgroups of runs below a delegated one, whose processes move to a cgroup of their own."""

    def __init__(self, delegated: Path) -> None:
        """Raises SandboxUnavailable: the kernel refuses."""
        self._folder = delegated
        self._numbers = itertools.count()
        self._not_removed: list[Path] = []
        server = delegated / "server"
        controllers = " ".join(f"+{name}" for name in CONTROLLERS)
        try:
            server.mkdir(exist_ok=True)
            # Only a cgroup without processes can share its controllers out to those below it.
            for _ in range(_MOVE_ROUNDS):
                for pid in (delegated / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        (server / "cgroup.procs").write_text(pid)
            (delegated / "cgroup.subtree_control").write_text(controllers)
        except OSError as error:
            raise SandboxUnavailable(f"no cgroups below {delegated}: {error}") from error

    @contextmanager
    def leaf(self, limits: Limits) -> Iterator[Leaf]:
        """A new cgroup with these limits, removed at the end, when its processes are dead.

        Raises:
            SandboxUnavailable: the kernel refuses.
        """
        folder = self._folder / f"run-{os.getpid()}-{next(self._numbers)}"
        try:
            folder.mkdir()
        except OSError as error:
            raise SandboxUnavailable(f"no cgroup for a program: {error}") from error
        try:
            procs = _set_up(folder, limits)
            try:
                yield Leaf(folder, procs, limits)
            finally:
                os.close(procs)
        finally:
            self._not_removed.append(folder)
            self.remove_ended()

    def remove_ended(self) -> None:
        """Remove the cgroups of runs that have ended.

        If a zygote was killed with its runs, processes may still be dying. Their cgroups are
        removed at a later call, because waiting here would stop the event loop.
        """
        self._not_removed = [folder for folder in self._not_removed if not _is_removed(folder)]


def _set_up(folder: Path, limits: Limits) -> int:
    """Set the limits of a run's cgroup; returns a descriptor of its `cgroup.procs`."""
    settings = {
        "memory.max": limits.memory_mb << 20,
        "memory.swap.max": 0,
        "memory.oom.group": 1,
        "pids.max": limits.processes,
    }
    try:
        for name, value in settings.items():
            if name != "memory.swap.max" or (folder / name).exists():  # not if there is no swap
                (folder / name).write_text(str(value))
        return os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"no cgroup for a program: {error}") from error


def _is_removed(folder: Path) -> bool:
    """Remove a cgroup, or else kill the processes in it; returns whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        with suppress(OSError):
            (folder / "cgroup.kill").write_text("1")  # since Linux 5.14
        return False
    return True
