"""Monitor of limits that the kernel does not keep for a run: memory, sockets, threads, host files.

It also measures how much of its time a run waited for a processor.

It measures a run about five times a second, in threads, because a program can make these looks
slow. A run that ends within 0.1 s is not measured and costs nothing.
"""

import asyncio
import math
import os
import random
import select
import signal
import stat
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from tool_server.isolation.proc import (
    descendants,
    living_place,
    memory_bytes,
    resident_bytes,
    stat_fields,
    unless_ended,
)
from tool_server.sandbox.program import Limits

EVERY_S = (0.1, 0.3)
"""Shortest and longest time between two looks. A random time, because otherwise a program could
sleep between the looks, and appear to wait for a processor at each of them."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

MAX_MAPPINGS = 65_536
"""Mappings of all processes together; each takes memory of the kernel, and time of each look. A
Python process with pandas has about 700."""

THREADS = "threads"
"""Ends the reason of a run that is killed for its threads."""

KILL_ROUNDS, KILL_S = 10, 0.5
"""How often the processes that a cell left are looked for, and killed; and how long each may take
to die. A session in which some are still left is ended."""

HALT_S, HALT_ROUND_S = 1.0, 0.003
"""Time in which all processes of a run must have stopped, and time between two signals to one that
runs."""

QUIET_ROUNDS = 5
"""Looks in a row that must find the same processes, all stopped: one that ends during a look may
have handed its memory on to a child that is not in the kernel's list yet."""

MANY_FORKS, FORK_S = 100, 0.0001
"""A program that ignores SIGCHLD is not charged for the processor time of its children. It is taken
for such a one if it started many processes, and those that ended had less time than a fork takes.
Then all of its real time counts, also in which it may have waited for a processor."""

MAX_HIDDEN = 4
"""Deleted files that a program may keep mapped; each can take `file_mb` of the host's disk."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What the monitor has seen of a run so far."""

    cpu_s: float = 0.0
    """Processor time of all its processes together, so that a run cannot starve itself."""

    rest_s: float = 0.0
    """Time before looks at which no thread had, or waited for, a processor."""

    forks: int = 0
    """Processes that were started in the run's pid namespace; 0 if it has none."""

    ticks: Mapping[int, int] = field(default_factory=dict)
    """pid -> clock ticks of processor time at the last look at the process, also if it has ended:
    a parent that ignores SIGCHLD is not charged for its children."""

    @property
    def own_s(self) -> float:
        """Time of the run without the time in which it waited for a processor."""
        return self.cpu_s + self.rest_s

    def after(self, pids: Sequence[int], seconds: float) -> "Activity":
        """The activity after one more look at these processes, `seconds` after the last one."""
        ticks, states, charged, ended = dict(self.ticks), set[bytes](), 0, 0
        for pid in pids:
            with suppress(OSError):
                # state, utime, stime, and both times of ended children (proc_pid_stat(5))
                fields = stat_fields(f"/proc/{pid}/stat")
                ticks[pid] = sum(map(int, fields[11:13]))
                charged += sum(map(int, fields[11:15]))
                ended += sum(map(int, fields[13:15]))
                states.add(fields[0])
                tasks = os.listdir(f"/proc/{pid}/task")
                states |= {stat_fields(f"/proc/{pid}/task/{task}/stat")[0] for task in tasks[1:]}
        # The first sum lacks processes that no look has seen, the second those that nobody reaped.
        cpu_s = max(self.cpu_s, TICK_S * sum(ticks.values()), TICK_S * charged)
        # A look that comes late says that this server waited for a processor too. Time beyond the
        # planned interval is then not known to be rest, and processor time in it was no rest.
        rest_s = max(0.0, min(seconds, EVERY_S[1]) - (cpu_s - self.cpu_s))
        newest = namespace_pids(pids[-1]) if pids else []
        forks = max(self.forks, newest[-1] if len(newest) > 1 else 0)
        hides_children = forks > MANY_FORKS and TICK_S * ended < FORK_S * forks
        if b"R" in states and not hides_children:
            rest_s = 0.0
        return Activity(cpu_s, self.rest_s + rest_s, forks, ticks)


class UsageMonitor:
    """Calls `end` with the reason when a run exceeds its limits.

    Args:
        ancestor: pid of the zygote, or of a process from which the zygote descends.
        home: the run's folder on the host; empty if its files are on a tmpfs of the run.
        threads: where it looks; a look can take as long as the program wants.
    """

    def __init__(
        self,
        ancestor: int,
        home: str,
        limits: Limits,
        end: Callable[[str], None],
        threads: Executor,
    ) -> None:
        self._ancestor, self._home, self._limits, self._end = ancestor, home, limits, end
        self._threads = threads
        self._pid = 0
        self.activity = Activity()
        self.cpu_limit_s = math.inf
        """Largest `Activity.cpu_s`. A session sets it for the time between two cells."""

        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Future[Activity] | None = None
        self._watch: asyncio.Task[None] | None = None

    def begin(self, status: bytes) -> None:
        """Start measuring, at the first call; `status` starts with the pid of the run's first
        process as the zygote sees it."""
        if self._timer is None:
            self._inner_pid, self._seen_at = int(status.split()[0]), time.monotonic()
            self._wait()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            random.uniform(*EVERY_S), self._start_watch
        )

    def _start_watch(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._check())

    async def measure(self) -> Activity:
        """The activity until now. If the run's processes are not found, it seems to be at rest."""
        if self._timer is not None:
            if self._look is None or self._look.done():
                loop = asyncio.get_running_loop()
                self._look = loop.run_in_executor(self._threads, self._activity_now)
            self.activity = await asyncio.shield(self._look)
        return self.activity

    def _activity_now(self) -> Activity:
        pids = self._pids()
        before_at, self._seen_at = self._seen_at, time.monotonic()
        return self.activity.after(pids, self._seen_at - before_at)

    async def _check(self) -> None:
        try:
            activity = await self.measure()
            why = await asyncio.get_running_loop().run_in_executor(self._threads, self._excess)
            if activity.cpu_s > self.cpu_limit_s:
                why = "the processor time that it used between two cells"
        except PermissionError:
            why = "hiding its memory and files from their limits"
        except Exception as error:  # otherwise the run would go on without limits
            why = f"a look at it that failed: {error!r}"
        if why:
            self._end(why)
        else:
            self._wait()

    async def end_others(self) -> bool:
        """Kill the processes of a session's run but the first two: its parent and its interpreter.

        Returns whether none was left at the last look.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._end_others)

    def _end_others(self) -> bool:
        for _ in range(KILL_ROUNDS):
            with ExitStack() as opened:
                others = dict[int, int]()  # pid: pidfd
                for pid in self._pids()[2:]:
                    with suppress(OSError):
                        others[pid] = os.pidfd_open(pid)
                        opened.callback(os.close, others[pid])
                # A number that is still below the run is not another process's by now.
                killed = [others[pid] for pid in self._pids()[2:] if pid in others]
                killed = [pidfd for pidfd in killed if not _has_ended(pidfd, 0.0)]
                if not killed:
                    return True
                for pidfd in killed:
                    with suppress(OSError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                for pidfd in killed:
                    _has_ended(pidfd, KILL_S)
        return False

    def _pids(self) -> list[int]:
        """The run's processes, its first process first; empty if it is not found."""
        self._pid = self._pid or self._outer_pid()
        return [self._pid, *descendants(self._pid)] if self._pid else []

    def _excess(self) -> str:
        """The limit that the run exceeds; empty if none.

        Raises:
            PermissionError: the run hides.
        """
        limits, pid = self._limits, self._pid
        if pid and mappings_of(pid) > MAX_MAPPINGS:
            return f"its limit of {MAX_MAPPINGS} memory mappings"
        if pid and _exceeds(pid, limits.memory_mb << 20):
            return f"its memory limit of {limits.memory_mb} MB"
        if not self._home:
            if pid and sockets_of(pid) > limits.open_files:
                return f"its limit of {limits.open_files} sockets"
            return ""
        program = next(descendants(pid), 0)
        if threads_of(program) > limits.processes:
            return f"its limit of {limits.processes} {THREADS}"
        held = held_bytes(program)
        if not fits(self._home, limits, held) or hidden_files(program, self._home) > MAX_HIDDEN:
            return f"its limit of {limits.file_mb} MB in {limits.files} files"
        return ""

    def _outer_pid(self) -> int:
        """Pid of the run's first process in this process's namespace; 0 if it is not found."""
        for pid in descendants(self._ancestor):
            pids = namespace_pids(pid)
            # In a namespace of its own, a run has three pids: the server's, the zygote's, and 1.
            if pids[-2:] == [self._inner_pid, 1] or pids == [self._inner_pid]:
                return pid
        return 0


def namespace_pids(pid: int) -> list[int]:
    """Numbers of a process in this process's pid namespace and those below, the outermost first;
    empty if it has ended."""
    # Bytes, because the name of a process, which stands there as well, need not be text.
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def _has_ended(pidfd: int, wait_s: float) -> bool:
    """Whether a process has ended; also one whose parent has not asked for its exit code."""
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _exceeds(pid: int, limit: int) -> bool:
    """Whether a process and its descendants have more bytes of memory than `limit`.

    A process may hand its memory on to a child and end before it is looked at. If what ended or
    began meanwhile might be above the limit, all are halted and looked at again. Programs can
    notice that, so it is not done at each look.

    Raises:
        PermissionError: the processes do not stay halted.
    """
    before = {each: resident_bytes(each) for each in descendants(pid)}
    size = memory_bytes(pid)
    after = {each: resident_bytes(each) for each in descendants(pid)}
    known, changed = {**after, **before}, before.keys() ^ after.keys()
    # and what has ended, but is not reaped yet
    changed |= {each for each in before if before[each] < after.get(each, 0.0) == math.inf}
    if size > limit or size + sum(known[each] for each in changed) <= limit:
        return size > limit
    return _halted_bytes(pid) > limit


def _halted_bytes(pid: int) -> int:
    """As `memory_bytes`, while all descendants are stopped.

    Raises:
        PermissionError: they do not stay stopped, because they wake each other.
    """
    stopped = dict[int, int]()  # pid: pidfd
    until, quiet_rounds, before, size = time.monotonic() + HALT_S, 0, list[int](), 0
    with ExitStack() as at_end:
        while time.monotonic() < until:
            present = [*descendants(pid)]
            moving = _moving(present, stopped)
            quiet_rounds = 0 if moving or present != before else quiet_rounds + 1
            before = present
            if quiet_rounds > QUIET_ROUNDS:
                return size
            if quiet_rounds == QUIET_ROUNDS:
                size = memory_bytes(pid)  # good if the next look finds the same
            new = dict[int, int]()
            for each in moving:
                if each not in stopped:
                    with suppress(OSError):
                        new[each] = os.pidfd_open(each)
                        at_end.callback(os.close, new[each])
            # A number that is still below the run is not another process's by now.
            for each in {*moving} & {*descendants(pid)}:
                if each in new:
                    stopped[each] = new[each]
                    at_end.callback(_send, stopped[each], signal.SIGCONT)
                if each in stopped:
                    _send(stopped[each], signal.SIGSTOP)
            time.sleep(HALT_ROUND_S)
        raise PermissionError("processes that wake each other")


def _moving(pids: Sequence[int], stopped: Container[int]) -> list[int]:
    """Those of these processes that run, or will as soon as they are woken."""
    moving = list[int]()
    for each in pids:
        with suppress(OSError):
            state = stat_fields(f"/proc/{each}/stat")[0]
            if state not in b"TtZX" and (state != b"D" or each not in stopped):
                moving.append(each)
    return moving


def _send(pidfd: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def mappings_of(pid: int) -> int:
    """Memory mappings of a process and its descendants, counted up to `MAX_MAPPINGS` and some."""
    count = 0
    for place in map(living_place, (pid, *descendants(pid))):
        with unless_ended(place), open(f"{place}/maps", "rb", buffering=0) as file:
            while count <= MAX_MAPPINGS and (text := file.read(1 << 16)):
                count += text.count(b"\n")
    return count


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
    held, place, folder = set[bytes](), living_place(pid), os.fsencode(home)
    with unless_ended(place), open(f"{place}/maps", "rb") as file:
        for line in file:
            if line.endswith(b"(deleted)\n") and folder in line:
                held.add(line.split()[4])
    return len(held)


def held_bytes(pid: int) -> int:
    """Size of deleted files that a process has open, without its standard streams."""
    size, place = 0, living_place(pid)
    with unless_ended(place):
        for fd in os.listdir(f"{place}/fd"):
            with suppress(OSError):
                status = os.stat(f"{place}/fd/{fd}")
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
