"""A run's ledger lines as training writes them, made from the plan alone."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from samplers.ledger import Ledger, LedgerEntry, Line, Outcome, PlanStart, StepEnd
from samplers.mixture_plan import MixturePlan, PlannedPrompt

SIZES = {"taco": 7, "nq": 5, "math": 3}
RATIOS = {"taco": 5, "nq": 3, "math": 2}


def new_plan(batch_size: int = 4, seed: int = 3) -> MixturePlan:
    return MixturePlan(SIZES, RATIOS, batch_size, seed)


def row_id(source: str, row: int) -> str:
    return f"{source}:{row:04x}"


ROW_IDS = {source: [row_id(source, row) for row in range(size)] for source, size in SIZES.items()}


def entry_of(prompt: PlannedPrompt, step: int, outcome: Outcome = "trained") -> LedgerEntry:
    trained = outcome == "trained"
    return LedgerEntry(
        step=step,
        source=prompt.source,
        draw=prompt.draw,
        row=prompt.row,
        row_id=row_id(prompt.source, prompt.row),
        outcome=outcome,
        trajectories=8 if trained else 0,
        reward_mean=0.5 if trained else None,
    )


def entries_of(plan: MixturePlan, step: int, lost: Collection[int] = ()) -> list[LedgerEntry]:
    """Draw the next batch and train it; those of its prompts that are lost are replaced.

    Args:
        lost: places in the batch.
    """
    entries: list[LedgerEntry] = []
    for place, prompt in enumerate(plan.take(plan.batch_size)):
        if place in lost:
            entries.append(entry_of(prompt, step, ("filtered", "failed", "stale")[place % 3]))
            [prompt] = plan.replace({prompt.source: 1})
        entries.append(entry_of(prompt, step))
    return entries


def write_step(
    ledger: Ledger, plan: MixturePlan, step: int, lost: Collection[int] = ()
) -> list[LedgerEntry]:
    entries = entries_of(plan, step, lost)
    ledger.append_step(step, entries, plan.drawn)
    return entries


def step_of(plan: MixturePlan, step: int, lost: Collection[int] = ()) -> list[Line]:
    entries = entries_of(plan, step, lost)
    return [*entries, StepEnd(step=step, prompts=len(entries), drawn=dict(plan.drawn))]


def run_of(plan: MixturePlan, steps: int, lost: Collection[int] = (), first: int = 1) -> list[Line]:
    """The plan's next steps; the same places of every batch are lost."""
    lines: list[Line] = [PlanStart(from_step=first, plan=plan.description())]
    for step in range(first, first + steps):
        lines += step_of(plan, step, lost)
    return lines


def run_ahead(plan: MixturePlan, steps: int, ahead: int) -> list[Line]:
    """An asynchronous run: so many prompts are under way at the end of every step.

    Each source trains its own draws in order.
    """
    lines: list[Line] = [PlanStart(from_step=1, plan=plan.description())]
    under_way = plan.take(ahead)
    for step in range(1, steps + 1):
        under_way += plan.take(plan.batch_size)
        trained: list[PlannedPrompt] = []
        for source, count in plan.counts(step - 1).items():
            trained += [prompt for prompt in under_way if prompt.source == source][:count]
        under_way = [prompt for prompt in under_way if prompt not in trained]
        lines += [entry_of(prompt, step) for prompt in trained]
        lines.append(StepEnd(step=step, prompts=len(trained), drawn=dict(plan.drawn)))
    return lines


def prompts_of(lines: Sequence[Line]) -> list[LedgerEntry]:
    return [line for line in lines if isinstance(line, LedgerEntry)]


def without(lines: Sequence[Line], number: int) -> list[Line]:
    """Lines less the `number`-th prompt, as if it had never been written."""
    lost = prompts_of(lines)[number]
    return [
        replace(line, prompts=line.prompts - 1)
        if isinstance(line, StepEnd) and line.step == lost.step
        else line
        for line in lines
        if line is not lost
    ]


def changed(lines: Sequence[Line], number: int, **fields: object) -> list[Line]:
    """Lines with other values in the `number`-th prompt."""
    old = prompts_of(lines)[number]
    return [replace(old, **fields) if line is old else line for line in lines]  # type: ignore[arg-type]
