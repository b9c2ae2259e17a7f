"""A file that is read while it grows gives the same result as one that is read whole."""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.run_folder import MetricsFile, write_lines
from agent_loop.watchdog import Watchdog
from tests.json_lines import read_lines
from tests.verl_mixed.run_files import add_line, metrics_line
from verl_mixed.views.watch.board import board_of
from verl_mixed.views.watch.tails import WHOLE_LINES, FileTail, LogTail, MetricsTail

NOT_LINES = (
    b"torn in the mid",
    b"[]",
    b"7",
    b'{"step": "1", "time": 0, "metrics": {}}',
    b'{"step": -1, "time": 0, "metrics": {}}',
    b'{"step": 1, "time": "x", "metrics": {}}',
    b'{"step": 1, "time": 0, "metrics": []}',
    b'{"step": 1, "time": 0}',
    b'{"step": 1, "time": 0, "metrics": {"a": 1%s}}' % (b"0" * 400),
    b"[" * 100_000,
    b"\xff\xfe\x00",
)

LOG_LINES = (
    b"WARNING:2026-11-22 15:33:35,972:low on memory 17 MB\n",
    b"\x1b[36m(Worker pid=7)\x1b[0m 2026-11-22 15:33:35,995 - WARNING - a.b - low on disk\n",
    b"ERROR a tool line [red]no[/red]\x1b]0;title\x07 \xe2\x80\xae\n",
    b"stuck source=nq row_id=a b turn=2 waits_for=engine for_s=60\n",
    b"stuck source=math row_id=7 turn=0 waits_for=tool for_s=60 [repeated 3x across cluster]\n",
    b"Training Progress:  10%|x| 1/10\rTraining Progress:  20%|x| 2/10 WARNING in between\n",
    b"ray init kwargs: {}\n",
    b"all is well\n",
    b"\n",
    b"WARNING " + b"x" * 9000 + b"\n",
)

pieces = st.lists(
    st.one_of(
        st.integers(0, 300).map(lambda step: json.dumps(metrics_line(step)).encode()),
        st.sampled_from(NOT_LINES),
        st.just(b""),
        st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"")),
    ),
    max_size=12,
)


def grown(path: Path, content: bytes, cuts: list[int], tail: MetricsTail | LogTail) -> None:
    """Write a file in pieces, with a look after each."""
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        with path.open("ab") as file:
            file.write(content[start:end])
        tail.read()


@given(pieces=pieces, cuts=st.lists(st.integers(0, 1 << 20), max_size=8), ended=st.booleans())
def test_metrics_say_the_same_however_the_file_came(
    pieces: list[bytes], cuts: list[int], ended: bool
) -> None:
    content = b"\n".join(pieces) + b"\n" * ended
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        tail = MetricsTail(path)
        grown(path, content, cuts, tail)
        path.touch()
        whole = MetricsTail(path)
        whole.read()

    assert (tail.lines, tail.passed_over) == (whole.lines, whole.passed_over)


@given(
    pieces=st.lists(st.sampled_from(LOG_LINES), max_size=12),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=8),
)
def test_a_log_warns_of_the_same_however_it_came(pieces: list[bytes], cuts: list[int]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        tail = LogTail(path, now=lambda: 0.0)
        grown(path, b"".join(pieces), cuts, tail)
        path.touch()
        whole = LogTail(path, now=lambda: 0.0)
        whole.read()

    assert tail.warnings == whole.warnings
    assert tail.stuck() == whole.stuck()
    assert tail.text == whole.text


def test_lines_are_those_that_the_trainer_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(7):
        add_line(path, metrics_line(step))
    tail = MetricsTail(path)

    assert tail.read()
    assert tail.lines == read_lines(path)
    assert not tail.read()


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = FileTail(path)
    path.write_bytes(b"a" * 1000)

    assert list(tail.blocks()) == [(True, b"a" * 1000)]
    assert list(tail.blocks()) == []
    with path.open("ab") as file:
        file.write(b"bc")
    assert list(tail.blocks()) == [(False, b"bc")]


def test_a_line_that_is_not_finished_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    raw = json.dumps(metrics_line(1)).encode()
    path.write_bytes(raw[:50])
    tail = MetricsTail(path)
    tail.read()
    assert (tail.lines, tail.passed_over) == ([], 0)

    with path.open("ab") as file:
        file.write(raw[50:] + b"\n")
    tail.read()

    assert tail.lines == [metrics_line(1)]


@pytest.mark.parametrize("raw", NOT_LINES)
def test_a_finished_line_that_is_none_is_counted_and_passed_over(
    tmp_path: Path, raw: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(metrics_line(2)).encode()
    path.write_bytes(raw + b"\n" + good + b"\n")
    tail = MetricsTail(path)
    tail.read()

    assert tail.lines == [metrics_line(2)]
    assert tail.passed_over == 1


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 2, "metrics": {"a": NaN, "b": "x", "c": [], "d": 1}}\n')
    tail = MetricsTail(path)
    tail.read()

    assert tail.lines == [{"step": 1, "time": 2.0, "metrics": {"d": 1}}]


@pytest.mark.parametrize("grows_longer", [False, True])
def test_steps_that_a_resume_takes_back_are_taken_back(tmp_path: Path, grows_longer: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(9):
        add_line(path, metrics_line(step))
    tail = MetricsTail(path)
    tail.read()

    MetricsFile(path).rewind(4, None)
    for step in range(5, 15 if grows_longer else 6):
        add_line(path, metrics_line(step, moment=1000.0 + step))
    tail.read()

    assert tail.lines == read_lines(path)


@pytest.mark.parametrize("end", [Path.unlink, lambda path: os.truncate(path, 0)])
def test_a_file_that_went_or_was_emptied_leaves_no_lines(
    tmp_path: Path, end: Callable[[Path], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    add_line(path, metrics_line(1))
    tail = MetricsTail(path)
    tail.read()

    end(path)

    assert tail.read()
    assert tail.lines == []


def test_old_lines_are_thinned_and_show_the_same(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [
        metrics_line(
            step,
            critic__score__min=0.0,
            critic__score__max=float(step == 3) + 1,
            mixed__math__val__pass_rate=step / 1000,
            mixed__same__reward__mean=0.5,
            mixed__same__reward__ci95=0.125,
            mixed__openai__gsm8k__reward__mean=step / 1000,
        )
        for step in range(3 * WHOLE_LINES)
    ]
    write_lines(path, lines)
    tail = MetricsTail(path)
    tail.read()

    assert board_of(tail.lines, 1000) == board_of(lines, 1000)
    assert tail.lines[-WHOLE_LINES:] == lines[-WHOLE_LINES:]
    assert "timing_s/gen" not in tail.lines[5]["metrics"]


def log_of(path: Path, text: str, now: float = 1e10, written: float | None = None) -> LogTail:
    path.write_text(text)
    if written is not None:
        os.utime(path, (written, written))
    log = LogTail(path, now=lambda: now)
    log.read()
    return log


def test_a_warning_is_said_once_with_its_count_and_the_newest_is_last(tmp_path: Path) -> None:
    log = log_of(
        tmp_path / "log",
        "\x1b[36m(W pid=1)\x1b[0m WARNING:2026-11-22 15:33:35,972:used 17 MB\n"
        "ERROR: no answer\n"
        "\x1b[36m(W pid=2)\x1b[0m WARNING:2026-11-22 15:34:35,972:used 18 MB"
        "\x1b[32m [repeated 34x across cluster]\x1b[0m\n"
        "a line without\n",
    )

    assert [(w.level, w.text, w.count) for w in log.warnings] == [
        ("ERROR", "no answer", 1),
        ("WARNING", "used 18 MB", 35),
    ]


def test_what_an_earlier_start_warned_of_is_over(tmp_path: Path) -> None:
    log = log_of(
        tmp_path / "log",
        "WARNING of old\nstuck source=a row_id=1 turn=1 waits_for=tool for_s=1000000000\n"
        "ray init kwargs: {}\nWARNING anew\n",
        now=0.0,
    )

    assert [warning.text for warning in log.warnings] == ["anew"]
    assert log.stuck() == []
    assert log.text == "ray init kwargs: {}\nWARNING anew\n"


def test_only_the_end_of_a_long_log_is_looked_at(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", "WARNING long ago\n" + "x" * 300_000 + "\nWARNING now\n")

    assert [warning.text for warning in log.warnings] == ["now"]


def test_a_line_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = log_of(path, "begun\n")
    with path.open("a") as file:
        file.write("WARNING " + "[bold]\u202e\x1b[2J" * 100_000 + "\nWARNING after it\n")
    log.read()

    assert len(log.warnings[0].text) < 5000
    assert log.warnings[0].text.isprintable()
    assert log.warnings[1].text == "after it"


def test_who_the_watchdog_names_is_stuck_until_it_would_name_it_again(tmp_path: Path) -> None:
    seconds = 0.0
    dog = Watchdog(stuck_after_s=60.0, clock=lambda: seconds)
    with dog.watch("nq", "nq:7 b") as activity:
        activity.note("tool", turn=3)
        activity.since, seconds = 0.0, 64.0
        (line,) = dog.report()
    now = 5000.0
    path = tmp_path / "log"
    path.write_text("")
    log = LogTail(path, now=lambda: now)
    log.read()
    with path.open("a") as file:
        file.write(f"(W pid=3) WARNING:2026-11-22 09:19:52,042:{line}\n")
    log.read()

    (stuck,) = log.stuck()
    assert (stuck.source, stuck.row_id, stuck.turn, stuck.waits_for) == ("nq", "nq:7 b", 3, "tool")
    assert stuck.describe(now=5010.0) == "nq nq:7 b turn 3 waits for tool, 1m14s"
    now = 5000.0 + 64 + 60 / 4  # named again by then, had it gone on
    assert log.stuck() == [stuck]
    now = 5000.0 + 64 * 1.5 + 1
    assert log.stuck() == []


def test_a_log_that_was_there_before_was_written_at_its_files_time_at_the_latest(
    tmp_path: Path,
) -> None:
    line = "stuck source=a row_id=1 turn=1 waits_for=engine for_s=100\n"

    assert log_of(tmp_path / "new", line, now=1150.0, written=1010.0).stuck() != []
    assert log_of(tmp_path / "old", line, now=1300.0, written=1010.0).stuck() == []
