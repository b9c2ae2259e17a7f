"""The section that compares several runs: one colour for each run, the same axes. Pure."""

from collections.abc import Sequence
from typing import Any

from verl_mixed.views.progress import series
from verl_mixed.views.report.charts import Curve, Panel
from verl_mixed.views.report.panels import Section, Table, drawn
from verl_mixed.views.report.runs import Run
from verl_mixed.views.summary import AVERAGE_OVER, SOURCE_FACTS, mean_of_last, moving_average

_OF_ALL = {
    "timing_s/step": "seconds a step",
    "actor/grad_norm": "gradient norm",
    "actor/entropy": "entropy, nats",
    "actor/kl_loss": "KL to the reference (loss)",
    "mixed/ratio_error/max": "prompts off the plan",
}


def comparison(runs: Sequence[Run]) -> Section:
    """Curves of all runs in the same charts, and a table of their last values."""
    sources = sorted({source for run in runs for source in run.sources})
    panels = []
    for source in sources:
        panels += [
            _panel(runs, f"Training reward of {source}", f"mixed/{source}/reward/mean"),
            _panel(runs, f"Validation reward of {source}", f"mixed/{source}/val/reward/mean", True),
        ]
    panels += [_panel(runs, text[0].upper() + text[1:], metric) for metric, text in _OF_ALL.items()]
    return Section(
        title="Comparison",
        panels=drawn(*panels),
        tables=[_last_values(runs, sources)],
        notes=(
            f"One colour a run; training curves and the table are means of the last {AVERAGE_OVER} "
            "steps, validation is its last one.",
        ),
        missing="No run has metrics yet.",
    )


def differing_keys(runs: Sequence[Run]) -> Table:
    """Config keys whose values differ between the runs."""
    rows = [[key, *map(str, values)] for key, *values in config_rows(runs)]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(head=("key", *(run.name for run in runs)), rows=rows)


def config_rows(runs: Sequence[Run]) -> list[list[Any]]:
    """A row for each config key: the key, and its value in each run."""
    keys = sorted({key for run in runs for key in run.config})
    return [[key, *(run.config.get(key, "absent") for run in runs)] for key in keys]


def _panel(runs: Sequence[Run], title: str, metric: str, validation: bool = False) -> Panel:
    curves = []
    for i, run in enumerate(runs):
        points = series(run.lines if validation else run.trained, metric)
        points = points if validation else moving_average(points)
        curves.append(Curve(name=run.name, points=points, color=i, dots=validation))
    return Panel(title=title, curves=curves)


def _last_values(runs: Sequence[Run], sources: Sequence[str]) -> Table:
    validated = {
        f"mixed/{source}/val/{name}": f"{source}: validation {text}"
        for source in sources
        for name, text in (("reward/mean", "reward"), ("pass_rate", "solved"))
    }
    averaged = {
        f"mixed/{source}/{fact}": f"{source}: {text}"
        for source in sources
        for fact, text in SOURCE_FACTS.items()
    } | _OF_ALL
    rows: list[list[object]] = [
        ["last step", *(max((line["step"] for line in run.lines), default=0) for run in runs)]
    ]
    points = [
        *(
            (text, [series(run.lines, name)[-1:] for run in runs])
            for name, text in validated.items()
        ),
        *((text, [series(run.trained, name) for run in runs]) for name, text in averaged.items()),
    ]
    for text, of_runs in points:
        if any(of_runs):
            means = [mean_of_last(own) for own in of_runs]
            rows.append([text, *("" if mean is None else mean for mean in means)])
    return Table(head=("", *(run.name for run in runs)), rows=rows)
