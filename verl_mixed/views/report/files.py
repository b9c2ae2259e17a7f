"""Writes what a report is: the page, the image, the table. Readers see the old file or the new."""

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from agent_loop.training.run_folder import write_text, write_whole
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report.charts import HEIGHT, STYLE_LIGHT, WIDTH, draw, words
from verl_mixed.views.report.mixture import mixture_verdict
from verl_mixed.views.report.opening import improvement_lines, limit_sentence
from verl_mixed.views.report.page import render
from verl_mixed.views.report.runs import Run, load_run
from verl_mixed.views.report.sections import sections_of

_COLUMNS, _GAP = 3, 30
"""Of the charts in the image."""


def write_report(folder: RunFolder) -> None:
    """Write `report.html` of a run from what it has so far.

    Raises:
        ValueError: it is no run's folder.
        OSError: a file of it cannot be read, or the page not written.
    """
    write_page([load_run(folder)], folder.report)


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the HTML page."""
    write_text(path, render(runs))


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Write a row a step and a column a metric; a metric that a step did not log is empty."""
    names = sorted({name for run in runs for line in run.lines for name in line["metrics"]})
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "step", "time", *names])
    for run in runs:
        for line in run.lines:
            values = [line["metrics"].get(name, "") for name in names]
            rows.writerow([run.name, line["step"], line["time"], *values])
    write_text(path, text.getvalue())


def write_png(runs: Sequence[Run], path: Path) -> None:
    """Write every chart of the runs as one image.

    Raises:
        ValueError: the library that draws it is not installed.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ValueError(
            f"cannot write {path}: resvg-py is not installed; "
            "pip install 'verl-mixed-agent-loop[png]'"
        ) from error
    write_whole(path, [resvg_py.svg_to_bytes(svg_string=sheet(runs), background="#ffffff")])


def sheet(runs: Sequence[Run]) -> str:
    """All charts as one SVG, under what the first screen of the page says."""
    width = _COLUMNS * (WIDTH + _GAP) + _GAP
    parts: list[str] = []
    y = _GAP
    for run in runs:
        said = [run.status, *improvement_lines(run), mixture_verdict(run), limit_sentence(run)]
        parts.append(f'<text class="name" x="{_GAP}" y="{y + 12}">{words(run.name)}</text>')
        y += 36
        for line in (part for text in said for part in textwrap.wrap(text, 240)):
            parts.append(f'<text class="said" x="{_GAP}" y="{y}">{words(line)}</text>')
            y += 20
        panels = [panel for section in sections_of(run) for panel in section.panels]
        for i, panel in enumerate(panels):
            row, column = divmod(i, _COLUMNS)
            x, top = _GAP + column * (WIDTH + _GAP), y + row * (HEIGHT + _GAP)
            place = f'<svg x="{x}" y="{top}" width="{WIDTH}" height="{HEIGHT}" '
            parts.append(draw(panel).replace("<svg ", place, 1))
        y += -(-len(panels) // _COLUMNS) * (HEIGHT + _GAP) + _GAP
    own = "svg .name{font-size:20px;font-weight:600;fill:#1c1f24}svg .said{font-size:14px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}"><style>{STYLE_LIGHT}{own}</style>{"".join(parts)}</svg>'
    )
