"""The state of a run, read from its folder."""

import os
from pathlib import Path

import pytest

from rate_limit.file_limiter import FileRateLimiter
from tests.verl_mixed.run_files import add_line, metrics_line, run_of
from verl_mixed.run.compose import save_config
from verl_mixed.run.state import RunFolder
from verl_mixed.views.watch.run_reader import Phase, RunReader

FAILED = """\
ray init kwargs: {}
(W pid=3) Traceback (most recent call last):
(W pid=3) KeyError: 'of a worker, which goes on'
"""
DRIVER = """\
Traceback (most recent call last):
  File "x.py", line 1, in main
RuntimeError: 9 of 10 trajectories were lost
"""


def read(folder: RunFolder, now: float = 0.0) -> RunReader:
    reader = RunReader(folder, now=lambda: now)
    reader.read()
    return reader


def test_a_folder_without_a_run_has_not_begun(tmp_path: Path) -> None:
    reader = read(RunFolder(tmp_path / "none"))

    assert reader.state().phase is Phase.NOT_BEGUN
    assert reader.total_steps is None
    assert reader.screen_content(reader.state()).board.sources == []


def test_a_run_with_all_its_steps_and_its_mark_is_finished(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=4, total_steps=4)
    assert read(folder).state().phase is Phase.STOPPED

    folder.mark_done()

    assert read(folder).state().phase is Phase.FINISHED
    save_config({"trainer": {"total_training_steps": 5}}, folder.config)
    assert read(folder).state().phase is Phase.STOPPED


def test_a_run_that_somebody_holds_is_running_by_them(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)

    with folder.claim():
        state = read(folder).state()
        folder.stop_request.touch()
        asked = read(folder).state()

    assert state.text == f"running by process {os.getpid()} on {os.uname().nodename}"
    assert asked.text == f"{state.text}, asked to stop after this step"
    assert state.is_running and state.is_here


def test_a_holder_that_left_no_name_runs_it_all_the_same(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)

    with folder.claim():
        (folder.path / ".lock").write_text("")

        assert read(folder).state().text == "running by a process that left no name"


def test_the_start_up_is_over_with_the_first_step_of_this_start(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    with folder.claim():
        os.utime(folder.path / ".lock", (1000.0, 1000.0))
        reader = read(folder, now=1030.0)
        state = reader.state()
        folder.log.open("a").close()
        assert (state.start_up, state.started_s) == ("starting Ray", 30.0)
        assert reader.screen_content(state).start_up == "starting Ray (30s)"

        add_line(folder.metrics, metrics_line(3, moment=1029.0))
        reader.read()

        assert reader.state().start_up == ""


def test_a_run_whose_driver_raised_has_failed(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    folder.log.write_text(FAILED)
    reader = read(folder)
    assert reader.state().phase is Phase.STOPPED

    with folder.log.open("a") as log:
        log.write(DRIVER)
    reader.read()

    assert reader.state().text == (
        "failed: RuntimeError: 9 of 10 trajectories were lost; "
        f"see `verl-mixed diagnose {folder.path}`"
    )


def test_what_an_earlier_start_failed_of_counts_no_more(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    folder.log.write_text(FAILED + DRIVER + "ray init kwargs: {}\n")

    assert read(folder).state().text == "stopped after step 2, no checkpoint"


def test_a_stopped_run_names_the_checkpoint_that_it_goes_on_from(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    checkpoint = folder.path / "checkpoints" / "global_step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("2")

    text = read(folder).state().text

    assert text == "stopped after step 2, goes on from checkpoint global_step_2"


def test_the_limiter_is_looked_at_while_the_run_is_on(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    limiter = FileRateLimiter(folder.path / "rate_limit.state", per_minute=600, burst=10)
    for _ in range(3):
        limiter.acquire()

    with folder.claim():
        reader = read(folder)
        running = reader.screen_content(reader.state()).limiter
    over = reader.screen_content(reader.state()).limiter

    assert running is not None and over is None
    assert (running.granted, running.per_minute) == (3, 600)


@pytest.mark.parametrize("text", ["", "[", "trainer: 7", "trainer: {total_training_steps: x}"])
def test_a_config_that_says_no_end_leaves_it_open(tmp_path: Path, text: str) -> None:
    folder = run_of(tmp_path / "run", steps=2)
    folder.config.write_text(text)

    assert read(folder).total_steps is None


def test_a_resume_may_move_the_end(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=2, total_steps=4)
    reader = read(folder)
    left_s = reader.board.left_s

    save_config({"trainer": {"total_training_steps": 8}}, folder.config)
    os.utime(folder.config, (9e8, 9e8))
    reader.read()

    assert (reader.total_steps, left_s, reader.board.left_s) == (8, 20.0, 60.0)
