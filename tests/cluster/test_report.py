"""The HTML page of a run."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.compose import save_config
from cluster.report import Curve, chart, moving_average, render

VOID = {"meta", "line", "circle", "polyline"}


class Balance(HTMLParser):
    """Holds the tags that are still open, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID or tag == "polyline" or tag == "circle":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def half_way() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": 0, "time": 1.0, "metrics": {"mixed/math/val/reward/mean": 0.25}}
    ]
    for step in range(1, 5):
        metrics = {
            "mixed/math/reward/mean": 0.2 * step,
            "mixed/math/count": 8,
            "mixed/math/turns/mean": 2.0,
            "mixed/ratio_error/max": 0,
            "timing_s/step": 2.0,
            "timing_s/gen": 1.5,
        }
        lines.append({"step": step, "time": 1.0 + step, "metrics": metrics})
    lines[-1]["metrics"]["mixed/math/val/reward/mean"] = 0.75
    return lines


def test_a_page_shows_validation_mixture_and_times() -> None:
    page = render("trial", half_way(), {"trainer": {"total_training_steps": 9}})

    for words in (
        "4 of 9 steps",
        "<td>math</td><td>0.250</td><td>0.750</td><td>0.500</td>",
        "every batch held exactly the planned prompts",
        "<td>prompts trained</td><td>32</td>",
        "<td>gen</td><td>1.500</td>",
    ):
        assert words in page


def test_a_page_is_well_formed_and_loads_nothing() -> None:
    parser = Balance()

    parser.feed(render("a <b> & c", half_way(), {"key": "<script>"}))

    assert parser.open == []
    assert parser.loads == []


def test_names_and_values_are_escaped() -> None:
    page = render("a <b> & c", half_way(), {"key": "<script>"})

    assert "<script>" not in page
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in page


def test_a_batch_off_its_plan_is_said() -> None:
    lines = half_way()
    lines[2]["metrics"]["mixed/ratio_error/max"] = 3

    assert "a batch was 3 prompts off its plan" in render("trial", lines, {})


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_that_has_hardly_begun_gives_a_page(count: int) -> None:
    assert "<h2>Time</h2>" in render("trial", half_way()[:count], {})


def test_the_moving_average_looks_back_only() -> None:
    points = [(1, 0.0), (2, 2.0), (3, 4.0), (4, 6.0)]

    assert moving_average(points, over=2) == [(1, 0.0), (2, 1.0), (3, 3.0), (4, 5.0)]


def test_a_chart_of_equal_values_has_an_axis() -> None:
    svg = chart([Curve(name="a", points=[(3, 1.0)])], {})

    assert "nan" not in svg and "polyline" in svg


def test_the_command_writes_the_page_and_refuses_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config({"trainer": {"total_training_steps": 9}}, tmp_path / "config.yaml")

    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "not a run's folder" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
