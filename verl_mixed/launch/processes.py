"""Child processes of a run: started so that none outlives the launcher, and ended by their ids.

A child is in a session of its own (Ctrl-C reaches the launcher only) and gets a signal from the
kernel when the launcher dies. What a child starts itself (Ray's daemons and workers) is known by
the variable `RUN_MARK` in its environment, which holds the run's folder.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

RUN_MARK = "VERL_MIXED_RUN_DIR"

_PR_SET_PDEATHSIG = 1


def start(
    command: Sequence[str], *, log: Path, environ: Mapping[str, str], run_dir: Path
) -> subprocess.Popen[bytes]:
    """Start a child that appends its output to `log`.

    Args:
        command: program and arguments.
        log: stdout and stderr, appended.
        environ: its environment, without the mark.
        run_dir: the run that it belongs to.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    launcher = os.getpid()

    def die_with_the_launcher() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # it died between the fork and the line above
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, RUN_MARK: str(run_dir)},
            start_new_session=True,
            preexec_fn=die_with_the_launcher,  # the launcher forks from one thread only
        )


def of_run(run_dir: Path, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Processes of a run, but for the one that asks.

    Args:
        run_dir: processes that carry the mark of this run.
        sessions: and those of these sessions: a process that renames itself, as Ray's dashboard
            does, writes over the mark.
    """
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ().get(RUN_MARK) == str(run_dir)
            own = own or os.getsid(process.pid) in sessions
            ended = process.status() == psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):  # gone by now, or another user's
            continue
        if own and not ended and process.pid != os.getpid():
            found.append(process)
    return found


def end(processes: Sequence[psutil.Process | subprocess.Popen[bytes]], grace_s: float) -> None:
    """Ask processes to end, wait, and kill those that stay.

    Args:
        processes: children or others, each named by its id.
        grace_s: time between asking and killing.
    """
    running = [p if isinstance(p, psutil.Process) else _handle(p) for p in processes]
    alive = [process for process in running if process is not None]
    for process in alive:
        _send(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(alive, timeout=grace_s)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=5)


def end_run(run_dir: Path, grace_s: float, sessions: Collection[int] = ()) -> int:
    """End whatever is left of a run, first by asking.

    A process that is being ended may start another, so it looks again until none is left.

    Args:
        run_dir: whose mark the processes carry.
        grace_s: time between asking and killing.
        sessions: ids of the children that led them, where they are known.

    Returns:
        Processes found.
    """
    found: set[int] = set()
    known = set(sessions)
    deadline = time.monotonic() + 3 * grace_s
    while (left := of_run(run_dir, known)) and time.monotonic() < deadline:
        found |= {process.pid for process in left}
        known |= {_session(process) for process in left} - {os.getsid(0), 0}
        end(left, grace_s)
    return len(found)


def _session(process: psutil.Process) -> int:
    """The session of a process; 0 when it is gone."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


def _handle(child: subprocess.Popen[bytes]) -> psutil.Process | None:
    if child.poll() is not None:
        return None
    try:
        return psutil.Process(child.pid)
    except psutil.NoSuchProcess:
        return None


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
