"""What a controller decided, and the shares that sources had in each unit. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samplers.adaptive.controller import MILLION
from samplers.audit import plans_in
from samplers.ledger import Decision, LedgerEntry, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions of a run, that for the first window included."""

    rule: str
    unit: str
    window: int
    """Steps."""

    decisions: Sequence[Decision]

    @property
    def held(self) -> dict[str, int]:
        """Source -> the first step at which it was held at its floor."""
        found: dict[str, int] = {}
        for decision in self.decisions:
            for source in decision.held:
                found.setdefault(source, decision.from_step)
        return found


def decided(ledger: Sequence[Line]) -> Decided | None:
    """The decisions in a ledger; None if its run has fixed ratios."""
    plans = plans_in(ledger)
    if not plans or (policy := plans[-1][1].policy) is None:
        return None
    return Decided(
        rule=policy.rule,
        unit=policy.unit,
        window=policy.window,
        decisions=plans[-1][1].decisions,
    )


def table_of(own: Decided) -> tuple[list[str], list[list[str]]]:
    """(head, rows): a row for each decision, with its shares and prompts, and what it saw."""
    sources = sorted(own.decisions[0].shares)
    rows: list[list[str]] = []
    for decision in own.decisions:
        first = decision.from_step
        row = [f"{first}-{first + own.window - 1}"]
        for source in sources:
            seen = decision.inputs.get(source, {})
            facts = f" (pass {seen['pass_rate']:.2f}, |A| {seen['advantage']:.2f})" if seen else ""
            held = " held" if source in decision.held else ""
            share = decision.shares[source] / MILLION
            row.append(f"{share:.3f}: {decision.prompts[source]}{facts}{held}")
        rows.append(row)
    return ["steps", *sources], rows


def sentences(own: Decided) -> list[str]:
    """Which sources were held, and why."""
    return [
        f"{source} was held at its lowest share from step {step} on: no group of it had "
        "trajectories with different rewards. Its reward may be broken, or its rows are too hard "
        "or too easy."
        for source, step in own.held.items()
    ]


UNITS = {"prompts": "prompts", "trajectories": "trajectories", "tokens": "trained tokens"}


def trained_in_units(ledger: Sequence[Line]) -> dict[str, Mapping[str, int]]:
    """Unit -> source -> trained; without tokens for a ledger of release 1.0."""
    counts = {unit: Counter[str]() for unit in UNITS}
    for line in ledger:
        if isinstance(line, LedgerEntry) and line.outcome == "trained":
            counts["prompts"][line.source] += 1
            counts["trajectories"][line.source] += line.trajectories
            counts["tokens"][line.source] += line.tokens or 0
    return {unit: own for unit, own in counts.items() if own.total()}
