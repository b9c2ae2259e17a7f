"""The mixture of a run, step by step: planned against trained, and what was given up. Pure.

Functions over lines of `metrics.jsonl` and of the ledger. Views show these rows; whether a ledger
keeps its plan in every respect is decided by `samplers.audit`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from samplers.ledger import LedgerEntry, PlanStart, StepEnd
from samplers.ledger import Line as LedgerLine
from samplers.mixture_plan import MixturePlan
from verl_mixed.views.progress import Line, series, sources_of
from verl_mixed.views.summary import trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRow:
    """Planned against trained prompts of one step."""

    step: int
    trained: dict[str, int]
    planned: dict[str, int] | None
    """None where there is no ledger, which holds the plan."""
    error: int
    """Largest difference of a source in this step."""
    cumulative: float | None
    """Largest difference, of any source, between all trained so far and what is due exactly."""
    logged: bool
    """Whether the step's metrics say the same; True where they say nothing of it."""


def ratio_rows(lines: Sequence[Line], ledger: Sequence[LedgerLine] = ()) -> list[RatioRow]:
    """Each step's prompts per source: from the ledger and its plan, from the metrics without one.

    Raises:
        ValueError: the ledger's plan is none.
    """
    logged = {line["step"]: line["metrics"] for line in trained(lines)}
    rows = _ledger_rows(ledger, logged)
    if rows:
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
    """First and last of every stretch of steps, from 1 to the newest, that has no row."""
    told = {row.step for row in rows}
    newest = max([*(line["step"] for line in lines), *told], default=0)
    stretches = pairwise([0, *sorted(told), newest + 1])
    return [(before + 1, after - 1) for before, after in stretches if after > before + 1]


def _ledger_rows(
    ledger: Sequence[LedgerLine], logged: Mapping[int, Mapping[str, float]]
) -> list[RatioRow]:
    """Rows of the steps that the ledger has whole."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    plans: list[tuple[int, MixturePlan]] = []
    ended: list[int] = []
    for line in ledger:
        if isinstance(line, PlanStart):
            plans = [known for known in plans if known[0] < line.from_step]
            plans.append((line.from_step, MixturePlan.from_description(line.plan)))
        elif isinstance(line, StepEnd):
            ended.append(line.step)
        elif line.outcome == "trained":
            counts[line.step][line.source] += 1
    if not plans:
        return []
    rows: list[RatioRow] = []
    due: defaultdict[str, Fraction] = defaultdict(Fraction)
    so_far: Counter[str] = Counter()
    for step in sorted(ended):
        plan = [plan for start, plan in plans if start <= step or plan is plans[0][1]][-1]
        planned, own = plan.counts(step - 1), counts[step]
        before, after = plan.due((step - 1) * plan.batch_size), plan.due(step * plan.batch_size)
        for source in plan.sources:
            due[source] += after[source] - before[source]
        so_far.update(own)
        names = planned.keys() | own.keys()
        metrics = logged.get(step, {})
        rows.append(
            RatioRow(
                step=step,
                trained={name: own[name] for name in sorted(names)},
                planned={name: planned.get(name, 0) for name in sorted(names)},
                error=max((abs(own[n] - planned.get(n, 0)) for n in names), default=0),
                cumulative=float(max((abs(so_far[n] - due[n]) for n in due), default=0)),
                logged=all(
                    metrics.get(f"mixed/{name}/count", own[name]) == own[name] for name in names
                ),
            )
        )
    return rows


def evictions(
    lines: Sequence[Line], ledger: Sequence[LedgerLine] = ()
) -> dict[str, dict[str, int]]:
    """Source -> reason -> prompts given up: from the ledger, from the metrics without one."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in ledger:
        if isinstance(entry, LedgerEntry) and entry.outcome not in ("trained", "unfinished"):
            found[entry.source][entry.outcome] += 1
    if not ledger:
        for source in sources_of(lines):
            for reason in ("filtered", "failed", "stale"):
                points = series(lines, f"mixed/{source}/evicted/{reason}")
                if total := round(sum(value for _, value in points)):
                    found[source][reason] += total
    return {source: dict(reasons) for source, reasons in sorted(found.items())}
