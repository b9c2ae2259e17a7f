"""Stop a run: first by a request, so that it saves a checkpoint, then by signals.

The request is a file in the run's folder; the trainer looks for it after each step. The launcher
ends the processes that it has started. If the launcher was killed, its processes are ended here.
"""

import signal
import time
from contextlib import suppress

import psutil

from config.lookup import at
from verl_mixed.launch import processes
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import Holder, RunFolder
from verl_mixed.run.text import clock

LAUNCHER_S = 90.0
"""Time for the launcher to end its children after SIGTERM."""

POLL_S = 0.2


def stop(folder: RunFolder, grace_s: float) -> bool:
    """Stop a run and print where it stopped; returns whether no process of the run is left.

    Args:
        folder: folder of the run.
        grace_s: how long the current step and its checkpoint may take, seconds; 0 does not ask.

    Raises:
        RunHeld: a process without a name runs it.
        ValueError: there is no such run.
    """
    if not folder.path.is_dir():
        raise ValueError(f"no run in {folder.path}: name runs/<experiment>")
    holder = folder.holder()
    if holder is None or holder.is_here:
        folder.retries.unlink(missing_ok=True)  # a launcher that is killed below does not come back
    if holder is None:
        print(f"not running: {folder.path}")
    elif not holder.is_here:
        print(f"{folder.path} is run by {holder}: stop it there")
        return False
    else:
        with suppress(psutil.NoSuchProcess):  # it has ended
            _stop_launcher(folder, holder, grace_s)
    if left := processes.end_run(folder.path, processes.GRACE_S):
        print(f"ended {left} processes that the launcher left behind")
    folder.stop_request.unlink(missing_ok=True)
    saved = folder.saved_step()
    mode = at(load_config(folder.config), "trainer.resume_mode") if saved else "auto"
    resumes = "the same command" if mode == "auto" else "the same command with resume_mode=auto"
    checkpoint = f"global_step_{saved} ({resumes} resumes there)" if saved else "none"
    print(f"last step {folder.last_step()}, last checkpoint {checkpoint}")
    return folder.holder() is None and not processes.of_run(folder.path)


def _stop_launcher(folder: RunFolder, holder: Holder, grace_s: float) -> None:
    launcher = psutil.Process(holder.pid)
    began = time.monotonic()
    if grace_s > 0:
        folder.stop_request.touch()
        print(
            f"asked {holder} to stop: it saves a checkpoint after step {folder.last_step() + 1}; "
            f"waiting up to {clock(grace_s)}"
        )
        if _ended(launcher, grace_s):
            print(f"ended by itself after {clock(time.monotonic() - began)}")
            return
        print(f"still running after {clock(grace_s)}: ending it by signals")
    for number, patience_s in ((signal.SIGTERM, LAUNCHER_S), (signal.SIGKILL, processes.GRACE_S)):
        launcher.send_signal(number)
        if _ended(launcher, patience_s):
            print(f"ended by {number.name} after {clock(time.monotonic() - began)}")
            return


def _ended(process: psutil.Process, timeout_s: float) -> bool:
    """Wait for the end of a process; a zombie has ended."""
    deadline = time.monotonic() + timeout_s
    while not _is_over(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
