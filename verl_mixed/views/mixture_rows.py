"""Planned and trained prompts of each step, and the prompts that were evicted. Pure.

Functions over lines of `metrics.jsonl` and of the ledger, for views. Whether a ledger is exactly as
planned is checked by samplers/audit.py.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from samplers.audit import plans_in
from samplers.ledger import LedgerEntry, StepEnd
from samplers.ledger import Line as LedgerLine
from verl_mixed.views.progress import Line, series, sources_of
from verl_mixed.views.summary import trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRow:
    """Planned and trained prompts of one step."""

    step: int
    trained: dict[str, int]
    planned: dict[str, int] | None
    """None without a ledger, which holds the plan."""
    error: int
    """Largest difference between planned and trained of any source in this step."""
    cumulative: float | None
    """Largest difference of any source between all prompts trained so far and the exact number."""
    logged: bool
    """False if the step's metrics have other counts."""


def ratio_rows(lines: Sequence[Line], ledger: Sequence[LedgerLine] = ()) -> list[RatioRow]:
    """Each step's prompts per source, from the ledger; without a ledger, from the metrics.

    Raises:
        ValueError: the plan in the ledger cannot be read.
    """
    logged = {line["step"]: line["metrics"] for line in trained(lines)}
    if rows := _ledger_rows(ledger, logged):
        return rows
    return [
        RatioRow(
            step=step,
            trained={
                source: round(metrics[f"mixed/{source}/count"])
                for source in sources_of(lines)
                if f"mixed/{source}/count" in metrics
            },
            planned=None,
            error=round(metrics["mixed/ratio_error/max"]),
            cumulative=metrics.get("mixed/ratio_error/cumulative_max"),
            logged=True,
        )
        for step, metrics in logged.items()
        if "mixed/ratio_error/max" in metrics
    ]


def missing_steps(lines: Sequence[Line], rows: Sequence[RatioRow]) -> list[tuple[int, int]]:
    """(first, last) of every gap: steps from 1 to the newest that have no row."""
    known = {row.step for row in rows}
    newest = max([*(line["step"] for line in lines), *known], default=0)
    stretches = pairwise([0, *sorted(known), newest + 1])
    return [(before + 1, after - 1) for before, after in stretches if after > before + 1]


def _ledger_rows(
    ledger: Sequence[LedgerLine], logged: Mapping[int, Mapping[str, float]]
) -> list[RatioRow]:
    """Rows of the steps whose end is in the ledger."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    plans = plans_in(ledger)
    ended: list[int] = []
    for line in ledger:
        if isinstance(line, StepEnd):
            ended.append(line.step)
        elif isinstance(line, LedgerEntry) and line.outcome == "trained":
            counts[line.step][line.source] += 1
    if not plans:
        return []
    rows: list[RatioRow] = []
    due: defaultdict[str, Fraction] = defaultdict(Fraction)
    so_far: Counter[str] = Counter()
    for step in sorted(ended):
        plan = [plan for start, plan in plans if start <= step or plan is plans[0][1]][-1]
        planned, actual = Counter(plan.counts(step - 1)), counts[step]
        before, after = plan.due((step - 1) * plan.batch_size), plan.due(step * plan.batch_size)
        for source in plan.sources:
            due[source] += after[source] - before[source]
        so_far.update(actual)
        names = sorted(planned.keys() | actual.keys())
        metrics = logged.get(step, {})
        rows.append(
            RatioRow(
                step=step,
                trained={name: actual[name] for name in names},
                planned={name: planned[name] for name in names},
                error=max((abs(actual[name] - planned[name]) for name in names), default=0),
                cumulative=float(max((abs(so_far[n] - due[n]) for n in due), default=0)),
                logged=all(
                    metrics.get(f"mixed/{name}/count", actual[name]) == actual[name]
                    for name in names
                ),
            )
        )
    return rows


def evictions(
    lines: Sequence[Line], ledger: Sequence[LedgerLine] = ()
) -> dict[str, dict[str, int]]:
    """Source -> reason -> evicted prompts, from the ledger; without a ledger, from the metrics."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in ledger:
        if isinstance(entry, LedgerEntry) and entry.outcome not in ("trained", "unfinished"):
            counts[entry.source][entry.outcome] += 1
    if not ledger:
        for source in sources_of(lines):
            for reason in ("filtered", "failed", "stale"):
                points = series(lines, f"mixed/{source}/evicted/{reason}")
                if total := round(sum(value for _, value in points)):
                    counts[source][reason] = total
    return {source: dict(reasons) for source, reasons in sorted(counts.items())}
