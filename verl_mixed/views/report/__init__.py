"""The report of one run or several, finished or not: an HTML page, an image, a CSV table."""

from verl_mixed.views.report.files import write_report
from verl_mixed.views.report.page import render
from verl_mixed.views.report.runs import Run, load_run

__all__ = ["Run", "load_run", "render", "write_report"]
