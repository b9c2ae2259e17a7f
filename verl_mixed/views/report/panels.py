"""A section of the report, its tables, and the charts that most sections draw. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_mixed.views.progress import series
from verl_mixed.views.report.charts import Curve, Panel
from verl_mixed.views.report.runs import Run
from verl_mixed.views.summary import Points, moving_average

MOST_FAINT = 4
"""With up to this number of sources, each step is drawn behind the averages. With more sources,
the single steps of one source could not be told from those of another."""

NOTHING_YET = "No step has been trained yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a head. A pair of numbers is shown as first → last."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    folded: str = ""
    """Summary under which the table is folded away; empty shows the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of one run."""

    title: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    missing: str = ""
    """The sentence of a section that has neither panel nor table."""


def colored(points: Mapping[str, Points]) -> list[Curve]:
    """A curve for each name, each in its own colour."""
    return [Curve(name=name, points=own, color=i) for i, (name, own) in enumerate(points.items())]


def by_source(run: Run, metric: str) -> dict[str, Points]:
    """Source -> the points of its metric in each trained step."""
    return {source: series(run.trained, f"mixed/{source}/{metric}") for source in run.sources}


def drawn(*panels: Panel) -> list[Panel]:
    return [panel for panel in panels if not panel.is_empty]


def per_source(run: Run, title: str, metric: str) -> Panel:
    """The moving average of each source; with few sources, each step is drawn faint behind it."""
    curves: list[Curve] = []
    for i, (source, points) in enumerate(by_source(run, metric).items()):
        if len(run.sources) <= MOST_FAINT:
            curves.append(Curve(name=source, points=points, color=i, faint=True))
        curves.append(Curve(name=source, points=moving_average(points), color=i))
    return Panel(title=title, curves=curves)


def shares(run: Run, title: str, metric: str) -> Panel:
    return Panel(title=title, layers=colored(by_source(run, metric)), ceiling=1.0)
