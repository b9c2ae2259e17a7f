"""`verl-mixed prepare KIND` on the command line, and real processes that are killed at it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from samplers.rows.records import RecordFile
from samplers.rows.sources import KINDS
from tests.fakes.real_tokenizers import real_tokenizer
from tests.verl_mixed.conftest import REPO_ROOT
from verl_mixed.cli import main

OWN_KIND = '''
from samplers.kind import Kind, Option
from samplers.rows.schema import Row, row_id


def to_row(record, *, split, index, source="riddle", agent="search_agent", shout=False):
    """A riddle."""
    return Row(
        data_source=source,
        agent_name=agent,
        question=record["riddle"].upper() if shout else record["riddle"],
        ability="riddle",
        ground_truth={"target": [record["solution"]]},
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras={},
    )


KIND = Kind(
    name="riddle",
    agent="search_agent",
    to_row=to_row,
    help="riddles and their solutions, 100% mine",
    options=(Option(name="shout", type=bool, default=False, help="in capitals"),),
)
'''


def write_nq(path: Path, rows: int) -> Path:
    records = ({"question": f"who was number {n}", "answer": [f"{n}"]} for n in range(rows))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(*words: str | Path) -> int:
    return main(["prepare", *map(str, words)])


def test_it_says_what_was_read_kept_dropped_and_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = write_nq(Path("nq.jsonl"), 20)
    raw.write_text(raw.read_text() + '{"answer": ["x"]}\n')
    words = ["nq", "--input", raw, "--output", "nq.parquet"]

    assert prepare(*words) == 1
    told = capsys.readouterr()
    assert "error: cannot prepare nq.jsonl line 21: column question" in told.err
    assert os.listdir() == ["nq.jsonl"]

    held = ["--skip-bad", "--validation", "5", "--validation-output", "held.parquet"]
    assert prepare(*words, *held) == 0
    told = capsys.readouterr()
    assert "wrote nq.parquet: 15 rows\nwrote held.parquet: 5 rows\n" in told.out
    cells = [cell.strip() for cell in told.out.replace("\n", "│").split("│")]
    for name, count in (("read", "21"), ("kept", "20"), ("prompt characters, max", "17")):
        assert cells[cells.index(name) + 1] == count
    assert any(cell.startswith("dropped: bad record: column question") for cell in cells)
    assert "20 rows" in told.err  # the bar

    assert prepare(*words, *held) == 0
    assert "nq.parquet holds this already: 15 rows" in capsys.readouterr().out


def test_a_kind_of_ones_own_is_a_path_and_its_options_are_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("riddles.py").write_text(OWN_KIND)
    Path("raw.csv").write_text("riddle,solution\nwhat has keys?,a piano\n")

    words = ["riddles.py", "--input", "raw.csv", "--output", "out.parquet", "--source", "mine"]
    assert prepare(*words, "--shout", "yes") == 0

    (row,) = pq.read_table("out.parquet").to_pylist()
    assert row["prompt"][0]["content"] == "WHAT HAS KEYS?"
    assert row["data_source"] == "mine"
    with pytest.raises(SystemExit, match="0"):
        prepare("riddles.py", "--help")
    assert "100% mine" in capsys.readouterr().out


def test_an_option_of_ones_own_kind_may_not_be_called_as_a_common_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("riddles.py").write_text(OWN_KIND.replace('name="shout"', 'name="limit"'))

    assert prepare("riddles.py", "--input", "raw.csv", "--output", "out.parquet") == 2

    told = capsys.readouterr().err
    assert "error: cannot add option 'limit' of kind='riddle'" in told and "rename" in told


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_tells_its_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        prepare(name, "--help")

    told = " ".join(capsys.readouterr().out.split())
    assert " ".join(KINDS[name].help.split()) in told
    for option in KINDS[name].options:
        assert f"--{option.name.replace('_', '-')} " in told


def test_the_help_of_prepare_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        prepare("--help")

    told = capsys.readouterr().out
    for word in (*KINDS, "demo", "corpus", "examples:", "exit codes:"):
        assert f" {word}" in told or f"\n{word}" in told, word


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["nq", "--input", "gone.jsonl", "--output", "x.parquet"], 2, "no such file"),
        (["nq", "--input", ".", "--output", "x.parquet"], 2, "it is a folder"),
        (["nq", "--input", "nq.jsonl", "--output", "x.json"], 2, "ends in .parquet"),
        (["nq", "--input", "nq.jsonl", "--output", "full.parquet"], 2, "it is a folder"),
        (["nq", "--input", "nq.jsonl", "--output", "x.parquet", "--limit", "0"], 2, "limit=0"),
        (["nq", "--input", "nq.jsonl", "--output", "nq.jsonl/x.parquet"], 1, "choose another"),
        (["math", "--input", "nq.jsonl", "--output", "x.parquet"], 1, "nq.jsonl line 1: column"),
        (["gone.py", "--input", "nq.jsonl", "--output", "x.parquet"], 2, "no such file"),
    ],
)
def test_what_cannot_be_done_is_told_by_word_and_exit_code(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], code: int, why: str
) -> None:
    write_nq(Path("nq.jsonl"), 3)
    Path("full.parquet").mkdir()

    assert prepare(*words) == code

    told = capsys.readouterr().err
    assert "error: " in told and why in told
    assert sorted(os.listdir()) == ["full.parquet", "nq.jsonl"]


def test_prompts_are_measured_with_a_models_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = real_tokenizer("pieces")
    tokenizer.save_pretrained("model")
    questions = ["short", "a question of more words than the other one has"]
    tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in questions]
    Path("raw.json").write_text(json.dumps([{"question": q, "answer": "x"} for q in questions]))
    words = ["nq", "--input", "raw.json", "--output", "x.parquet", "--tokenizer"]

    assert prepare(*words, "model", "--max-prompt-tokens", str(tokens[1] - 1)) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"prompt tokens, max {tokens[0]} " in told + " "
    assert f"longer than max_prompt_tokens={tokens[1] - 1} 1 " in told

    assert prepare(*words, "./nowhere") == 2
    assert "cannot load --tokenizer ./nowhere" in capsys.readouterr().err


# --- processes -----------------------------------------------------------------------------------


def start(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "verl_mixed", "prepare", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(REPO_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that starts these tests in the background has them ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_parts(process: subprocess.Popen[str], state: Path, parts: int) -> None:
    """Until the process has saved some parts, and is still at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if state.exists() and json.loads(state.read_text())["state"]["parts"] >= parts:
            return
        try:
            process.wait(timeout=0.002)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(process.communicate())
    raise AssertionError("no part in a minute")


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The words of a preparation that was done without being cut, its two files last."""
    folder = tmp_path_factory.mktemp("uncut")
    raw = write_nq(folder / "nq.jsonl", 55_000)
    words = ["nq", "--input", raw, "--sample", "50000", "--validation", "0.1"]
    words += ["--output", folder / "whole.parquet"]
    words += ["--validation-output", folder / "whole_held.parquet"]
    assert prepare(*words) == 0
    return words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)]
)
def test_a_killed_process_leaves_no_file_and_the_next_one_goes_on(
    folder: Path, uncut: list[str | Path], sent: signal.Signals, code: int
) -> None:
    out, state = folder / "cut.parquet", folder / ".cut.parquet.draft" / "state.json"
    words = [*uncut[:-3], out, uncut[-2], folder / "held.parquet"]

    process = start(*words)
    wait_for_parts(process, state, 2)
    process.send_signal(sent)
    told = process.communicate()
    assert process.returncode == code, told
    assert not out.exists()
    parts = json.loads(state.read_text())["state"]["parts"]
    assert 2 <= parts < 7
    first = (state.parent / "part-000000.arrow").stat().st_ino

    process = start(*words)
    wait_for_parts(process, state, parts + 1)  # it has begun to work where the other one ended
    assert (state.parent / "part-000000.arrow").stat().st_ino == first
    assert process.wait(timeout=120) == 0
    process.communicate()

    assert out.read_bytes() == Path(uncut[-3]).read_bytes()
    assert (folder / "held.parquet").read_bytes() == Path(uncut[-1]).read_bytes()
    assert sorted(os.listdir(folder)) == ["cut.parquet", "held.parquet"]


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("256k")


def test_a_full_disk_is_told_and_nothing_is_left_on_it(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_nq(Path("nq.jsonl"), 20_000)

    assert prepare("nq", "--input", raw, "--output", small_disk / "x.parquet") == 1

    told = capsys.readouterr().err
    assert f"error: cannot write {small_disk}/x.parquet: No space left on device; make room" in told
    assert os.listdir(small_disk) == []


def test_a_disk_that_takes_no_writing_is_told(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_nq(Path("nq.jsonl"), 10)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    assert prepare("nq", "--input", raw, "--output", small_disk / "x.parquet") == 1

    assert f"cannot write {small_disk}/x.parquet: Read-only file system" in capsys.readouterr().err


def test_an_input_that_may_not_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_nq(tmp_path / "nq.jsonl", 1)
    raw.chmod(0)
    if os.access(raw, os.R_OK):
        pytest.skip("this user may read everything")

    with pytest.raises(PermissionError):
        RecordFile(raw)
    assert prepare("nq", "--input", raw, "--output", "x.parquet") == 1
    assert "Permission denied; make it readable" in capsys.readouterr().err
