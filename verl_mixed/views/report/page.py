"""The page: one HTML file with everything in it, light and dark, that runs no script. Pure."""

from collections.abc import Sequence

from verl_mixed.views.report.charts import (
    STYLE_DARK,
    STYLE_LIGHT,
    axes_of,
    buckets_for,
    draw,
    words,
)
from verl_mixed.views.report.comparison import comparison, differing_keys
from verl_mixed.views.report.opening import head, opening
from verl_mixed.views.report.panels import Section
from verl_mixed.views.report.runs import Run
from verl_mixed.views.report.sections import sections_of
from verl_mixed.views.report.tables import Table, html

_COLORS_LIGHT = (
    "--ink:#1c1f24;--soft:#5d6571;--line:#dfe3e8;--page:#fff;--card:#f6f7f9;"
    "--good:#1d7a3c;--bad:#b3203f"
)
_COLORS_DARK = (
    "--ink:#e4e7ec;--soft:#9aa3b0;--line:#343a44;--page:#14171c;--card:#1c2027;"
    "--good:#63c283;--bad:#f0819c"
)
_STYLE = (
    f":root{{color-scheme:light dark;{_COLORS_LIGHT}}}{STYLE_LIGHT}"
    f"@media (prefers-color-scheme:dark){{:root{{{_COLORS_DARK}}}{STYLE_DARK}}}"
    """
*{box-sizing:border-box}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);
max-width:1240px;margin:0 auto;padding:14px 20px 60px;overflow-wrap:break-word}
h1{font-size:20px;margin:0} h2{font-size:16px;margin:34px 0 8px}
h3{font-size:14px;margin:10px 0 4px}
p{margin:4px 0;color:var(--soft)} summary{color:var(--soft);cursor:pointer;margin:8px 0}
.cards,.panels{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.cards{margin-top:12px;grid-template-columns:minmax(0,6fr) minmax(0,5fr)}
.card{background:var(--card);border-radius:8px;padding:10px 14px}
.card h2{margin:0 0 6px} .panels{gap:22px 26px;margin:10px 0}
.runs{grid-template-columns:repeat(var(--runs),minmax(0,1fr))}
@media (max-width:760px){.cards,.panels,.runs{grid-template-columns:minmax(0,1fr)}}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-variant-numeric:tabular-nums;
margin:6px 0}
th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--line);
vertical-align:top;max-width:46rem}
.whole{white-space:nowrap}
th{font-weight:600;color:var(--soft)} th:first-child,td:first-child{text-align:left}
.good{color:var(--good);font-weight:600} .bad{color:var(--bad);font-weight:600}
svg{width:100%;height:auto;display:block} nav a{color:var(--soft);margin-right:14px}
"""
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page loads nothing and runs nothing, whatever a name in it says."""


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of several beside each other.

    Args:
        runs: at least one.
    """
    sections = [sections_of(run) for run in runs]
    compared = [comparison(runs)] if len(runs) > 1 else []
    every = [section for own in (*sections, compared) for section in own]
    buckets = buckets_for(panel for section in every for panel in section.panels)
    titles = [section.title for section in (*compared, *sections[0])]
    names = [run.name for run in runs]
    body = [
        f"<header>{''.join(head(run) for run in runs)}</header>",
        _contents([*titles, "Config"]),
        opening(runs, sections[0]),
        _thinned(runs, buckets),
        *(_section(section.title, [section], [], buckets) for section in compared),
        *(_section(own[0].title, own, names, buckets) for own in zip(*sections, strict=True)),
        _config(runs),
    ]
    name = " and ".join(names)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{words(name)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _contents(titles: Sequence[str]) -> str:
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title in titles)
    return f"<nav>{links}</nav>"


def _section(title: str, own: Sequence[Section], names: Sequence[str], buckets: int) -> str:
    """One section of all runs; charts of several stand side by side with the same axes."""
    drawn = any(section.panels or section.tables for section in own)
    parts = [f'<section><h2 id="{_anchor(title)}">{title}</h2>']
    if not drawn:
        return f"{parts[0]}<p>{words(own[0].missing)}</p></section>"
    if len(own) == 1:
        parts += [f"<p>{words(note)}</p>" for note in own[0].notes]
        parts.append(_grid([draw(panel, None, buckets) for panel in own[0].panels]))
        parts += [html(table) for table in own[0].tables]
        return "".join(parts) + "</section>"
    for title_of_panel in dict.fromkeys(panel.title for s in own for panel in s.panels):
        panels = [
            next((panel for panel in section.panels if panel.title == title_of_panel), None)
            for section in own
        ]
        axes = axes_of([panel for panel in panels if panel is not None])
        figures = [
            f"<div><h3>{words(name)}</h3>"
            f"{'<p>not logged</p>' if panel is None else draw(panel, axes, buckets)}</div>"
            for name, panel in zip(names, panels, strict=True)
        ]
        parts.append(f'<div class="panels runs" style="--runs:{len(own)}">{"".join(figures)}</div>')
    for name, section in zip(names, own, strict=True):
        if section.panels or section.tables:
            text = [*(f"<p>{words(note)}</p>" for note in section.notes)]
            text += [html(table) for table in section.tables]
        else:
            text = [f"<p>{words(section.missing)}</p>"]
        parts.append(f"<h3>{words(name)}</h3>{''.join(text)}")
    return "".join(parts) + "</section>"


def _grid(figures: Sequence[str]) -> str:
    cells = "".join(f"<div>{figure}</div>" for figure in figures)
    return f'<div class="panels">{cells}</div>' if figures else ""


def _thinned(runs: Sequence[Run], buckets: int) -> str:
    """Said where charts do not draw every step."""
    if all(len(run.lines) <= 2 * buckets for run in runs):
        return ""
    return (
        f"<p>Of more than {2 * buckets} steps, curves are drawn through the smallest and the "
        f"largest value of each of {buckets} equal parts, so that no extreme is lost; areas are "
        "means of the parts. The CSV file has every step.</p>"
    )


def _config(runs: Sequence[Run]) -> str:
    parts = ['<section><h2 id="config">Config</h2>']
    if not any(run.config for run in runs):
        return parts[0] + "<p>There is no config.yaml.</p></section>"
    if len(runs) > 1:
        differing = differing_keys(runs)
        parts.append(html(differing) if differing.rows else "<p>The runs have the same config.</p>")
    keys = sorted({key for run in runs for key in run.config})
    rows = [[key, *(run.config.get(key, "absent") for run in runs)] for key in keys]
    names = ["value"] if len(runs) == 1 else [run.name for run in runs]
    table = Table(head=("key", *names), rows=rows, folded=f"All {len(keys)} keys")
    return "".join([*parts, html(table)]) + "</section>"
