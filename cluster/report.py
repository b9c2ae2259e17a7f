"""One self-contained HTML page of a run: curves, tables, config. No network, no script.

Pure functions from the lines of `metrics.jsonl` to text; only `write_report` touches files. A run
that is half-way, or has not begun, gives a page too.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from cluster.compose import flatten, load_config
from cluster.progress import (
    Line,
    phase_times,
    ratio_error,
    series,
    sources_of,
    validation_changes,
    warnings_of,
)
from cluster.run_state import RunFolder

COLORS = ("#3b7dd8", "#d9702f", "#3d9a5b", "#a355c4", "#c43d5e", "#8a7a2b")
"""One per source, in order of names; read well on light and dark."""

AVERAGE_OVER = 5
"""Steps of the moving average."""

Points = Sequence[tuple[int, float]]

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c1f24; --soft: #68707c; --line: #d9dde3; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --soft: #949ca8; --line: #363c46; --page: #14171c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p, figcaption, summary { color: var(--soft); } figure { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; } .grid { stroke: var(--line); }
.bad { color: #c43d5e; font-weight: 600; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Points
    faint: bool = False
    """Drawn thin behind the others and left out of the legend."""

    dots: bool = False


def moving_average(points: Points, over: int = AVERAGE_OVER) -> list[tuple[int, float]]:
    """Mean of each point and those before it, `over` at most."""
    return [
        (step, fmean(value for _, value in points[max(0, i + 1 - over) : i + 1]))
        for i, (step, _) in enumerate(points)
    ]


def chart(curves: Sequence[Curve], colors: Mapping[str, str], *, least: float | None = None) -> str:
    """An SVG line chart.

    Args:
        curves: any number, each with any number of points.
        colors: curve name -> color.
        least: lower end of the value axis; None takes the smallest value.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return "<p>nothing yet</p>"
    width, height, left, bottom, top = 860.0, 260.0, 46.0, 24.0, 8.0
    steps, values = [step for step, _ in points], [value for _, value in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(values) if least is None else least, max(values)
    if high <= low:
        high = low + 1

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * (width - left - 8)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {width:g} {height:g}" role="img">']
    for quarter in range(5):
        value = low + (high - low) * quarter / 4
        at = f"{y(value):.1f}"
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 8:g}" y1="{at}" y2="{at}"/>'
            f'<text x="{left - 6}" y="{at}" dy="4" text-anchor="end">{value:.3g}</text>'
        )
    for step in sorted({round(first + (last - first) * i / 5) for i in range(6)}):
        parts.append(
            f'<text x="{x(step):.1f}" y="{height - 6:g}" text-anchor="middle">{step}</text>'
        )
    for curve in curves:
        color = colors.get(curve.name, COLORS[0])
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve.points)
        look = 'stroke-width="1" opacity="0.35"' if curve.faint else 'stroke-width="2"'
        title = f"<title>{escape(curve.name)}</title>"
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" {look}>{title}</polyline>'
        )
        if curve.dots:
            parts += [
                f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="{color}">'
                f"<title>{escape(curve.name)} step {step}: {value:.3f}</title></circle>"
                for step, value in curve.points
            ]
    names = dict.fromkeys(curve.name for curve in curves if not curve.faint)
    legend = "  ".join(
        f'<span style="color:{colors.get(name, COLORS[0])}">&#9632;</span> {escape(name)}'
        for name in names
    )
    return "".join(parts) + f"</svg><figcaption>{legend}; x: step</figcaption>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table; numbers are shown with three places."""

    def cell(value: object) -> str:
        return escape(f"{value:.3f}" if isinstance(value, float) else str(value))

    body = "".join(
        "<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def render(name: str, lines: Sequence[Line], config: Mapping[str, object]) -> str:
    """The page.

    Args:
        name: of the run.
        lines: of `metrics.jsonl`.
        config: resolved run config.
    """
    sources = sources_of(lines)
    colors = {source: COLORS[i % len(COLORS)] for i, source in enumerate(sources)}
    trained = [line for line in lines if line["step"] > 0]
    last = trained[-1]["step"] if trained else 0
    flat = flatten(config)
    total = flat.get("trainer.total_training_steps", "?")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(lines[-1]["time"])) if lines else "never"
    sections = [
        ("Validation reward", _validation(lines, sources, colors)),
        ("Training reward", _training(lines, sources, colors)),
        ("Mixture", _mixture(trained, sources)),
        ("Trajectories", _trajectories(trained, sources)),
        ("Time", _times(trained, colors)),
        ("Config", _config(flat)),
    ]
    warnings = "".join(f"<p><strong>{escape(text)}</strong></p>" for text in warnings_of(lines))
    body = warnings + "".join(
        f"<section><h2>{title}</h2>{text}</section>" for title, text in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(name)}</h1><p>{last} of {escape(str(total))} steps, last metrics {when}</p>"
        f"{body}</body></html>\n"
    )


def write_report(folder: RunFolder) -> None:
    """Write `report.html` of a run from what it has so far."""
    config = load_config(folder.config) if folder.config.exists() else {}
    draft = folder.report.with_suffix(".tmp")
    draft.write_text(render(folder.path.name, folder.lines(), config), encoding="utf-8")
    draft.replace(folder.report)


# --- sections -----------------------------------------------------------------------------------


def _validation(lines: Sequence[Line], sources: Sequence[str], colors: Mapping[str, str]) -> str:
    curves = [
        Curve(name=s, points=series(lines, f"mixed/{s}/val/reward/mean"), dots=True)
        for s in sources
    ]
    changes = [(c.source, c.first, c.last, c.last - c.first) for c in validation_changes(lines)]
    text = f"<figure>{chart(curves, colors, least=0.0)}</figure>"
    return text + (table(("source", "first", "last", "change"), changes) if changes else "")


def _training(lines: Sequence[Line], sources: Sequence[str], colors: Mapping[str, str]) -> str:
    raw = {source: series(lines, f"mixed/{source}/reward/mean") for source in sources}
    curves = [Curve(name=source, points=points, faint=True) for source, points in raw.items()]
    curves += [Curve(name=source, points=moving_average(points)) for source, points in raw.items()]
    note = f"<p>thin: each step; thick: mean of the last {AVERAGE_OVER}</p>"
    return f"<figure>{chart(curves, colors, least=0.0)}</figure>{note}"


def _mixture(trained: Sequence[Line], sources: Sequence[str]) -> str:
    worst = ratio_error(trained)
    if worst is None:
        return "<p>nothing yet</p>"
    verdict = (
        "every batch held exactly the planned prompts"
        if worst == 0
        else f'<span class="bad">a batch was {worst:.0f} prompts off its plan</span>'
    )
    rows = [
        [
            line["step"],
            *(f"{line['metrics'].get(f'mixed/{source}/count', 0):.0f}" for source in sources),
            f"{line['metrics'].get('mixed/ratio_error/max', 0):.0f}",
            f"{line['metrics'].get('mixed/ratio_error/cumulative_max', 0):.0f}",
        ]
        for line in trained
    ]
    totals = [
        f"{sum(v for _, v in series(trained, f'mixed/{source}/count')):.0f}" for source in sources
    ]
    head = ("step", *sources, "planned - trained", "cumulative")
    steps = table(head, rows)
    return (
        f"<p>{len(trained)} steps: {verdict}</p>"
        f"{table(('', *sources), [['prompts trained', *totals]])}"
        f"<details><summary>prompts trained in each step</summary>{steps}</details>"
    )


_FACTS = {
    "reward/mean": "reward",
    "pass_rate": "solved",
    "solved_all": "groups all solved",
    "solved_none": "groups none solved",
    "turns/mean": "turns",
    "response_length/mean": "tokens",
    "masked_fraction": "masked",
    "truncated_rate": "cut off",
    "tool_calls/mean": "tool calls",
    "tool_error_rate": "tool errors",
    "infra_error_rate": "infra errors",
    "loop_error_rate": "loop errors",
    "zero_variance": "groups all equal",
    "too_small": "groups too small",
    "tool_latency_s/p95": "tool s (p95)",
    "limiter_wait_s/mean": "limiter s",
}


def _trajectories(trained: Sequence[Line], sources: Sequence[str]) -> str:
    if not trained:
        return "<p>nothing yet</p>"

    def ends(source: str, fact: str) -> str:
        values = [value for _, value in series(trained, f"mixed/{source}/{fact}")]
        if not values:
            return "-"
        return f"{fmean(values[:AVERAGE_OVER]):.3g} → {fmean(values[-AVERAGE_OVER:]):.3g}"

    rows = [[name, *(ends(source, fact) for source in sources)] for fact, name in _FACTS.items()]
    note = f"<p>mean of the first {AVERAGE_OVER} steps → mean of the last {AVERAGE_OVER}</p>"
    return note + table(("", *sources), rows)


def _times(trained: Sequence[Line], colors: Mapping[str, str]) -> str:
    if not trained:
        return "<p>nothing yet</p>"
    times = [phase_times(line["metrics"]) for line in trained]
    means = {
        phase: fmean(step.get(phase, 0.0) for step in times)
        for phase in {name for step in times for name in step}
    }
    rows = sorted(means.items(), key=lambda item: -item[1])
    steps = Curve(name="seconds a step", points=series(trained, "timing_s/step"))
    figure = f"<figure>{chart([steps], colors, least=0.0)}</figure>"
    return figure + table(("phase", "mean seconds a step"), rows)


def _config(flat: Mapping[str, object]) -> str:
    if not flat:
        return "<p>no config.yaml</p>"
    return (
        f"<details><summary>{len(flat)} keys</summary>"
        f"{table(('key', 'value'), sorted(flat.items()))}</details>"
    )
