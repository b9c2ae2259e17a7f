"""Sections on learning: rewards, lengths, the optimizer step, all numbers per source. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from verl_mixed.views.estimates import Estimate, pass_rate_band, reward_band, validations
from verl_mixed.views.progress import Line, series
from verl_mixed.views.report.charts import Band, Curve, Panel
from verl_mixed.views.report.panels import (
    MOST_FAINT,
    NOTHING_YET,
    Section,
    Table,
    colored,
    drawn,
    per_source,
    shares,
)
from verl_mixed.views.report.runs import Run
from verl_mixed.views.summary import AVERAGE_OVER, SOURCE_FACTS, moving_average, source_table


def rewards(run: Run) -> Section:
    """Rewards in training and validation, with their intervals."""
    return Section(
        title="Reward",
        panels=drawn(
            _with_band(run, "Training reward", "reward/mean", reward_band),
            _with_band(run, "Solved in training, share", "pass_rate", pass_rate_band),
            _validation(run, "Validation reward", "reward/mean"),
            _validation(run, "Solved in validation, share", "pass_rate"),
        ),
        notes=(
            f"Thin: each step (of up to {MOST_FAINT} sources). Thick: mean of the last "
            f"{AVERAGE_OVER} steps, shaded: its 95 % "
            "interval over groups (the share of solved counts a group once, so its interval is "
            "rather too wide). Validation: Wilson's 95 % interval.",
        ),
        missing="No reward has been logged yet.",
    )


def reward_parts(run: Run) -> Section:
    """The parts of which each source's reward is made."""
    panels = []
    metrics: list[str] = sorted(set().union(*(line["metrics"] for line in run.trained)))
    for source in run.sources:
        prefix = f"mixed/{source}/reward_parts/"
        parts = {
            name.removeprefix(prefix): moving_average(series(run.trained, name))
            for name in metrics
            if name.startswith(prefix)
        }
        panels.append(Panel(title=f"Reward parts of {source}", curves=colored(parts)))
    return Section(
        title="Reward parts",
        panels=drawn(*panels),
        notes=(f"Mean over trajectories, averaged over the last {AVERAGE_OVER} steps.",),
        missing="No reward names its parts.",
    )


def lengths(run: Run) -> Section:
    """Lengths of prompts and responses, and turns."""
    return Section(
        title="Lengths and turns",
        panels=drawn(
            per_source(run, "Response tokens, mean", "response_length/mean"),
            per_source(run, "Response tokens, longest", "response_length/max"),
            per_source(run, "Prompt tokens, mean", "prompt_length/mean"),
            per_source(run, "Turns, mean", "turns/mean"),
            per_source(run, "Tokens with mask 0, share", "masked_fraction"),
            per_source(run, "Out of turns or tokens, share", "truncated_rate"),
        ),
        missing="No trajectory has been trained yet.",
    )


def optimizer(run: Run) -> Section:
    """Gradient norm, entropy and KL, of all sources together and of each."""

    def one(title: str, metric: str, floor: float | None = 0.0) -> Panel:
        points = series(run.trained, metric)
        curves = [
            Curve(name="each step", points=points, faint=True),
            Curve(name=metric, points=moving_average(points)),
        ]
        return Panel(title=title, curves=curves, floor=floor)

    return Section(
        title="Optimizer",
        panels=drawn(
            one("Gradient norm", "actor/grad_norm"),
            one("Entropy, nats", "actor/entropy"),
            one("KL to the reference (loss)", "actor/kl_loss"),
            one("KL of the update", "actor/ppo_kl", None),
            per_source(run, "Entropy per source, nats", "entropy/mean"),
            per_source(run, "KL to the reference per source", "kl/mean"),
            per_source(run, "Importance weight of a token, mean", "importance/mean"),
            shares(run, "Share of the sum of |advantage|", "advantage_share"),
            shares(run, "Share of the tokens with a gradient", "gradient_token_share"),
            per_source(run, "Groups with equal rewards, share", "zero_variance"),
        ),
        missing="No update has been logged yet.",
    )


def facts(run: Run) -> Section:
    """Every number per source: mean of the first steps and mean of the last."""
    found = source_table(run.lines)
    rows = [
        [SOURCE_FACTS[fact], *(means.get(source, "") for source in run.sources)]
        for fact, means in found.items()
    ]
    return Section(
        title="All numbers per source",
        tables=[Table(head=("", *run.sources), rows=rows)] if rows else (),
        notes=(
            f"Mean of the first {AVERAGE_OVER} steps → mean of the last {AVERAGE_OVER}; of a "
            "shorter run, its first half → its second half.",
        ),
        missing=NOTHING_YET,
    )


def _with_band(
    run: Run, title: str, metric: str, estimates_of: Callable[[Sequence[Line], str], list[Estimate]]
) -> Panel:
    estimates = {source: estimates_of(run.lines, source) for source in run.sources}
    curves = per_source(run, title, metric).curves
    return Panel(title=title, curves=curves, bands=_bands(estimates))


def _validation(run: Run, title: str, metric: Literal["reward/mean", "pass_rate"]) -> Panel:
    estimates = {source: validations(run.lines, source, metric) for source in run.sources}
    curves = [
        Curve(name=source, points=[(one.steps[0], one.mean) for one in own], color=i, dots=True)
        for i, (source, own) in enumerate(estimates.items())
    ]
    return Panel(title=title, curves=curves, bands=_bands(estimates), ceiling=1.0)


def _bands(estimates: Mapping[str, Sequence[Estimate]]) -> list[Band]:
    """A band for each source whose estimates have intervals."""
    points = [
        [(one.steps[1], *one.interval) for one in own if one.interval is not None]
        for own in estimates.values()
    ]
    return [Band(points=own, color=i) for i, own in enumerate(points) if own]
