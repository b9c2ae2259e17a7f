"""The first screen of a report: what improved, whether the mixture is exact, what limits a step."""

from collections import Counter
from collections.abc import Sequence

from verl_mixed.views.estimates import Estimate, comparison_words
from verl_mixed.views.progress import series
from verl_mixed.views.report.charts import Curve, Panel
from verl_mixed.views.report.machinery import phase_layers
from verl_mixed.views.report.panels import Section, Table
from verl_mixed.views.report.runs import Run
from verl_mixed.views.report.text import number
from verl_mixed.views.summary import AFTER_STEP, PHASE_WORDS, limits_of


def improvement_lines(run: Run) -> list[str]:
    """What improved as plain sentences, one a source."""
    compared = [
        f"{one.source}: {one.measure} {one.first.mean:.2f} → {one.last.mean:.2f} "
        f"(step {steps_of(one.first)} → {steps_of(one.last)}; {one.change_words}): {one.verdict}"
        for one in run.improvements
    ]
    if words := comparison_words(run.improvements):
        compared.append(words)
    return compared + [f"{source}: {why}" for source, why in run.not_comparable.items()]


def measures(runs: Sequence[Run]) -> str:
    """The measures that the runs' improvements compare, as the beginning of a sentence."""
    names = {str(one.measure) for run in runs for one in run.improvements}
    return " and ".join(sorted(names)).capitalize()


def steps_of(estimate: Estimate) -> str:
    """The steps of an estimate: `7`, or `1-10`."""
    first, last = estimate.steps
    return f"{first}" if first == last else f"{first}-{last}"


def interval(estimate: Estimate) -> str:
    """The 95 % interval of an estimate as `[0.31, 0.42]`; empty where it is unknown."""
    if estimate.interval is None:
        return ""
    low, high = estimate.interval
    return f"[{low:.2f}, {high:.2f}]"


def chart_of_rewards(sections: Sequence[Section]) -> Panel | None:
    """The chart of validation where there were two, otherwise of training."""
    panels = {panel.title: panel for section in sections for panel in section.panels}
    validated: Panel | None = panels.get("Validation reward")
    if validated is not None and any(len(curve.points) > 1 for curve in validated.curves):
        return validated
    return panels.get("Training reward") or validated


def trained_prompts(run: Run) -> Table | None:
    """Prompts of each source, and their share; None before the first step."""
    trained: Counter[str] = Counter()
    for row in run.mixture:
        trained.update(row.trained)
    total = max(1, sum(trained.values()))
    shares = [f"{count:,} ({count / total:.1%})" for count in trained.values()]
    return Table(head=("", *trained), rows=[["prompts trained", *shares]]) if run.mixture else None


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


def phase_shares(run: Run) -> list[tuple[Curve, float]]:
    """Each phase inside the step with its share of the step time; empty where no step was timed."""
    whole = sum(seconds for _, seconds in series(run.trained, "timing_s/step"))
    inside = [layer for layer in phase_layers(run) if layer.name != PHASE_WORDS[AFTER_STEP]]
    if whole <= 0:
        return []
    return [(layer, sum(seconds for _, seconds in layer.points) / whole) for layer in inside]


def phase_words(shares: Sequence[tuple[Curve, float]]) -> str:
    """The shares of `phase_shares` as a list in words."""
    words = ", ".join(f"{layer.name} {share:.0%}" for layer, share in shares if share >= 0.005)
    if (together := sum(share for _, share in shares)) > 1.005:
        words += f"; phases overlap, together they are {together:.0%} of the step"
    return words
