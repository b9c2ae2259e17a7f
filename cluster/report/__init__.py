"""What a run shows after, or half-way through: one HTML page, an image, a table."""

from cluster.report.files import write_report
from cluster.report.page import render
from cluster.report.runs import Run, load_run

__all__ = ["Run", "load_run", "render", "write_report"]
