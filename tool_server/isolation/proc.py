"""Processes as /proc shows them: who descends from whom, and what memory they have."""

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

KILL_ROUNDS = 1000
"""Looks at what descends from a process that is killed, a millisecond apart."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def stat_fields(path: str) -> list[bytes]:
    """The fields of a process or thread after its name."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def living_place(pid: int) -> str:
    """Folder in /proc of a thread that has not ended, of this process.

    If the first thread ends before the others, /proc/PID shows neither memory nor files.
    """
    with suppress(OSError):
        if stat_fields(f"/proc/{pid}/stat")[0] != b"Z":
            return f"/proc/{pid}"
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                if stat_fields(f"/proc/{pid}/task/{task}/stat")[0] != b"Z":
                    return f"/proc/{pid}/task/{task}"
    return f"/proc/{pid}"


@contextmanager
def unless_ended(place: str) -> Iterator[None]:
    """Ignore errors of reading about a process that ends.

    Raises:
        PermissionError: the process has not ended. It hides: it made itself not dumpable, or runs
            an executable file that its user may not read.
    """
    try:
        yield
    except PermissionError:
        # The files of a process that ends belong to root, as do those of one that hides. But one
        # that ends has no address space any more.
        if kilobytes(f"{place}/status", b"VmSize:"):
            raise
    except OSError:
        pass


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


def kill_family(pid: int) -> None:
    """Kill a process that adopts orphans (`guard.adopt_orphans`), and all its descendants."""
    for _ in range(KILL_ROUNDS):
        _send(pid, signal.SIGSTOP)  # it starts no further ones
        living = [each for each in descendants(pid) if not _has_ended(each)]
        if not living:
            break
        for each in living:
            _send(each, signal.SIGKILL)
        time.sleep(0.001)
    _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _has_ended(pid: int) -> bool:
    try:
        return stat_fields(f"/proc/{pid}/stat")[0] in b"ZX"
    except OSError:
        return True


def memory_bytes(pid: int) -> int:
    """Memory, swap and page tables of a process and its descendants; shared memory counts once."""
    size_kb = 0
    for place in map(living_place, (pid, *descendants(pid))):
        with unless_ended(place), open(f"{place}/smaps_rollup", "rb") as file:
            for words in map(bytes.split, file):
                if words[0] in (b"Pss:", b"SwapPss:"):
                    size_kb += int(words[1])
        size_kb += kilobytes(f"{place}/status", b"VmPTE:")
    return 1024 * size_kb


def resident_bytes(pid: int) -> float:
    """Memory of a process, with what it shares; infinite if it has ended already."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES or math.inf
    except OSError:
        return math.inf


def kilobytes(path: str, name: bytes) -> int:
    """A line `name: number kB` of a file; 0 if it is not there, or the process has ended."""
    with suppress(OSError), open(path, "rb") as file:
        return sum(int(words[1]) for line in file if (words := line.split())[:1] == [name])
    return 0


def remove(home: str) -> None:
    """Remove a run's folder, also if it is nested too deeply for Python."""
    try:
        shutil.rmtree(home)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # nested too deeply for Python
        subprocess.run(["rm", "-rf", home], check=False, capture_output=True)
