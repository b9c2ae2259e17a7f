"""Starting, resuming, refusing and ending runs, with a stand-in for the trainer."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from rich.table import Table

from agent_loop.records.run_folder import write_lines
from config.lookup import at
from tests.json_lines import read_lines
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from verl_mixed.cli import main
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.launch.dry_run import dry_run
from verl_mixed.launch.launcher import train
from verl_mixed.launch.plan import make_plan
from verl_mixed.launch.processes import of_run
from verl_mixed.launch.retries import KILLED
from verl_mixed.launch.stop import stop
from verl_mixed.launch.summary import changes_table
from verl_mixed.run.name import facts
from verl_mixed.run.state import RunFolder, changes_of_resume
from verl_mixed.run.versions import commit_of

pytestmark = pytest.mark.slow  # each starts a launcher, and that a trainer

FAKE_TRAINER = (sys.executable, "-m", "tests.fakes.trainer")

LAUNCHER = (
    "import os, sys; from verl_mixed.launch.launcher import train; "
    "trainer = (sys.executable, '-m', 'tests.fakes.trainer'); "
    "sys.exit(train([], os.environ, trainer=trainer, retries=3))"
)

DEADLINE_S = 60.0

KILLS_TOOLS = {"TOOL_SERVER_URL": "", "FAKE_TRAINER": "tools"}
"""A run with a tool server of its own, which the trainer kills in step 1."""


@pytest.fixture(autouse=True)
def same_signal_handlers_after() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(
    environ: RunEnviron, *overrides: str, config_files: Sequence[Path] = (), retries: int = 0
) -> tuple[int, str]:
    """Exit code and screen of one start."""
    screen = io.StringIO()
    console = Console(file=screen, width=200, highlight=False, soft_wrap=True)
    code = train(
        overrides,
        environ,
        trainer=FAKE_TRAINER,
        console=console,
        config_files=config_files,
        retries=retries,
    )
    return code, screen.getvalue()


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_run_ends_with_its_change_its_audit_and_its_report(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ)

    folder = RunFolder(Path("runs/trial"))
    assert code == GOOD, screen
    assert "step 3/3" in screen
    assert re.search("^dashboard    http://127.0.0.1:8299", screen, re.MULTILINE)
    assert "3 steps, trained prompts math 6, taco 6: every batch as planned" in screen
    assert "+0.30" in screen
    assert str(folder.report) in screen and folder.report.exists()
    assert "verl-mixed train" in folder.command.read_text()


def test_a_complete_run_says_so_and_starts_nothing(run_environ: RunEnviron) -> None:
    start(run_environ)

    code, screen = start(run_environ)

    assert code == GOOD
    assert "complete:" in screen
    assert starts(Path("runs/trial")) == 1


def test_each_start_keeps_the_config_files_that_it_was_given(run_environ: RunEnviron) -> None:
    file = Path("my.yaml")
    file.write_text("agent: {max_steps: 2}")

    code, screen = start(run_environ | {"ROLLOUT_N": "0"}, config_files=[file])
    assert code == USAGE, screen
    assert not Path("runs/trial/config").exists()

    code, screen = start(run_environ, config_files=[file])
    assert code == GOOD, screen
    (kept,) = Path("runs/trial/config").iterdir()
    assert kept.name.endswith("-my.yaml") and kept.read_text() == file.read_text()


def test_each_start_leaves_a_link_to_the_log(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ)
    assert code == GOOD, screen

    (link,) = Path("logs").glob("train_*.log")
    assert re.fullmatch(r"train_\d{8}_\d{6}\.log", link.name)
    assert os.readlink(link) == "../runs/trial/train.log"
    assert link.read_text() == RunFolder(Path("runs/trial")).log.read_text()


def test_more_steps_continue_a_complete_run(run_environ: RunEnviron) -> None:
    start(run_environ)

    code, screen = start(run_environ | {"TOTAL_TRAINING_STEPS": "5"})

    assert code == GOOD, screen
    assert "(3 of 5 steps seen; resumes from checkpoint global_step_3)" in screen
    assert "step 3/5" not in screen and "step 4/5" in screen and "step 5/5" in screen


@pytest.mark.parametrize("ended", ["in step 1", "complete"])
@pytest.mark.parametrize(
    ("mode", "path", "first"),
    [
        ("auto", None, {"in step 1": 2}),
        ("disable", None, {"in step 1": 1, "complete": 1}),
        ("resume_path", "runs/trial/checkpoints/global_step_1", {"in step 1": 2, "complete": 2}),
        ("resume_path", "elsewhere/global_step_2", {"in step 1": 3, "complete": 3}),
    ],
)
def test_a_dry_run_and_a_start_say_what_the_trainer_does(
    ended: str,
    mode: str,
    path: str | None,
    first: dict[str, int],
    run_environ: RunEnviron,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("elsewhere/global_step_2").mkdir(parents=True)
    Path("elsewhere/global_step_2/data.pt").touch()
    start(run_environ | ({"FAKE_TRAINER": "error"} if ended == "in step 1" else {}))
    resume = [
        f"trainer.resume_mode={mode}",
        *([f"trainer.resume_from_path={path}"] if path else []),
    ]

    lines, problems, _ = dry_run(resume, run_environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in run_environ.items():
            patch.setenv(name, value)
        assert main(["check", *resume]) == GOOD
    checked = capsys.readouterr().out
    found = facts(resume, run_environ)
    code, screen = start(run_environ, *resume)

    of_another_run = path is not None and "elsewhere" in path and ended != "complete"
    assert (problems, code) == ([], NOT_GOOD if of_another_run else GOOD), screen
    (said,) = (line.partition("(")[2] for line in lines if line.startswith("run "))
    assert f"note: {said.removesuffix(')')}\n" in checked
    began = [int(line) for line in Path("runs/trial/starts").read_text().splitlines()][1:]
    assert began == [step for end, step in first.items() if end == ended]
    if not began:
        assert said == "complete, 3 of 3 steps seen; trains nothing)" and "complete: " in screen
        assert found.done
        return
    assert f"({said}" in screen
    assert (found.done, found.checkpoint) == (0, began[0] - 1)
    assert all((f"step {step}/3" in screen) == (step >= began[0]) for step in (1, 2, 3))
    words = {1: "begins again with step 1)", 2: "checkpoint global_step_1)", 3: "global_step_2)"}
    assert said.endswith(words[began[0]]) and ("elsewhere" in said) == (began[0] == 3)


def test_a_checkpoint_that_is_gone_does_not_begin_a_run_again_unasked(
    run_environ: RunEnviron,
) -> None:
    start(run_environ | {"FAKE_TRAINER": "error"})
    shutil.rmtree("runs/trial/checkpoints/global_step_1")

    lines, (problem,), _ = dry_run([], run_environ)
    code, screen = start(run_environ)

    assert lines[1].endswith("(1 of 3 steps seen; is refused)")
    assert code == USAGE and problem in screen
    assert "checkpoints/global_step_1 is gone" in problem and "resume_mode=disable" in problem
    code, screen = start(run_environ, "trainer.resume_mode=disable")
    assert code == GOOD and "1 of 3 steps seen; begins again with step 1" in screen


def test_a_checkpoint_that_leaves_no_step_to_train_is_refused(run_environ: RunEnviron) -> None:
    start(run_environ)
    path = "trainer.resume_from_path=runs/trial/checkpoints/global_step_3"

    _, (problem,), _ = dry_run(["trainer.resume_mode=resume_path", path], run_environ)
    code, screen = start(run_environ, "trainer.resume_mode=resume_path", path)

    assert code == USAGE and problem in screen
    assert "no step is left after it, with trainer.total_training_steps=3" in problem


def test_a_failed_run_names_its_reason_and_log_and_goes_on_after(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | {"FAKE_TRAINER": "error"})

    assert code == NOT_GOOD
    assert "failed: ValueError: broken on purpose" in screen
    assert f"The log is {Path('runs/trial/train.log').absolute()}" in screen
    assert "1 of 3 steps, not finished" in RunFolder(Path("runs/trial")).report.read_text()

    code, screen = start(run_environ)
    assert code == GOOD, screen
    assert "(1 of 3 steps seen; resumes from checkpoint global_step_1)" in screen


@pytest.mark.parametrize(
    ("retries", "code", "told"),
    [(0, NOT_GOOD, "failed ValueError: broken on purpose 1"), (1, GOOD, "complete  3")],
)
def test_a_run_that_failed_goes_on_by_itself_and_somebody_is_told_of_its_end(
    retries: int, code: int, told: str, run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_mixed.launch.retries.PAUSE_S", 0.0)
    tell = {"ON_END": 'echo "$RUN_VERDICT $RUN_CAUSE $RUN_STEP" >>"$RUN_FOLDER/told"'}

    ended, screen = start(run_environ | tell | {"FAKE_TRAINER": "error"}, retries=retries)

    folder = Path("runs/trial")
    assert ended == code, screen
    assert starts(folder) == 1 + retries
    assert ("retry 1 of 1" in screen) == bool(retries)
    assert (folder / "told").read_text() == f"{told}\n"


def killed_once(environ: RunEnviron, **state: object) -> RunFolder:
    """A run with one step whose launcher was killed, with its count of retries."""
    start(environ | {"FAKE_TRAINER": "error"})
    folder = RunFolder(Path("runs/trial"))
    folder.retries.write_text(json.dumps({"used": 1, "idle": 0, "cause": "", "step": 0} | state))
    return folder


TELL = {"ON_END": 'echo "$RUN_VERDICT $RUN_CAUSE" >>"$RUN_FOLDER/told"', KILLED: "137"}


def test_a_launcher_that_replaces_a_killed_one_resumes_and_goes_on_counting(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_mixed.launch.retries.PAUSE_S", 0.0)
    folder = killed_once(run_environ)

    code, screen = start(run_environ | TELL, retries=2)

    assert code == GOOD, screen
    assert "retry 2 of 2 in 0s, after step 1: the launcher was killed by SIGKILL" in screen
    assert (folder.path / "told").read_text() == "complete \n"
    assert not folder.retries.exists()


def test_a_launcher_that_was_killed_twice_at_a_step_is_given_up_and_somebody_is_told(
    run_environ: RunEnviron,
) -> None:
    cause = "the launcher was killed by SIGKILL"
    folder = killed_once(run_environ, cause=cause, step=1)

    code, screen = start(run_environ | TELL, retries=9)

    assert code == NOT_GOOD
    assert "not started again: this failure came twice at step 1" in screen
    assert (folder.path / "told").read_text() == f"failed {cause}\n"
    assert starts(folder.path) == 1
    assert not folder.retries.exists()


def test_a_run_that_was_stopped_is_not_started_again_by_its_session(
    run_environ: RunEnviron,
) -> None:
    folder = killed_once(run_environ)
    stop(folder, 0)

    code, screen = start(run_environ | TELL, retries=9)

    assert code == INTERRUPTED, screen
    assert starts(folder.path) == 1


def test_a_launcher_keeps_its_count_while_it_runs_and_a_start_by_hand_begins_at_0(
    hanging_launcher: subprocess.Popen[bytes],
) -> None:
    folder = RunFolder(Path("runs/trial"))
    state = json.loads(folder.retries.read_text())
    assert state == {"used": 0, "idle": 0, "cause": "", "step": 0}
    hanging_launcher.send_signal(signal.SIGINT)
    hanging_launcher.wait(DEADLINE_S)
    assert not folder.retries.exists()


def test_sigusr1_saves_a_checkpoint_and_ends_the_run(
    obedient_launcher: subprocess.Popen[bytes],
) -> None:
    obedient_launcher.send_signal(signal.SIGUSR1)
    screen, _ = obedient_launcher.communicate(timeout=DEADLINE_S)
    assert obedient_launcher.returncode == INTERRUPTED
    assert b"stopped after step 1 of 3, as asked" in screen
    assert RunFolder(Path("runs/trial")).saved_step() == 1


def test_a_report_that_cannot_be_written_fails_no_run(run_environ: RunEnviron) -> None:
    Path("runs/trial/report.html/taken").mkdir(parents=True)

    code, screen = start(run_environ)

    assert code == GOOD, screen
    assert "report not written: " in screen
    assert RunFolder(Path("runs/trial")).is_done(3)


def test_a_reason_does_nothing_to_the_terminal(run_environ: RunEnviron) -> None:
    hostile = "\x1b]0;title\x07\x1b(0\u202e [red]x[/red] :warning:"

    _, screen = start(run_environ | {"FAKE_TRAINER": "error", "FAKE_ERROR": hostile})

    assert "failed: ValueError:  ]0;title  (0  [red]x[/red] :warning:" in screen
    assert all(line.isprintable() for line in screen.split("\n"))


def test_a_line_of_metrics_that_is_none_keeps_no_run_from_going_on_and_is_said(
    run_environ: RunEnviron,
) -> None:
    folder = RunFolder(Path("runs/trial"))
    start(run_environ | {"FAKE_TRAINER": "error"})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 1, "ti\xff\n')

    code, screen = start(run_environ)

    assert "1 of 3 steps seen; resumes" in screen and "step 3/3" in screen
    assert "metrics.jsonl: 1 line cannot be read and was passed over" in screen
    assert code == NOT_GOOD  # what was lost is not proven


def test_a_complete_run_with_a_damaged_file_names_its_line_and_has_its_report(
    run_environ: RunEnviron,
) -> None:
    folder = RunFolder(Path("runs/trial"))
    write_lines(folder.path / "trajectories" / "0.jsonl", [])
    (folder.path / "trajectories" / "0.jsonl").write_text("torn\n")

    code, screen = start(run_environ)

    assert code == NOT_GOOD
    assert "+0.30" in screen and "0.jsonl line 1 is left out: " in screen
    assert "ratio audit: 3 steps" in screen
    assert "math: mean 0.50, min 0.00, max 1.00, std 0.40 in the last 3 steps" in screen
    assert folder.is_done(3) and folder.report.exists()


def test_a_complete_run_that_cannot_be_audited_says_why(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | {"FAKE_TRAINER": "forgets"})

    assert code == NOT_GOOD
    assert "+0.30" in screen and "audit not possible: no " in screen
    assert "ledger.jsonl: the run has trained no step, or lost its ledger" in screen


def table_of(*validations: dict[str, float]) -> Table:
    """The launcher's last table."""
    return changes_table(
        [
            {"step": step, "time": 0.0, "metrics": {f"mixed/{name}": x for name, x in own.items()}}
            for step, own in enumerate(validations)
        ]
    )


def last_table(*validations: dict[str, float]) -> list[list[str]]:
    """Its cells."""
    table = table_of(*validations)
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_a_mixture_that_goes_on_otherwise_may_rename_the_run(run_environ: RunEnviron) -> None:
    unnamed = {name: value for name, value in run_environ.items() if name != "EXPERIMENT_NAME"}
    before = make_plan([], unnamed).config
    now = make_plan(
        ["mixed.on_change=continue", "mixed.sources.nq.ratio=0", "data.train_batch_size=10"],
        unnamed,
    ).config

    assert at(before, "trainer.experiment_name") != at(now, "trainer.experiment_name")
    assert changes_of_resume(before, now) == []


def test_the_last_table_says_how_sure_each_change_is_and_the_mean() -> None:
    counts = {"a/val/count": 100.0, "b/val/count": 100.0}
    before = {"a/val/reward/mean": 0.25, "b/val/reward/mean": 0.5}
    after = {"a/val/reward/mean": 0.75, "b/val/reward/mean": 0.54}

    a, b, mean = last_table(counts | before, counts | after)

    assert a[:3] == ["a", "0.25", "0.75"]
    assert a[3].startswith("+0.50 [+0.3") and a[3].endswith("]: improved")
    assert b[3].startswith("+0.04 [-0.") and b[3].endswith("]: no clear change")
    assert mean == ["mean", "0.38", "0.65", "+0.27"]


def test_a_pass_rate_stands_in_for_rewards_that_are_no_shares_and_says_so() -> None:
    own = {"a/val/reward/mean": -0.5, "a/val/count": 100.0, "b/val/reward/mean": 0.5}

    a, b = last_table(own | {"a/val/pass_rate": 0.25}, own | {"a/val/pass_rate": 0.75})

    assert a[:3] == ["a", "0.25", "0.75"] and a[3].endswith("] solved: improved")
    assert b[3] == "+0.00: interval unknown"


def test_a_source_name_in_the_last_table_is_text() -> None:
    own = {"[red]x\x1b]0;title\x07/val/reward/mean": 0.5}
    screen = io.StringIO()

    Console(file=screen, width=100).print(table_of(own, own))

    assert "[red]x ]0;title " in screen.getvalue()
    assert all(line.isprintable() for line in screen.getvalue().split("\n"))


def test_there_is_no_mean_of_sources_validated_at_other_steps() -> None:
    both = {"a/val/reward/mean": 0.5, "b/val/reward/mean": 0.5}

    rows = last_table({"a/val/reward/mean": 0.5}, both, both)

    assert [row[0] for row in rows] == ["a", "b"]
    assert last_table(both) == []


def test_another_learning_rate_for_the_same_run_is_refused(run_environ: RunEnviron) -> None:
    start(run_environ | {"FAKE_TRAINER": "error"})

    code, screen = start(run_environ | {"LEARNING_RATE": "0.01"})

    assert code == USAGE
    assert "actor_rollout_ref.actor.optim.lr: 0.0005 -> 0.01" in screen
    assert starts(Path("runs/trial")) == 1


def test_a_wrong_setting_starts_nothing(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | {"VAL_FILES": "gone.parquet", "LEARNING_RATE": "5"})

    assert code == USAGE
    assert "cannot start, 2 problems:" in screen
    assert starts(Path("runs/trial")) == 0


def test_a_name_that_leaves_the_runs_folder_is_refused(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | {"EXPERIMENT_NAME": "../elsewhere"})

    assert code == USAGE
    assert "it names a folder" in screen
    assert not Path("../elsewhere").exists()


def test_a_run_that_goes_on_elsewhere_is_refused(run_environ: RunEnviron) -> None:
    with RunFolder(Path("runs/trial")).claim():
        code, screen = start(run_environ)

    assert code == USAGE
    assert f"is being run by process {os.getpid()}" in screen


@pytest.fixture
def hanging_launcher(run_environ: RunEnviron) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, whose trainer hangs in its first step."""
    yield from launcher_with(run_environ | {"FAKE_TRAINER": "hang"})


@pytest.fixture
def obedient_launcher(run_environ: RunEnviron) -> Iterator[subprocess.Popen[bytes]]:
    """The same, whose trainer goes on in its first step until it is asked to stop."""
    yield from launcher_with(run_environ | {"FAKE_TRAINER": "stop"})


def launcher_with(environ: RunEnviron) -> Iterator[subprocess.Popen[bytes]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env=environ | {"PYTHONPATH": str(REPO_ROOT)},
        stdout=subprocess.PIPE,
    )
    folder = RunFolder(Path("runs/trial"))
    wait_until(lambda: folder.last_step() == 1 or launcher.poll() is not None)
    yield launcher
    for process in of_run(folder.path):
        process.kill()
    launcher.kill()
    launcher.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_ends_its_trainer(
    hanging_launcher: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    hanging_launcher.send_signal(number)
    screen, _ = hanging_launcher.communicate(timeout=DEADLINE_S)

    assert hanging_launcher.returncode == INTERRUPTED
    assert b"the same command resumes from checkpoint global_step_1" in screen
    assert RunFolder(Path("runs/trial")).report.exists()
    assert of_run(Path("runs/trial").absolute()) == []


def test_a_killed_launcher_takes_its_trainer_with_it(
    hanging_launcher: subprocess.Popen[bytes],
) -> None:
    (trainer,) = of_run(Path("runs/trial").absolute())

    hanging_launcher.kill()

    psutil.wait_procs([trainer], timeout=DEADLINE_S)
    assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE


def stopped_with(grace: str) -> list[str]:
    """What `verl-mixed stop` says; from a process of its own, as users stop runs."""
    done = subprocess.run(
        [sys.executable, "-m", "verl_mixed", "stop", "runs/trial", "--grace", grace],
        env=os.environ | {"PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_run_that_is_asked_to_stop_saves_and_ends_and_is_resumed(
    obedient_launcher: subprocess.Popen[bytes], run_environ: RunEnviron
) -> None:
    asked, ended, last = stopped_with("60")

    screen, _ = obedient_launcher.communicate(timeout=DEADLINE_S)
    assert obedient_launcher.returncode == INTERRUPTED
    assert b"stopped after step 1 of 3, as asked" in screen
    assert RunFolder(Path("runs/trial")).report.exists()
    assert "asked process" in asked and "ended by itself" in ended
    assert last == "last step 1, last checkpoint global_step_1 (the same command resumes there)"
    assert not RunFolder(Path("runs/trial")).stop_request.exists()
    code, _ = start(run_environ)
    assert code == GOOD


def test_a_run_that_does_not_stop_is_ended_by_signals(
    hanging_launcher: subprocess.Popen[bytes],
) -> None:
    _, impatient, ended, _ = stopped_with("0.1")

    hanging_launcher.communicate(timeout=DEADLINE_S)
    assert hanging_launcher.returncode == INTERRUPTED
    assert "ending it by signals" in impatient and "SIGTERM" in ended
    assert of_run(Path("runs/trial").absolute()) == []


def test_what_a_killed_launcher_left_is_ended_and_said(
    hanging_launcher: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(Path("runs/trial"))
    (trainer,) = of_run(folder.path)
    hanging_launcher.send_signal(signal.SIGSTOP)
    hanging_launcher.kill()
    hanging_launcher.wait(DEADLINE_S)

    assert stop(folder, DEADLINE_S)

    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"not running: {folder.path}"
    assert said[-1] == "last step 1, last checkpoint global_step_1 (the same command resumes there)"
    psutil.wait_procs([trainer], timeout=DEADLINE_S)  # the kernel may still be busy with it
    assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE


def test_a_run_of_another_machine_is_not_stopped_from_here(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(Path("runs/trial"))
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        claim = folder.claim()
        claim.__enter__()

    assert not stop(folder, DEADLINE_S)

    said = capsys.readouterr().out
    assert said == f"{folder.path} is run by process {os.getpid()} on elsewhere: stop it there\n"
    claim.__exit__(None, None, None)


@pytest.mark.usefixtures("run_environ")
def test_there_is_nothing_to_stop_where_there_is_no_run() -> None:
    with pytest.raises(ValueError, match="no run in"):
        stop(RunFolder(Path("runs/gone")), 0)


def test_each_start_leaves_commit_and_versions(run_environ: RunEnviron) -> None:
    start(run_environ | {"FAKE_TRAINER": "error"})
    folder = RunFolder(Path("runs/trial"))
    (first,) = read_lines(folder.versions)
    assert first["packages"]["verl"] == version("verl")
    assert first["commit"] == commit_of()

    first["packages"]["ray"] = "2.0.0"
    write_lines(folder.versions, [first])
    _, screen = start(run_environ)

    assert f"not as at the last start: ray: 2.0.0 -> {version('ray')}" in screen
    assert len(read_lines(folder.versions)) == 2


def test_a_run_on_a_cluster_that_does_not_answer_starts_nothing(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | {"MASTER_IP": "127.0.0.1", "RAY_PORT": "1"})

    assert code == USAGE
    assert "no answer from Ray's head at 127.0.0.1:1: nothing listens there" in screen
    assert starts(Path("runs/trial")) == 0


def test_a_run_on_a_cluster_tells_ray_nothing_of_its_own(run_environ: RunEnviron) -> None:
    environ = run_environ | {"MASTER_IP": "10.0.0.1", "WORKER_NODES": "10.0.0.2"}
    plan = make_plan(["ray_kwargs.ray_init.num_cpus=4"], environ)

    assert plan.cluster == "10.0.0.1:6379"
    assert at(plan.config, "ray_kwargs.ray_init").keys() == {"address", "runtime_env"}
    assert at(plan.config, "trainer.nnodes") == 2


def test_local_is_a_ray_of_the_runs_own(run_environ: RunEnviron) -> None:
    for overrides, environ in (
        ([], {"MASTER_IP": "local"}),
        (["++ray_kwargs.ray_init.address=local"], {"RAY_ADDRESS": "10.0.0.4:6379"}),
    ):
        plan = make_plan(["ray_kwargs.ray_init.num_cpus=4", *overrides], run_environ | environ)

        assert plan.cluster is None
        assert "address" not in at(plan.config, "ray_kwargs.ray_init")
        assert at(plan.config, "ray_kwargs.ray_init.num_cpus") == 4


def test_a_run_goes_on_after_its_tool_server_was_killed(run_environ: RunEnviron) -> None:
    code, screen = start(run_environ | KILLS_TOOLS)

    assert code == GOOD, screen
    assert "started again, 1 of 3 times" in screen and "step 3/3" in screen
    assert of_run(Path("runs/trial").absolute()) == []


def test_a_run_whose_tool_server_may_not_be_started_again_ends_with_it(
    run_environ: RunEnviron,
) -> None:
    code, screen = start(run_environ | KILLS_TOOLS, "mixed.tool_server={restarts: 0}")

    assert code == NOT_GOOD
    assert "failed: the tool server at http://127.0.0.1:" in screen
    assert "killed by SIGKILL" in screen and "(mixed.tool_server.restarts=0)" in screen
    assert of_run(Path("runs/trial").absolute()) == []
