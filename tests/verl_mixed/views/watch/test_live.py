"""Live views of a run: each step is printed once, and the screen fits the terminal."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.records.run_folder import MetricsFile
from tests.verl_mixed.run_files import add_line, metrics_line, run_of
from verl_mixed.views.watch.live import PlainView, TableView, drawing, is_redrawn, view_on
from verl_mixed.views.watch.run_reader import Phase, RunReader, State

RUNNING = State(phase=Phase.RUNNING, text="running")


def starting(phase: str, seconds: float = 0.0) -> State:
    return State(phase=Phase.RUNNING, text="running", start_up=phase, started_s=seconds)


def test_each_step_is_printed_once_also_when_a_resume_takes_some_back(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", steps=3, total_steps=5)
    reader = RunReader(folder)
    printed: list[str] = []
    view = PlainView(reader, printed.append, seen=3, clock_s=lambda: 0.0)

    def look(state: State) -> None:
        reader.read()
        view.update(state)

    look(starting("starting Ray"))
    MetricsFile(folder.metrics).rewind(2, None)  # the checkpoint was of step 2
    look(starting("starting Ray"))
    add_line(folder.metrics, metrics_line(3, moment=90.0))
    look(RUNNING)
    add_line(folder.metrics, metrics_line(4, moment=99.0))
    look(RUNNING)
    look(RUNNING)

    assert [line.split("  ")[0] for line in printed] == [
        "starting Ray (0s)",
        "step 3/5",
        "step 4/5",
    ]


def test_the_plain_view_says_that_it_still_waits(tmp_path: Path) -> None:
    printed: list[str] = []
    now = [0.0]
    view = PlainView(RunReader(run_of(tmp_path / "r", -1)), printed.append, clock_s=lambda: now[0])

    for second in (0.0, 10.0, 31.0, 40.0):
        now[0] = second
        view.update(starting("starting Ray", second))

    assert printed == ["starting Ray (0s)", "starting Ray (31s)"]


def test_a_warning_of_the_newest_validation_stays_however_many_steps_ago_it_was(
    tmp_path: Path,
) -> None:
    folder = run_of(tmp_path / "run", steps=4)
    add_line(folder.metrics, metrics_line(5, mixed__nq__val__infra_error_rate=0.5))
    for step in range(6, 30):
        line = metrics_line(step)
        line["metrics"] = {n: v for n, v in line["metrics"].items() if "/val/" not in n}
        add_line(folder.metrics, line)
    reader = RunReader(folder)
    reader.read()
    printed: list[str] = []

    PlainView(reader, printed.append).update(RUNNING)

    warning = "WARNING nq: validation of step 5 lost 50.0% of it to faults"
    assert [warning in line for line in printed] == [False] * 5 + [True] * 25
    assert all("left 10s" in line for line in printed[19:20])


def test_the_state_is_said_when_it_is_another(tmp_path: Path) -> None:
    printed: list[str] = []
    view = PlainView(RunReader(run_of(tmp_path / "run", -1)), printed.append, with_state=True)

    view.update(RUNNING)
    view.update(RUNNING)
    view.update(State(phase=Phase.FINISHED, text="finished"))

    assert printed == ["running", "finished"]


def test_a_warning_of_the_first_validation_stays_as_changes_are_told_from_it(
    tmp_path: Path,
) -> None:
    folder = run_of(tmp_path / "run", steps=-1)
    add_line(folder.metrics, metrics_line(0, mixed__nq__val__infra_error_rate=0.2))
    for step in range(1, 30):
        add_line(folder.metrics, metrics_line(step))
    reader = RunReader(folder)
    reader.read()
    printed: list[str] = []

    PlainView(reader, printed.append).update(RUNNING)

    warning = "WARNING nq: validation of step 0 lost 20.0% of it to faults"
    assert [warning in line for line in printed] == [True] * 30


def test_the_plain_view_says_once_that_lines_were_passed_over(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", -1)
    folder.metrics.write_bytes(b"{torn\n")
    reader = RunReader(folder)
    printed: list[str] = []
    view = PlainView(reader, printed.append)

    for _ in range(3):
        reader.read()
        view.update(RUNNING)

    assert printed == ["WARNING metrics.jsonl: 1 line cannot be read and was passed over"]


@pytest.mark.parametrize("size", [(80, 24), (120, 50), (40, 10)])
def test_the_launchers_screen_leaves_two_lines_and_no_title(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    width, height = size
    reader = RunReader(run_of(tmp_path / "run", steps=8))
    reader.read()
    console = Console(file=StringIO(), record=True, width=width, height=height, force_terminal=True)

    with TableView(reader, console) as view:
        view.update(RUNNING)

    shown = console.export_text(clear=False)
    drawn = drawing(reader, RUNNING, console, whole=False)
    lines = drawn.plain.split("\n")
    assert lines[0].startswith("step 8/20") and "step 8/20" in shown
    assert len(lines) <= height - 2 and shown.count("\n") <= 2 * height
    assert max(len(line) for line in lines) <= width


def test_only_a_terminal_that_can_be_drawn_over_gets_a_screen(
    tmp_path: Path,
) -> None:
    reader = RunReader(run_of(tmp_path / "run", steps=1))

    def view(is_terminal: bool, term: str) -> object:
        console = Console(file=StringIO(), force_terminal=is_terminal, _environ={"TERM": term})
        return type(view_on(console, reader, 0))

    assert view(True, "xterm") is TableView
    assert view(True, "dumb") is PlainView
    assert view(False, "xterm") is PlainView
    assert not is_redrawn(Console(file=StringIO()))
