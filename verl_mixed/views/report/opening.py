"""The first screen of a report: what improved, is the mixture exact, what limits the step."""

from collections.abc import Sequence

from verl_mixed.run.text import passed_over_words
from verl_mixed.views.estimates import Estimate
from verl_mixed.views.progress import series, warnings_of
from verl_mixed.views.report.charts import Curve, Panel, bar, draw, number, words
from verl_mixed.views.report.machinery import phase_layers
from verl_mixed.views.report.mixture import mixture_verdict
from verl_mixed.views.report.panels import NOTHING_YET, Section
from verl_mixed.views.report.runs import Run
from verl_mixed.views.report.tables import Table, html
from verl_mixed.views.summary import AFTER_STEP, PHASE_WORDS, limits_of

_CLASS = {"improved": "good", "got worse": "bad"}


def opening(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    """The first screen of one run or of several.

    Args:
        runs: at least one.
        sections: of the first; one run has a chart of its rewards on the screen.
    """
    cards = [
        ("What improved", "".join(_improved(runs))),
        ("", _chart(sections) if len(runs) == 1 else ""),
        ("Is the mixture exact?", "".join(_named(runs, run, _mixture(run)) for run in runs)),
        ("What limited the step time", "".join(_named(runs, run, _limits(run)) for run in runs)),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card">{f"<h2>{title}</h2>" if title else ""}{text}</div>'
            for title, text in cards
            if text
        )
        + "</div>"
    )


def head(run: Run) -> str:
    """Name, state and warnings."""
    found = warnings_of(run.lines)
    if run.passed_over:
        found.append(passed_over_words(run.passed_over))
    warnings = "".join(f'<p class="bad">Warning: {words(text)}</p>' for text in found)
    return f"<h1>{words(run.name)}</h1><p>{words(run.status)}</p>{warnings}"


def improvement_lines(run: Run) -> list[str]:
    """What improved as plain sentences, one a source."""
    compared = [
        f"{one.source}: {one.measure} {one.first.mean:.2f} → {one.last.mean:.2f} "
        f"(step {_steps(one.first)} → {_steps(one.last)}; {one.change_words}): {one.verdict}"
        for one in run.improvements
    ]
    return compared + [f"{source}: {why}" for source, why in run.not_comparable.items()]


def limit_sentence(run: Run) -> str:
    """What limited the step time, in one or two sentences."""
    limits = limits_of(run.lines)
    if limits is None:
        return "No step has been timed yet."
    text = (
        f"Most time went into {PHASE_WORDS.get(limits.phase, limits.phase)}: "
        f"{number(limits.phase_s)} of {number(limits.step_s)} s a step ({limits.share:.0%})."
    )
    if limits.validation_s:
        text += f" Validation took another {number(limits.validation_s)} s a step."
    if limits.tool_share is not None and limits.limiter_share is not None:
        model = 1 - limits.tool_share - limits.limiter_share
        text += (
            f" A trajectory spent {model:.0%} of its time in the model, {limits.tool_share:.0%} "
            f"in tools and {limits.limiter_share:.0%} waiting for the rate limiter."
        )
    return text


def _named(runs: Sequence[Run], run: Run, text: str) -> str:
    return text if len(runs) == 1 else f"<h3>{words(run.name)}</h3>{text}"


def _improved(runs: Sequence[Run]) -> list[str]:
    rows, measures = [], set()
    for run in runs:
        for one in run.improvements:
            measures.add(one.measure)
            names = [one.source] if len(runs) == 1 else [run.name, one.source]
            look = _CLASS.get(one.verdict, "")
            steps = f"<br><small>step {_steps(one.first)} → {_steps(one.last)}</small>"
            cells = [_mean(one.first), _mean(one.last), one.change_words]
            rows.append(
                f"<tr>{''.join(f'<td>{words(name)}</td>' for name in names[:-1])}"
                f"<td>{words(names[-1])}{steps}</td>"
                + "".join(f'<td class="whole">{text}</td>' for text in cells)
                + f'<td><span class="{look}">{one.verdict}</span></td></tr>'
            )
        for source, why in run.not_comparable.items():
            names = [source] if len(runs) == 1 else [run.name, source]
            rows.append(
                "<tr>"
                + "".join(f"<td>{words(name)}</td>" for name in names)
                + f'<td colspan="4">{words(why)}</td></tr>'
            )
    if not rows:
        return ["<p>Nothing to compare yet: it takes two validations, or two steps.</p>"]
    names = ["source"] if len(runs) == 1 else ["run", "source"]
    titles = "".join(f"<th>{t}</th>" for t in [*names, "first", "last", "change", ""])
    text = f'<div class="scroll"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'
    if not measures:
        return [text]
    said = " and ".join(sorted(measures)).capitalize()
    return [text, f"<p>{words(said)}, mean and 95 % interval.</p>"]


def _steps(estimate: Estimate) -> str:
    first, last = estimate.steps
    return f"{first}" if first == last else f"{first}-{last}"


def _mean(estimate: Estimate) -> str:
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f" [{estimate.low:.2f}, {estimate.high:.2f}]"
    return f"<b>{estimate.mean:.2f}</b>{interval}"


def _chart(sections: Sequence[Section]) -> str:
    """Validation where there were two, otherwise training."""
    panels = {panel.title: panel for section in sections for panel in section.panels}
    validated: Panel | None = panels.get("Validation reward")
    if validated is not None and all(len(curve.points) < 2 for curve in validated.curves):
        validated = None
    panel = validated or panels.get("Training reward")
    return "" if panel is None else draw(panel)


def _mixture(run: Run) -> str:
    rows, verdict = run.mixture, mixture_verdict(run)
    look = "good" if verdict.startswith("Exact") else "" if verdict == NOTHING_YET else "bad"
    text = f'<p class="{look}">{words(verdict)}</p>'
    if rows:
        trained: dict[str, int] = {}
        for row in rows:
            for name, count in row.trained.items():
                trained[name] = trained.get(name, 0) + count
        total = max(1, sum(trained.values()))
        shares = [f"{count:,} ({count / total:.1%})" for count in trained.values()]
        text += html(Table(head=("", *trained), rows=[["prompts trained", *shares]]))
    return text


def _limits(run: Run) -> str:
    text = f"<p>{words(limit_sentence(run))}</p>"
    layers = phase_layers(run)
    inside = [layer for layer in layers if layer.name != PHASE_WORDS[AFTER_STEP]]
    whole = sum(s for _, s in series(run.trained, "timing_s/step"))
    if whole > 0:
        parts = [(layer.name, _sum(layer) / whole) for layer in inside]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        if (together := sum(share for _, share in parts)) > 1.005:
            shares += f"; phases overlap, together they are {together:.0%} of the step"
        text += bar([(layer.name, _sum(layer), layer.color) for layer in inside], whole)
        text += f"<p>{words(shares)}</p>"
    return text


def _sum(layer: Curve) -> float:
    return sum(value for _, value in layer.points)
