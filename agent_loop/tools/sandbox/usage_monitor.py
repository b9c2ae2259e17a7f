"""Monitor of limits that the kernel does not keep for a run: memory, sockets, threads, host files.

It also measures how much of its time a run waited for a processor.

It measures a run about five times a second. A run that ends within 0.1 s is not measured and costs
nothing.
"""

import asyncio
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from agent_loop.tools.sandbox.program import Limits

EVERY_S = (0.1, 0.3)
"""Shortest and longest time between two looks. A random time, because otherwise a program could
sleep between the looks, and appear to wait for a processor at each of them."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

MAX_HIDDEN = 4
"""Deleted files that a program may keep mapped; each can take `file_mb` of the host's disk."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What the monitor has seen of a run so far."""

    cpu_s: float = 0.0
    """Processor time of all its processes together, so that a run cannot starve itself."""

    rest_s: float = 0.0
    """Time before looks at which no thread had, or waited for, a processor."""

    ticks: Mapping[int, int] = field(default_factory=dict)
    """pid -> clock ticks of processor time at the last look at the process, also if it has ended:
    a parent that ignores SIGCHLD is not charged for its children."""

    @property
    def own_s(self) -> float:
        """Time of the run without the time in which it waited for a processor."""
        return self.cpu_s + self.rest_s

    def after(self, pids: Sequence[int], seconds: float) -> "Activity":
        """The activity after one more look at these processes, `seconds` after the last one."""
        ticks, states, charged = dict(self.ticks), set[bytes](), 0
        for pid in pids:
            with suppress(OSError):
                # state, utime, stime, and both times of ended children (proc_pid_stat(5))
                fields = _stat(f"/proc/{pid}/stat")
                ticks[pid] = sum(map(int, fields[11:13]))
                charged += sum(map(int, fields[11:15]))
                states.add(fields[0])
                tasks = os.listdir(f"/proc/{pid}/task")
                states |= {_stat(f"/proc/{pid}/task/{task}/stat")[0] for task in tasks[1:]}
        # The first sum lacks processes that no look has seen, the second those that nobody reaped.
        cpu_s = max(self.cpu_s, TICK_S * sum(ticks.values()), TICK_S * charged)
        # A look that comes late says that this server waited for a processor too. Time beyond the
        # planned interval is then not known to be rest, and processor time in it was no rest.
        rest_s = max(0.0, min(seconds, EVERY_S[1]) - (cpu_s - self.cpu_s))
        return Activity(cpu_s, self.rest_s + (0.0 if b"R" in states else rest_s), ticks)


def _stat(path: str) -> list[bytes]:
    """The fields of a process or thread after its name."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


class UsageMonitor:
    """Calls `end` with the reason when a run exceeds its limits.

    Args:
        ancestor: pid of the zygote, or of a process from which the zygote descends.
        home: the run's folder on the host; empty if its files are on a tmpfs of the run.
    """

    def __init__(
        self, ancestor: int, home: str, limits: Limits, end: Callable[[str], None]
    ) -> None:
        self._ancestor, self._home, self._limits, self._end = ancestor, home, limits, end
        self._pid = 0
        self.activity = Activity()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, status: bytes) -> None:
        """Start measuring, at the first call; `status` starts with the pid of the run's first
        process as the zygote sees it."""
        if self._timer is None:
            self._inner_pid, self._seen_at = int(status.split()[0]), time.monotonic()
            self._wait()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(random.uniform(*EVERY_S), self._look)

    def measure(self) -> Activity:
        """The activity until now. If the run's processes are not found, it seems to be at rest."""
        if self._timer is not None:
            self._pid = self._pid or self._outer_pid()
            pids = [self._pid, *descendants(self._pid)] if self._pid else []
            before_at, self._seen_at = self._seen_at, time.monotonic()
            self.activity = self.activity.after(pids, self._seen_at - before_at)
        return self.activity

    def _look(self) -> None:
        self.measure()
        if why := self._excess():
            self._end(why)
        else:
            self._wait()

    def _excess(self) -> str:
        """The limit that the run exceeds; empty if none."""
        limits, pid = self._limits, self._pid
        if pid and memory_bytes(pid) > limits.memory_mb << 20:
            return f"its memory limit of {limits.memory_mb} MB"
        if not self._home:
            if pid and sockets_of(pid) > limits.open_files:
                return f"its limit of {limits.open_files} sockets"
            return ""
        program = next(descendants(pid), 0)
        if threads_of(program) > limits.processes:
            return f"its limit of {limits.processes} threads"
        held = held_bytes(program)
        if not fits(self._home, limits, held) or hidden_files(program, self._home) > MAX_HIDDEN:
            return f"its limit of {limits.file_mb} MB in {limits.files} files"
        return ""

    def _outer_pid(self) -> int:
        """Pid of the run's first process in this process's namespace; 0 if it is not found."""
        for pid in descendants(self._ancestor):
            with suppress(OSError, StopIteration), open(f"/proc/{pid}/status") as file:
                line = next(line for line in file if line.startswith("NSpid:"))
                pids = [int(number) for number in line.split()[1:]]
                # In a namespace of its own, a run has three pids: the server's, the zygote's, and
                # 1.
                if pids[-2:] == [self._inner_pid, 1] or pids == [self._inner_pid]:
                    return pid
        return 0


def descendants(pid: int) -> Iterator[int]:
    """All descendants of a process, whichever of its threads started them."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                for child in children:
                    yield child
                    yield from descendants(child)


def memory_bytes(pid: int) -> int:
    """Memory of a process and its descendants; shared memory counts once."""
    return sum(map(_own_memory, (pid, *descendants(pid))))


def _own_memory(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def sockets_of(pid: int) -> int:
    """Sockets in the process's network namespace; their buffers are in no process's memory."""
    with suppress(OSError), open(f"/proc/{pid}/net/sockstat") as file:
        return int(file.readline().split()[2])
    return 0


def threads_of(pid: int) -> int:
    """Threads of a process; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def hidden_files(pid: int, home: str) -> int:
    """Number of deleted files below `home` that a process maps, so that they still use the disk."""
    held = set[str]()
    with suppress(OSError), open(f"/proc/{pid}/maps") as file:
        for line in file:
            if line.endswith("(deleted)\n") and home in line:
                held.add(line.split()[4])
    return len(held)


def held_bytes(pid: int) -> int:
    """Size of deleted files that a process has open, without its standard streams."""
    size = 0
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                if int(fd) > 2 and stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    size += status.st_blocks * 512
    return size


def fits(home: str, limits: Limits, size: int = 0) -> bool:
    """Whether a run's files in `home`, with `size` bytes elsewhere, are within its limits."""
    files = 0
    folders = [home]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if files > limits.files or size > limits.file_mb << 20:
                        return False
        except FileNotFoundError:
            continue
        except OSError:  # a path too long to be read
            return False
    return True


def remove(home: str) -> None:
    """Remove a run's folder, also if it is nested too deeply for Python."""
    try:
        shutil.rmtree(home)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # nested too deeply for Python
        subprocess.run(["rm", "-rf", home], check=False, capture_output=True)
