"""`verl-mixed report`: the files that it writes."""

import csv
import struct
from pathlib import Path

import pytest

from tests.fakes.run_folder import write_run
from verl_mixed.cli import main
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report.charts import IMAGE_COLUMNS, IMAGE_SIZE
from verl_mixed.views.report.files import write_csv
from verl_mixed.views.report.runs import load_run
from verl_mixed.views.report.sections import sections_of


def test_a_page_is_written_beside_the_run_and_its_name_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", 3)

    assert main(["report", str(tmp_path / "run")]) == 0

    page = tmp_path / "run/report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_folder_that_is_no_run_is_named_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", 3)

    assert main(["report", str(tmp_path / "run"), str(tmp_path / "nowhere")]) == 2

    assert "not a run's folder" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "run/comparison.html").exists()


def test_several_runs_go_into_one_page_with_names_that_tell_them_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("a", "b"):
        write_run(tmp_path / place / "trial", 3)
    folders = [str(tmp_path / place / "trial") for place in ("a", "b")]

    assert main(["report", *folders, "--output", str(tmp_path / "out.html"), "--csv"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "out.html"),
        str(tmp_path / "out.csv"),
    ]
    assert all(f"<h1>{folder}</h1>" in (tmp_path / "out.html").read_text() for folder in folders)


def test_the_table_holds_every_number_of_the_metrics(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", 12)

    write_csv([load_run(RunFolder(tmp_path / "run"))], tmp_path / "run.csv")

    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(13))
    for line, row in zip(lines, rows, strict=True):
        logged = {k: float(v) for k, v in row.items() if v and k not in ("run", "step", "time")}
        assert logged == line["metrics"]
        assert (row["run"], float(row["time"])) == ("run", line["time"])


@pytest.mark.slow
def test_the_image_shows_every_chart_of_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 12)
    run = load_run(RunFolder(tmp_path / "run"))

    assert main(["report", str(tmp_path / "run"), "--png"]) == 0

    charts = sum(len(section.panels) for section in sections_of(run))
    page = (tmp_path / "run/report.html").read_text()
    assert charts == page.count('class="chart"') - 1  # the first screen repeats one
    image = (tmp_path / "run/report.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width > IMAGE_COLUMNS * IMAGE_SIZE[0]
    assert height > charts // IMAGE_COLUMNS * IMAGE_SIZE[1]
    assert len(image) > 100_000  # curves, areas and text; an empty sheet has a tenth


@pytest.mark.parametrize("place", ["missing/page.html", "folder"])
def test_a_page_that_cannot_be_written_is_an_error_in_words_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_run(tmp_path / "run", 3)
    (tmp_path / "folder").mkdir()

    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / place)]) == 1

    said = capsys.readouterr()
    assert said.err.startswith("error: /") and place in said.err and said.out == ""
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["page.csv", "page.PNG"])
def test_a_page_that_a_table_or_an_image_would_replace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_run(tmp_path / "run", 3)

    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / name), "--csv"]) == 2

    assert "name it *.html" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
