"""Start, find and end the processes of a run; none of them outlives the launcher.

A child has a session of its own, so that Ctrl-C reaches only the launcher. The kernel sends it a
signal when the launcher dies. The processes that a child starts (Ray's daemons and workers) are
found by the variable `RUN_MARK` in their environment, which holds the run's folder.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from config.environment import RUN_MARK

GRACE_S = 15.0
"""Time between asking a process to end and killing it; Ray needs some seconds."""

_PR_SET_PDEATHSIG = 1


def start(
    command: Sequence[str], *, log: Path, environ: Mapping[str, str], run_dir: Path
) -> subprocess.Popen[bytes]:
    """Start a child that appends its output to `log`; `RUN_MARK` is added to its environment."""
    libc = ctypes.CDLL(None, use_errno=True)
    launcher = os.getpid()

    def die_with_the_launcher() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the line above
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, RUN_MARK: str(run_dir)},
            start_new_session=True,
            preexec_fn=die_with_the_launcher,  # safe beside ClusterWatch's thread: it takes no lock
        )


def of_run(run_dir: Path, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """The processes with the mark of a run, except the calling one.

    Processes of `sessions` are returned too, because a process that renames itself, such as Ray's
    dashboard, overwrites its mark.
    """
    running = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(RUN_MARK) == str(run_dir)
            is_ours = is_ours or os.getsid(process.pid) in sessions
            has_ended = process.status() == psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
        if is_ours and not has_ended and process.pid != os.getpid():
            running.append(process)
    return running


def end_run(run_dir: Path, grace_s: float, sessions: Collection[int] = ()) -> int:
    """End all processes of a run: ask them, wait, and kill those that have not ended.

    A process may start another before it ends, so the search is repeated until nothing is found.
    Each time, `grace_s` passes between asking and killing. `sessions` are those of the run's
    children, as in `of_run`. Returns how many processes were found.
    """
    found: set[int] = set()
    known = set(sessions)
    deadline = time.monotonic() + 3 * grace_s
    while (left := of_run(run_dir, known)) and time.monotonic() < deadline:
        found |= {process.pid for process in left}
        known |= {_session(process) for process in left} - {os.getsid(0), 0}
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, stubborn = psutil.wait_procs(left, timeout=grace_s)
        for process in stubborn:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5)
    return len(found)


def _session(process: psutil.Process) -> int:
    """The session of a process; 0 if it has ended."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0
