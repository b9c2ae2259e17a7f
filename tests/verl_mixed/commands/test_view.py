"""`verl-mixed view` from its words to its exit code."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from config.schema import ConfigError
from tests.verl_mixed.views.viewer.episodes import line, write_run
from verl_mixed.cli import main
from verl_mixed.commands.view import add_arguments, run
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE

REPO_ROOT = Path(__file__).resolve().parents[3]

SERVE = """
import argparse, signal, sys
from pathlib import Path
from verl_mixed.commands.view import add_arguments, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
parser = argparse.ArgumentParser()
add_arguments(parser)
try:
    sys.exit(run(parser.parse_args()))
except KeyboardInterrupt:
    sys.exit(130)
"""


def view(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def a_run(tmp_path: Path) -> Path:
    lines = [
        line(source=source, step=step, reward=step / 2)
        for source in ("math", "nq")
        for step in (1, 2, 3)
    ]
    return write_run(tmp_path / "run", lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "6 of 6"),
        (["--source", "nq"], "3 of 3"),
        (["--step", "2-3", "--most", "3"], "3 of 4 trajectories, 0.0 MB; --most 4 takes all"),
        (["--reward", "0.5"], "2 of 2"),
        (["--reward", ":1"], "4 of 4"),
        (["--reward", "1:"], "4 of 4"),
        (["--outcome", "solved", "--text", "answer"], "4 of 4"),
    ],
)
def test_html_takes_what_its_filters_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
):
    page = tmp_path / "page.html"
    assert view(a_run(tmp_path), "--html", page, *words) == GOOD
    assert capsys.readouterr().out.startswith(f"{page}: {says}")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "words",
    [
        *(["--step", text] for text in ("x", "7-3", "3-", "9" * 30, "9" * 5000)),
        *(["--reward", text] for text in ("a:b", "nan", ":inf", "nan:1", "1:0")),
        *(["--most", "0"], ["--port", "65536"], ["--port", "-1"]),
    ],
)
def test_words_that_mean_nothing_are_refused(tmp_path: Path, words: list[str]):
    with pytest.raises(SystemExit) as ended:
        view(a_run(tmp_path), *words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--source", "nx"], "error: --source nx: not in this run; it has math, nq\n"),
        (["--source", "\x1b[31m"], "error: --source  [31m: not in this run; it has math, nq\n"),
        (["--source", "\udcff"], "error: --source  : not in this run; it has math, nq\n"),
        (["--outcome", "solvd"], "error: --outcome solvd: not in this run; it has solved, unsolv"),
    ],
)
def test_names_that_the_run_has_not_are_refused_and_the_known_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
):
    command = ["view", str(a_run(tmp_path)), "--html", str(tmp_path / "page.html"), *words]
    assert main(command) == USAGE
    assert capsys.readouterr().err.startswith(says)
    assert not (tmp_path / "page.html").exists()


def test_a_run_of_which_old_files_are_gone_is_shown_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir, page = a_run(tmp_path), tmp_path / "page.html"
    assert view(run_dir, "--html", page) == GOOD
    with (run_dir / "config.yaml").open("a") as config:
        config.write("mixed: {trajectory_keep: 2}\n")
    (run_dir / "trajectories" / "1.jsonl").unlink()
    capsys.readouterr()

    assert view(run_dir, "--html", page) == GOOD
    shown = capsys.readouterr()
    note = "some trajectories may have no file: mixed.trajectory_keep=2"
    assert shown.out.startswith(f"{page}: 4 of 4") and f"note: {note}" in shown.err
    assert note in page.read_text()
    assert view(run_dir, "--html", page, "--step", "1") == GOOD
    assert capsys.readouterr().out.startswith(f"{page}: 0 of 0")


@pytest.mark.parametrize("outcome", ["lost", "tool error", "max_turns"])
def test_an_outcome_that_nothing_had_is_none_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str
):
    page = tmp_path / "page.html"
    assert view(a_run(tmp_path), "--html", page, "--outcome", outcome) == GOOD
    assert capsys.readouterr().out.startswith(f"{page}: 0 of 0")


def test_an_index_that_cannot_be_made_anywhere_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run_dir = a_run(tmp_path)
    (run_dir / "viewer.sqlite").mkdir()  # root may write everywhere, but not here
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert view(run_dir, "--html", tmp_path / "page.html") == NOT_GOOD
    assert f"error: cannot make an index in {run_dir} or in" in capsys.readouterr().err


def test_folder_that_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a run's folder"):
        view(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "nowhere" / "page.html"
    assert view(a_run(tmp_path), "--html", page) == NOT_GOOD
    assert f"cannot write {page}: No such file" in capsys.readouterr().err


def test_a_folder_in_the_pages_place_stays_and_nothing_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "page.html").mkdir()
    run_dir = a_run(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert view(run_dir, "--html", tmp_path / "page.html") == NOT_GOOD
    assert "cannot write" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_run_without_trajectories_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = write_run(tmp_path / "run", [])
    assert view(run_dir, "--html", tmp_path / "page.html") == GOOD
    assert f"note: no trajectory in {run_dir}/trajectories yet" in capsys.readouterr().err


def test_page_is_served_on_loopback_until_interrupted(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(a_run(tmp_path))],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[0]
        tunnel = process.stdout.readline()
        with urllib.request.urlopen(address) as answer:
            page = answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""
    port = address.removeprefix("http://127.0.0.1:").rstrip("/")
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
    assert page.startswith("<!doctype html>")


def test_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert view(a_run(tmp_path), "--port", port) == NOT_GOOD
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
