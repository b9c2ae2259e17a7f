"""Sections on the mixture: prompts planned and trained, and prompts given up. Pure."""

from collections.abc import Sequence
from itertools import chain

from samplers.adaptive.controller import MILLION
from verl_mixed.views.decisions import UNITS, decided, sentences, table_of, trained_in_units
from verl_mixed.views.mixture_rows import RatioRow, evictions, missing_steps
from verl_mixed.views.report.charts import Curve, Panel
from verl_mixed.views.report.panels import NOTHING_YET, Section, Table, by_source, colored, drawn
from verl_mixed.views.report.runs import Run
from verl_mixed.views.report.text import number
from verl_mixed.views.summary import in_buckets

MOST_ROWS = 240
"""Steps of the table of steps."""


def mixture(run: Run) -> Section:
    """Prompts planned and prompts trained."""
    rows = run.mixture
    names = sorted({name for row in rows for name in row.trained})
    counts = {name: [(row.step, row.trained.get(name, 0)) for row in rows] for name in names}
    errors = [
        Curve(name="this step", points=[(row.step, row.error) for row in rows], color=4),
        Curve(
            name="since the start",
            points=[(row.step, row.cumulative) for row in rows if row.cumulative is not None],
            color=0,
        ),
    ]
    return Section(
        title="Mixture",
        panels=drawn(
            Panel(title="Prompts trained per step", curves=colored(counts)),
            Panel(title="Off the plan, prompts (largest of any source)", curves=errors, ceiling=1),
        ),
        tables=[_totals(rows, names), *_in_units(run, names), _each_step(rows, names)]
        if rows
        else (),
        notes=(mixture_verdict(run),),
        missing=mixture_verdict(run),
    )


def mixture_verdict(run: Run) -> str:
    """Whether every batch was as planned, in one sentence."""
    rows = run.mixture
    if not rows:
        return "NOT proven: no step says what it trained." if run.trained else NOTHING_YET
    proof = "ledger against plan" if rows[0].planned is not None else "by the metrics; no ledger"
    if run.ledger_problem:
        proof = f"by the metrics; {run.ledger_problem}"
    worst = max(rows, key=lambda row: row.error)
    if worst.error:
        off = sum(row.error > 0 for row in rows)
        return (
            f"NOT exact: {off} of {len(rows)} steps are off their plan, step {worst.step} by "
            f"{worst.error} prompts ({proof})."
        )
    if differing := [row.step for row in rows if not row.logged]:
        return (
            f"NOT proven: the metrics of {len(differing)} steps differ from the ledger, first in "
            f"step {differing[0]}."
        )
    if missing := missing_steps(run.lines, rows):
        stretches = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in missing]
        more = f" and {len(stretches) - 5} more stretches" if len(stretches) > 5 else ""
        return (
            f"NOT proven: {', '.join(stretches[:5])}{more} not in the "
            f"{'metrics' if rows[0].planned is None else 'ledger'}."
        )
    farthest = max((row.cumulative or 0.0 for row in rows), default=0.0)
    within = f"within {number(farthest)} prompts of" if farthest else "exactly"
    return (
        f"Exact: each of {len(rows)} steps trained the planned prompts of every source, and every "
        f"source had {within} its due share at all times ({proof})."
    )


def _totals(rows: Sequence[RatioRow], names: Sequence[str]) -> Table:
    trained = {name: sum(row.trained.get(name, 0) for row in rows) for name in names}
    everything = sum(trained.values())
    body: list[Sequence[object]] = []
    if all(row.planned is not None for row in rows):
        planned = [sum((row.planned or {}).get(name, 0) for row in rows) for name in names]
        body.append(["prompts planned", *planned])
    body.append(["prompts trained", *trained.values()])
    body.append(["share", *(f"{count / max(1, everything):.2%}" for count in trained.values())])
    return Table(head=("", *names), rows=body)


def _in_units(run: Run, names: Sequence[str]) -> list[Table]:
    """The share of each source in prompts, trajectories and trained tokens."""
    found = trained_in_units(run.ledger)
    if len(found) < 2:
        return []
    body = [
        [UNITS[unit], *(f"{own.get(name, 0) / sum(own.values()):.2%}" for name in names)]
        for unit, own in found.items()
    ]
    return [Table(head=("share of trained", *names), rows=body)]


def decisions(run: Run) -> Section:
    """What a controller decided; empty without one."""
    own = decided(run.ledger)
    if own is None:
        return Section(title="Decided shares", missing="No controller: the shares are the ratios.")
    curves = {
        source: [
            (step, decision.shares[source] / MILLION)
            for decision in own.decisions
            for step in (decision.from_step, decision.from_step + own.window - 1)
        ]
        for source in sorted(own.decisions[0].shares)
    }
    head, rows = table_of(own)
    return Section(
        title="Decided shares",
        panels=drawn(
            Panel(title=f"Share of {own.unit}, decided by {own.rule}", curves=colored(curves))
        ),
        tables=[Table(head=head, rows=rows, folded="Each decision, with what it saw")],
        notes=sentences(own),
    )


def _each_step(rows: Sequence[RatioRow], names: Sequence[str]) -> Table:
    def cell(row: RatioRow, name: str) -> str:
        count = row.trained.get(name, 0)
        return str(count) if row.planned is None else f"{count} of {row.planned.get(name, 0)}"

    shown = rows
    title = "Trained of planned prompts in each step"
    if len(rows) > MOST_ROWS:
        spans = in_buckets([row.step for row in rows], MOST_ROWS // 2)
        off = [i for i, row in enumerate(rows) if row.error][: MOST_ROWS // 2]
        shown = [rows[i] for i in sorted({*(own[0] for own in spans), *off})]
        title = (
            f"Trained of planned prompts in {len(shown)} of {len(rows)} steps, among them the "
            f"first {MOST_ROWS // 2} that are off their plan; the CSV file has every step"
        )
    return Table(
        head=("step", *names, "off", "since the start"),
        rows=[
            [
                row.step,
                *(cell(row, name) for name in names),
                row.error,
                "" if row.cumulative is None else row.cumulative,
            ]
            for row in shown
        ],
        folded=title,
    )


def given_up(run: Run) -> Section:
    """Prompts that were replaced, by reason."""
    found = evictions(run.lines, run.ledger)
    reasons = list(dict.fromkeys(chain.from_iterable(found.values())))
    rows = [[source, *(own.get(each, 0) for each in reasons)] for source, own in found.items()]
    panels = []
    for reason in reasons:
        curves = [
            Curve(name=source, points=points, color=i, dots=True)
            for i, (source, points) in enumerate(by_source(run, f"evicted/{reason}").items())
            if source in found
        ]
        panels.append(Panel(title=f"Prompts given up per step: {reason}", curves=curves))
    return Section(
        title="Prompts given up",
        panels=drawn(*panels),
        tables=[Table(head=("source", *reasons), rows=rows)] if found else (),
        missing="No prompt was given up." if run.trained else NOTHING_YET,
    )
