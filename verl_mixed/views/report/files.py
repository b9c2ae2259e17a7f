"""Writers of the files of a report: the page, the image, the table.

A file is replaced at once: a reader sees the old file or the new one, never a part.
"""

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from agent_loop.records.run_folder import write_text
from config.disk import write_whole
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report.charts import image
from verl_mixed.views.report.mixture import mixture_verdict
from verl_mixed.views.report.opening import improvement_lines, limit_sentence
from verl_mixed.views.report.page import render
from verl_mixed.views.report.runs import Run, load_run
from verl_mixed.views.report.sections import sections_of

LONGEST_LINE = 220
"""Characters of a line of text in the image."""


def write_report(folder: RunFolder) -> None:
    """Write `report.html` of a run, finished or not.

    Raises:
        ValueError: it is not a run's folder.
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
    """Write every chart of the runs as one image, below the sentences of the first screen."""
    groups = []
    for run in runs:
        sentences = [run.status, *improvement_lines(run), mixture_verdict(run), limit_sentence(run)]
        panels = [panel for section in sections_of(run) for panel in section.panels]
        lines = [line for text in sentences for line in textwrap.wrap(text, LONGEST_LINE)]
        groups.append((run.name, lines, panels))
    write_whole(path, [image(groups)])
