"""`verl-mixed watch`, as a process: in a terminal that tmux keeps, and in a pipe."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_loop.records.run_folder import MetricsFile
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from tests.verl_mixed.run_files import add_line, metrics_line, run_of
from verl_mixed.cli import main
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE

WATCH = (sys.executable, "-m", "verl_mixed", "watch", "--interval", "0.1")
DEADLINE_S = 60.0


def wait_until(condition: Callable[[], bool], look: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, look()
        time.sleep(0.05)


class Terminal:
    """A shell in a tmux session of its own."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._environ = {**environ, "LC_ALL": "C.UTF-8", "PYTHONPATH": str(REPO_ROOT)}
        self._environ.pop("TMUX", None)
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._run("new", "-d", "-s", "t", "-x", "80", "-y", "24", "env PS1='ready ' sh")
        self.wait_for("ready")

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words],
            check=True,
            capture_output=True,
            text=True,
            env=self._environ,
        ).stdout

    def screen(self) -> str:
        return self._run("capture-pane", "-p", "-t", "t")

    def type(self, text: str) -> None:
        self._run("send-keys", "-t", "t", "-l", text)
        self._run("send-keys", "-t", "t", "Enter")

    def interrupt(self) -> None:
        self._run("send-keys", "-t", "t", "C-c")

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-t", "t", "-x", str(width), "-y", str(height))

    def is_whole_screen(self) -> bool:
        """Whether a program draws on the other screen, and without a cursor."""
        shown = self._run("display", "-p", "-t", "t", "#{alternate_on} #{cursor_flag}")
        return shown.split() == ["1", "0"]

    def wait_for(self, *texts: str, without: str = "") -> None:
        def is_there() -> bool:
            screen = self.screen()
            return all(text in screen for text in texts) and not (without and without in screen)

        wait_until(is_there, self.screen)

    def end(self) -> None:
        self._run("kill-server")


@contextmanager
def terminal_in(folder: Path, environ: Mapping[str, str]) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here")
    terminal = Terminal(folder, environ)
    try:
        yield terminal
    finally:
        terminal.end()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with terminal_in(tmp_path, os.environ) as terminal:
        yield terminal


def test_a_run_is_watched_from_its_start_over_a_resume_and_a_resize_to_its_end(
    tmp_path: Path, terminal: Terminal
) -> None:
    folder = run_of(tmp_path / "run", steps=-1, total_steps=6)
    with folder.claim():
        terminal.type(" ".join([*WATCH, str(folder.path)]))
        terminal.wait_for("run  running by process", "step 0/6", "starting Ray")
        assert terminal.is_whole_screen()
        now = time.time()
        for step in range(5):
            add_line(folder.metrics, metrics_line(step, moment=now + step))
        terminal.wait_for("step 4/6", "left 2s", "solved", without="starting Ray")
        MetricsFile(folder.metrics).rewind(2, None)
        terminal.wait_for("step 2/6")
        terminal.resize(50, 12)
        terminal.wait_for("step 2/6", "mean of 10", without="solved")
        terminal.resize(100, 30)
        terminal.wait_for("solved")
        with folder.metrics.open("a") as file:
            file.write('{"step": 3, "ti')  # as a kill leaves it
        for step in range(3, 7):
            MetricsFile(folder.metrics).rewind(step - 1, None)
            add_line(folder.metrics, metrics_line(step, moment=now + step))
        folder.mark_done()
    terminal.wait_for("run  finished", "step 6/6", "ready")
    assert not terminal.is_whole_screen()


def test_ctrl_c_gives_the_terminal_back_as_it_was(tmp_path: Path, terminal: Terminal) -> None:
    folder = run_of(tmp_path / "run", steps=3)
    with folder.claim():
        terminal.type(" ".join([*WATCH, str(folder.path), "; echo exit=$?"]))
        terminal.wait_for("step 3/20")
        terminal.interrupt()
        terminal.wait_for("exit=0", without="step 3/20")
        assert not terminal.is_whole_screen()
    assert [line["step"] for line in folder.lines()] == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_launcher_shows_the_same_screen_below_its_words(
    tmp_path: Path, run_environ: RunEnviron
) -> None:
    script = tmp_path / "launch.py"
    script.write_text(
        "import os, sys\nfrom verl_mixed.launch.launcher import train\n"
        "sys.exit(train([], os.environ, trainer=(sys.executable, '-m', 'tests.fakes.trainer')))"
    )
    with terminal_in(tmp_path, {**run_environ, "FAKE_TRAINER": "hang"}) as terminal:
        terminal.type(f"{sys.executable} {script}; echo exit=$?")
        terminal.wait_for("run          ", "step 1/3", "since 1st val", "math", "taco")
        assert not terminal.is_whole_screen()
        assert terminal.screen().count("ratio error") == 1
        terminal.interrupt()
        terminal.wait_for("interrupted; the same command resumes", "step 1/3", "exit=130")


def test_in_a_pipe_each_step_is_a_line_as_it_comes_and_then_the_end(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2, total_steps=4)
    out = tmp_path / "out"
    with folder.claim(), out.open("wb") as file:
        child = subprocess.Popen([*WATCH, str(folder.path)], stdout=file, cwd=REPO_ROOT)
        wait_until(lambda: "running by" in out.read_text(), out.read_text)
        add_line(folder.metrics, metrics_line(3))
        wait_until(lambda: "step 3/4" in out.read_text(), out.read_text)
        add_line(folder.metrics, metrics_line(4))
        folder.mark_done()
    assert child.wait(DEADLINE_S) == GOOD

    lines = [line.split("  ")[0] for line in out.read_text().splitlines()]
    steps = [line for line in lines if line.startswith("step")]
    assert steps == [f"step {step}/4" for step in range(5)]
    assert lines[-1] == "finished"


def test_a_reader_that_goes_away_ends_it_with_one_line(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2000)
    child = subprocess.Popen(
        [*WATCH, str(folder.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO_ROOT
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()

    assert child.wait(DEADLINE_S) == NOT_GOOD
    assert child.stderr.read().count(b"\n") == 1
    child.stderr.close()


def test_hostile_names_are_inert_in_an_ascii_pipe(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=0)
    add_line(folder.metrics, {"step": 1, "time": 1.0, "metrics": {"mixed/é\x1b[2J/reward/mean": 1}})

    shown = subprocess.run(
        [*WATCH, str(folder.path)],
        capture_output=True,
        cwd=REPO_ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    ).stdout

    assert b"? [2J 1.00" in shown and b"\x1b" not in shown


def test_once_shows_a_run_that_goes_on_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", steps=2)

    with folder.claim():
        assert main(["watch", "--once", str(folder.path)]) == GOOD

    assert capsys.readouterr().out.splitlines()[-1].startswith("running by process")


def test_a_folder_that_is_no_runs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path)]) == USAGE
    assert f"no run in {tmp_path}: it has no config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "x"])
def test_an_interval_that_is_none_is_refused(interval: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--interval", interval, str(tmp_path)])
