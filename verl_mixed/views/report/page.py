"""The HTML page of a report: one file with its scripts and styles, light and dark.

The page loads nothing. Its Content-Security-Policy forbids the network, and allows two scripts by
their hashes: the drawing library and `templates/page.js`. A script that a name of a run smuggled
into the page would not be executed.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from verl_mixed.views.estimates import comparison_words
from verl_mixed.views.progress import warnings_of
from verl_mixed.views.report import charts, opening
from verl_mixed.views.report.comparison import comparison, config_rows, differing_keys
from verl_mixed.views.report.mixture import mixture_verdict
from verl_mixed.views.report.panels import NOTHING_YET, Section, Table
from verl_mixed.views.report.runs import Run
from verl_mixed.views.report.sections import sections_of
from verl_mixed.views.report.text import cell, plain

if TYPE_CHECKING:
    from jinja2 import Environment


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of several beside each other; at least one."""
    sections = [sections_of(run) for run in runs]
    compared = [comparison(runs)] if len(runs) > 1 else []
    every = [section for own in (*sections, compared) for section in own]
    buckets = charts.buckets_for(panel for section in every for panel in section.panels)
    scripts = [_inside_script(text) for text in (charts.drawing_scripts(), _text("page.js"))]
    template = _environment().get_template("page.html")
    return template.render(
        runs=runs,
        first_panel=opening.chart_of_rewards(sections[0]) if len(runs) == 1 else None,
        sections=[*([section] for section in compared), *zip(*sections, strict=True)],
        config=_config(runs),
        differing=differing_keys(runs),
        thinned=any(len(run.lines) > 2 * buckets for run in runs),
        charts=_Charts(buckets=buckets),
        style=_text("page.css"),
        scripts=scripts,
        policy=_policy(scripts),
    )


@dataclass(kw_only=True)
class _Charts:
    """The charts of a page, numbered as the templates add them."""

    buckets: int
    shared: dict[str, Any] = field(default_factory=charts.shared_specification)
    own: list[dict[str, Any]] = field(default_factory=list)

    def add(self, panel: charts.Panel, axes: charts.Axes | None = None) -> int:
        """The number of the panel's chart."""
        self.own.append(charts.specification(panel, axes, self.buckets))
        return len(self.own) - 1


def _rows(own: Sequence[Section]) -> list[list[charts.Panel | None]]:
    """Panels of the same title, one of each run; None where a run has none."""
    titles = dict.fromkeys(panel.title for section in own for panel in section.panels)
    by_title = [{panel.title: panel for panel in section.panels} for section in own]
    return [[panels.get(title) for panels in by_title] for title in titles]


def _config(runs: Sequence[Run]) -> Table:
    rows = config_rows(runs)
    names = ["value"] if len(runs) == 1 else [run.name for run in runs]
    return Table(head=("key", *names), rows=rows, folded=f"All {len(rows)} keys")


@cache
def _environment() -> "Environment":
    """Templates in which all text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(charts.TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "cell": cell}
    environment.globals |= {
        "NOTHING_YET": NOTHING_YET,
        "COLORS": charts.COLORS,
        "axes_of": charts.axes_of,
        "comparison_words": comparison_words,
        "rows_of": _rows,
        "mixture_verdict": mixture_verdict,
        "opening": opening,
        "warnings_of": warnings_of,
    }
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _text(name: str) -> str:
    return (charts.TEMPLATES / name).read_text(encoding="utf-8")


def _inside_script(script: str) -> str:
    """A script that does not end the HTML element in which it stands."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """A Content-Security-Policy with which a browser executes only these scripts."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"
