"""The screen fits every terminal, shows the metrics, and shows hostile text as text."""

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rate_limit.snapshot import Snapshot, SourceSnapshot
from tests.verl_mixed.run_files import metrics_line
from verl_mixed.views.watch.board import board_of
from verl_mixed.views.watch.columns import Pane, column, fitting, table
from verl_mixed.views.watch.screen import ScreenContent, screen
from verl_mixed.views.watch.tails import LogWarning, StuckTrajectory

LINES = [metrics_line(step) for step in range(13)]
STUCK = StuckTrajectory(
    source="nq", row_id="nq:7", turn=2, waits_for="tool", waited_s=60, named_at=120.0
)
CONTENT = ScreenContent(
    board=board_of(LINES, 20),
    total_steps=20,
    now=125.0,
    title="demo  running by process 7 on here",
    limiter=Snapshot(
        per_minute=600,
        burst=10,
        granted=2345,
        utilisation=0.75,
        penalties=0,
        rate_factor=1.0,
        paused_s=0.0,
        abandoned=0,
        sources={"nq": SourceSnapshot(waiting=6)},
    ),
    stuck=[STUCK],
    log_warnings=[
        LogWarning(level="WARNING", text="low on memory", count=1),
        LogWarning(level="ERROR", text="no answer", count=12),
    ],
)
WHOLE = """\
demo  running by process 7 on here
step 12/20  ████████████░░░░░░░░  left 1m20s  last step 5s ago
source  reward        last  mean of 10  since 1st val   val  prompts  solved
math    ▁▂▂▃▄▄▅▅▆▇▇█  0.22        0.17          +0.20  0.40        8     50%
nq      ▅▅▅▅▅▅▅▅▅▅▅▅  0.25        0.25          +0.00  0.25        4     25%
ratio error  0 prompts this step, 0 cumulative
|generation 6.0                                      |policy update 3.0
step 10.0 s  slowest generation 6.0 s; policy update 3.0
limiter      ████████░░ 75% of 600/min  granted 2,345  waiting 6
tool         calls  p50 s  p95 s  errors
python          40   0.50   2.00   25.0%
stuck        nq nq:7 turn 2 waits for tool, 1m05s
log error    12 times: no answer
log warning  low on memory"""


def shown(
    content: ScreenContent, width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """What a terminal of this size shows, line by line."""
    console = Console(file=StringIO(), record=True, width=width, height=height, force_terminal=True)
    console.print(screen(content, width, height, ascii_only=ascii_only))
    return [line.rstrip() for line in console.export_text().rstrip("\n").split("\n")]


def test_a_wait_for_a_tool_server_in_the_newest_step_is_a_warning() -> None:
    waited = metrics_line(13, mixed__nq__server_wait_s__sum=34.0)
    content = replace(CONTENT, board=board_of([*LINES, waited], 20))

    words = "calls of nq waited 34 s for a tool server that was away or overloaded"
    assert f"warning      {words}" in shown(content, 100, 30)


def test_a_terminal_of_80_by_24_shows_everything() -> None:
    assert "\n".join(shown(CONTENT, 80, 24)) == WHOLE


def test_a_terminal_without_unicode_gets_the_same_in_ascii() -> None:
    lines = shown(CONTENT, 80, 24, ascii_only=True)

    assert "\n".join(lines).isascii()
    assert len(lines) == len(WHOLE.split("\n"))
    assert lines[3].startswith("math    _..:--==+**#  0.22")


HOSTILE = "\x1b[2J\x1b]0;t\x07\u202e\u2066[red]x[/red]\r\n\t\x00\x9b31m名"

names = st.one_of(
    st.text(min_size=1, max_size=40).map(lambda name: name.replace("/", "_")), st.just(HOSTILE)
)
values = st.floats(-1e15, 1e15)
numbers = st.sampled_from(
    (
        "mixed/{}/reward/mean",
        "mixed/{}/val/reward/mean",
        "mixed/{}/val/count",
        "mixed/{}/count",
        "mixed/{}/pass_rate",
        "mixed/{}/infra_error_rate",
        "mixed/tools/{}/calls",
        "mixed/tools/{}/error_rate",
        "mixed/tools/{}/latency_s/p95",
        "timing_s/{}",
        "timing_s/step",
        "mixed/limiter/utilisation",
        "mixed/limiter/rate_factor",
        "mixed/ratio_error/max",
    )
)
metrics = st.dictionaries(
    st.builds(lambda number, name: number.format(name), numbers, names),
    st.floats(0, 1) | values,
    max_size=12,
)
texts = st.text(max_size=60) | st.just(HOSTILE * 9)


@given(
    ours=st.lists(metrics, max_size=6),
    width=st.integers(20, 160),
    height=st.integers(3, 50),
    ascii_only=st.booleans(),
    text=texts,
    count=st.integers(0, 30),
)
def test_nothing_is_wider_or_higher_than_the_terminal_or_acts_on_it(
    ours: Sequence[dict[str, float]],
    width: int,
    height: int,
    ascii_only: bool,
    text: str,
    count: int,
) -> None:
    lines = [{"step": n, "time": 5.0 * n, "metrics": each} for n, each in enumerate(ours)]
    content = ScreenContent(
        board=board_of(lines, 9, passed_over=count),
        total_steps=9,
        now=100.0,
        title=text,
        start_up=text,
        stuck=[replace(STUCK, source=text, row_id=text)] * count,
        log_warnings=[LogWarning(level="ERROR", text=text, count=2)] * count,
    )

    drawn = screen(content, width, height, ascii_only=ascii_only)

    rows = drawn.plain.split("\n")
    assert len(rows) <= height
    assert max(cell_len(row) for row in rows) <= width
    assert all(row.isprintable() for row in rows)
    assert any(row.startswith("step ") for row in rows)
    assert not ascii_only or drawn.plain.isascii()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (
            80,
            ["source", "reward", "last", "mean of 10", "since 1st val", "val", "prompts", "solved"],
        ),
        (60, ["source", "reward", "last", "mean of 10", "since 1st val", "prompts"]),
        (50, ["source", "reward", "last", "mean of 10", "since 1st val"]),
        (45, ["source", "reward", "last", "since 1st val"]),
        (32, ["source", "last", "since 1st val"]),
        (20, ["source", "last"]),
    ],
)
def test_a_narrow_terminal_drops_columns_by_importance(width: int, columns: list[str]) -> None:
    head = next(line for line in shown(CONTENT, width, 30) if line.startswith("source"))

    assert [name.strip() for name in head.split("  ") if name.strip()] == columns


@pytest.mark.parametrize("height", range(3, 24))
def test_a_low_terminal_keeps_where_the_run_is_and_then_the_sources(height: int) -> None:
    lines = shown(CONTENT, 80, height)

    assert len(lines) <= height
    assert any(line.startswith("step 12/20") for line in lines)
    assert height < 7 or any(line.startswith("math ") for line in lines)
    assert height < 7 or any(line.startswith("nq ") for line in lines)


def test_many_sources_leave_a_line_that_counts_the_rest() -> None:
    metrics = {f"mixed/s{number:02}/reward/mean": 0.5 for number in range(40)}
    board = board_of([{"step": 1, "time": 0.0, "metrics": metrics}], 9)

    lines = shown(ScreenContent(board=board, total_steps=9, now=0.0), 80, 10)

    assert lines[-1] == "and 33 more"
    assert lines[-2].startswith("s06")


def test_what_was_not_logged_is_not_shown() -> None:
    line: dict[str, Any] = {"step": 3, "time": 0.0, "metrics": {"mixed/a/reward/mean": 0.5}}

    lines = shown(ScreenContent(board=board_of([line], None), total_steps=None, now=60.0), 80, 24)

    assert lines == [
        "step 3/?  last step 1m00s ago",
        "source  reward    last  mean of 10  since 1st val  val  prompts  solved",
        "a       ▅         0.50        0.50              -    -        -       -",
    ]


def test_before_the_first_step_the_start_up_is_shown() -> None:
    content = ScreenContent(
        board=board_of([], 9), total_steps=9, now=0.0, start_up="starting Ray (3s)"
    )

    assert shown(content, 40, 24) == ["step 0/9  starting Ray (3s)"]


def test_without_validation_the_change_is_that_of_training_and_says_so() -> None:
    lines = [{"step": n, "time": 0.0, "metrics": {"mixed/a/reward/mean": n / 10}} for n in (1, 2)]

    (row,) = shown(ScreenContent(board=board_of(lines, 9), total_steps=9, now=0.0), 80, 24)[2:]

    assert "train +0.10" in row


def test_the_phase_bar_is_as_wide_as_the_terminal_and_in_proportion() -> None:
    bar = next(
        line for line in screen(CONTENT, 90, 24).split("\n") if line.plain.startswith("|generation")
    )

    assert [span.end - span.start for span in bar.spans] == [60, 30]


def test_validation_stands_apart_from_the_step_that_does_not_hold_it() -> None:
    lines = [metrics_line(5, timing_s__testing=5.6)]

    rows = shown(ScreenContent(board=board_of(lines, 9), total_steps=9, now=0.0), 80, 24)

    (bar,) = (row for row in rows if row.startswith("|"))
    assert "validation" not in bar
    text = "step 10.0 s  slowest generation 6.0 s; validation +5.6 s; policy update 3.0"
    assert text in rows


def test_before_a_step_was_timed_its_validation_is_the_whole_bar() -> None:
    lines = [metrics_line(0, timing_s__testing=5.6)]

    rows = shown(ScreenContent(board=board_of(lines, 9), total_steps=9, now=0.0), 80, 24)

    assert rows[-2:] == ["|validation 5.6", "seconds      validation 5.6"]


def test_lines_that_were_passed_over_are_a_warning() -> None:
    lines = shown(replace(CONTENT, board=board_of(LINES, 20, passed_over=2)), 80, 24)

    assert any(
        row.endswith("metrics.jsonl: 2 lines cannot be read and were passed over") for row in lines
    )


def test_a_limiter_that_was_slowed_down_or_paused_says_so() -> None:
    assert CONTENT.limiter is not None
    slow = replace(CONTENT.limiter, rate_factor=0.5, paused_s=8.0)

    lines = shown(replace(CONTENT, limiter=slow), 120, 24)

    assert any("slowed down to 50%  paused for 8s" in line for line in lines)


def test_without_a_limiter_to_look_at_the_last_step_is_quoted() -> None:
    lines = shown(replace(CONTENT, limiter=None), 80, 24)

    assert any(line.endswith("40%  granted 1,234  waiting 3  at the last step") for line in lines)


def test_the_longest_stuck_come_first_and_the_rest_are_counted() -> None:
    stuck = [replace(STUCK, row_id=f"r{n}", waited_s=float(n)) for n in range(9)]

    lines = shown(replace(CONTENT, stuck=stuck), 80, 24)

    ours = [number for number, line in enumerate(lines) if "waits for" in line]
    assert [lines[number].split()[-7] for number in ours] == ["r8", "r7", "r6"]
    assert lines[ours[-1] + 1] == "and 6 more"


def test_markup_of_a_run_is_text() -> None:
    warned = [LogWarning(level="ERROR", text="[bold]x[/bold] [link=http://a]y[/link]", count=1)]

    lines = shown(replace(CONTENT, log_warnings=warned), 80, 24)

    assert lines[-1] == "log error    [bold]x[/bold] [link=http://a]y[/link]"


def test_a_course_of_many_steps_is_drawn_as_means_of_equally_many() -> None:
    lines = [
        {"step": n, "time": 0.0, "metrics": {"mixed/a/reward/mean": float(n > 500)}}
        for n in range(1, 1001)
    ]

    row = shown(ScreenContent(board=board_of(lines, 1000), total_steps=1000, now=0.0), 120, 24)[2]

    assert row.split()[1] == "▁" * 20 + "█" * 20


@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), max_size=6),
    height=st.integers(0, 40),
)
def test_panes_fill_the_height_or_are_shown_whole(
    counts: list[tuple[int, int, int]], height: int
) -> None:
    panes = [
        Pane(lines=[Text(str(n))] * count, importance=importance, least=least)
        for n, (count, importance, least) in enumerate(counts)
    ]
    whole = sum(count for count, _, _ in counts)

    lines = fitting(panes, height)

    assert len(lines) <= height
    assert whole > height or len(lines) == whole
    for n, (count, _, least) in enumerate(counts):
        ours = sum(line.plain == str(n) for line in lines)
        assert ours == 0 or ours >= min(least, count) - 1  # one may count those that are missing


def test_the_first_column_stays_whatever_the_width() -> None:
    columns = [
        column("a", 1, [Text("x" * 30)], "left"),
        column("b", 2, [Text("y")]),
    ]

    assert [line.plain for line in table(columns, 10)] == ["a", "x" * 30]
