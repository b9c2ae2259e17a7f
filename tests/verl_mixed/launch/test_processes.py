"""Children of a run: none is left behind, and nobody else's is touched."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_mixed.launch.processes import RUN_MARK, end_run, of_run, start

SLEEP = "import time; time.sleep(600)"

# a child whose own child has lost the mark, as one that renames itself does
PARENT = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}})\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)

STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


def started(program: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A child of the run in `folder`, and its first line."""
    log = folder / "log"
    child = start([sys.executable, "-c", program], log=log, environ=os.environ, run_dir=folder)
    deadline = time.monotonic() + 60
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline, "the child said nothing"
        time.sleep(0.01)
    return child, log.read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_process_that_lost_the_mark_is_ended_with_its_session(
    tmp_path: Path, known: bool
) -> None:
    child, pid = started(PARENT, tmp_path)
    grandchild = psutil.Process(int(pid))

    assert end_run(tmp_path, 5.0, sessions=[child.pid] if known else ()) == 2

    child.wait()
    psutil.wait_procs([grandchild], timeout=30)
    assert not grandchild.is_running()


def test_a_process_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    child, _ = started(STUBBORN, tmp_path)
    process = psutil.Process(child.pid)

    end_run(tmp_path, 0.1)

    assert not process.is_running()
    child.wait()


def test_other_runs_and_the_one_that_asks_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    child, _ = started(STUBBORN, other)
    monkeypatch.setenv(RUN_MARK, str(tmp_path))

    assert of_run(tmp_path) == []
    assert end_run(tmp_path, 0.1) == 0
    assert child.poll() is None

    end_run(other, 0.1)
    child.wait()
