"""An error is one message, with its place and a remedy, and an exit code; never a trace."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from config.disk import write_whole
from config.environment import DASHBOARD_PORT
from verl_mixed.checks.machine.machine import ports
from verl_mixed.cli import main
from verl_mixed.run.settings import overrides_from
from verl_mixed.run.state import RunFolder
from verl_mixed.run.versions import note

DEEP = "[" * 20_000


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things that commands cannot use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes(b"a: [1\n\x00")
    (tmp_path / "deep.yaml").write_text(DEEP)
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("tran", 2, "no command 'tran': did you mean train?"),
        ("zzzzzz", 2, "one of train, check"),
        ("report run", 1, "run/config.yaml: "),
        ("audit run", 1, "move the run's folder away"),
        ("stop none", 2, "no run in "),
        ("stop none --grace nan", 2, "'nan': want seconds"),
        ("stop none --grace -5", 2, "want seconds"),
        ("stop none --grace x", 2, "'x': want seconds"),
        ("limiter none", 2, "no limiter at none"),
        ("limiter none --ray 127.0.0.1:1", 1, "nothing listens there"),
        ("serve-tools --settings [1]", 2, "want an object"),
        (f"serve-tools --settings {DEEP}", 2, "is not JSON"),
        ("prepare corpus --input bad.jsonl", 1, "line 1"),
        ("prepare corpus --input none.jsonl", 2, "no such file"),
        ("check --config deep.yaml", 2, "correct the YAML"),
        ("check --config binary.yaml", 2, "correct the YAML"),
        ("check mixed.seed=[1", 2, "mixed.seed=[1: Hydra cannot read this value"),
        (f"check mixed.seed={DEEP}", 2, "[[[["),
        ("train --log-file none/x.log", 1, "none/x.log: No such file"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_mistake_is_one_message(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    try:
        answer = main(words.split())
    except SystemExit as ended:  # argparse
        answer = ended.code
    shown = capsys.readouterr().err
    assert answer == code
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOLCK, errno.ESTALE, errno.EIO]
)
def test_an_error_of_the_system_names_file_and_remedy(
    number: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (place / "run" / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["stop", "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}/run/.lock: {os.strerror(number)}; ")


@pytest.mark.parametrize("reader", ["ends", "is full"])
def test_an_output_that_cannot_be_written_is_one_message(reader: str):
    command = f"{sys.executable} -m verl_mixed diagnose --list"
    command += " >/dev/full" if reader == "is full" else " | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command}; exit $?"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("torn", ['{"commit": "a', "[1]\n", '{"commit": "a"}\n', "\x00\x01"])
def test_a_torn_line_of_versions_fails_no_start(torn: str, tmp_path: Path):
    path = tmp_path / "versions.jsonl"
    first = {"commit": "a", "packages": {"ray": "1"}}
    note(path, first)
    with path.open("a") as file:
        file.write(torn)
    assert note(path, first | {"commit": "b"}) == ["commit: a -> b"]
    assert json.loads(path.read_text().splitlines()[-1])["commit"] == "b"
    assert note(path, first) == ["commit: b -> a"]


@pytest.mark.parametrize("name", ["link", "device", "folder", "pipe"])
def test_only_a_regular_file_is_replaced(name: str, tmp_path: Path):
    path, target = tmp_path / name, tmp_path / "target"
    target.write_text("old")
    if name == "link":
        path.symlink_to(target)
        write_whole(path, [b"new"])
        assert path.is_symlink() and target.read_text() == "new"
        return
    if name == "device":
        path.symlink_to("/dev/null")
    elif name == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(path, [b"new"])
    assert path.exists() and not path.is_file()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a b", "a|b"),
        ("a, b c", "a|b c"),
        ("b c,", "b c"),
        ("[a, b]", "a|b"),
        ("'b c' d", "b c|d"),
        ("with space", "with space"),
    ],
)
def test_files_may_have_spaces_in_their_names(
    text: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("with space").touch()
    quoted = ",".join(f"'{tmp_path / name}'" for name in names.split("|"))
    assert overrides_from({"TRAIN_FILES": text}) == [f"data.train_files=[{quoted}]"]


def test_a_taken_port_of_the_dashboard_is_no_fault_of_the_config():
    config = {"ray_kwargs": {"ray_init": {"dashboard_port": DASHBOARD_PORT}}}
    try:
        holder = socket.create_server(("127.0.0.1", DASHBOARD_PORT))
    except OSError:  # another holds it already
        holder = socket.socket()
    with holder:
        assert [found.status for found in ports(config)] == ["ok"]
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            config["ray_kwargs"]["ray_init"]["dashboard_port"] = taken
            assert [found.status for found in ports(config)] == ["bad"]


def test_a_folder_of_another_user_is_named(place: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place / "run"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="run"), RunFolder(place / "run").claim():
        pass
