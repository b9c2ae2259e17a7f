"""Compares a run's ledger with its mixture plan.

The ledger proves four things: every trained batch held the plan's counts; each prompt has the row
of its draw; in each source no draw was skipped or used twice; and each decision of a controller
follows from its rule, the decision before it and the prompts of its window.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, pairwise

from samplers.adaptive.controller import malformed, shortcomings
from samplers.adaptive.curriculum import ChosenRows
from samplers.ledger import Decision, LedgerEntry, Line, PlanStart, StepEnd
from samplers.mixture_plan import MixturePlan

REFILL = "trainer.v1.sampler.sync_refill_failed_groups"

_SHOWN = 5  # problems of one kind that a report lists; further ones are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAccount:
    """The prompts of one source, by outcome."""

    due: float
    """Prompts that the plan gives the source over the steps in the ledger."""

    outcomes: dict[str, int]
    """Outcome -> prompts."""

    under_way: int
    """Prompts that were drawn and have no outcome yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    steps: int
    sources: dict[str, SourceAccount]
    """In the order of the plan."""

    worst_batch: int
    """Largest difference between planned and trained prompts of a source in one batch."""

    cumulative_error: float
    """Largest difference after any step between the due and the trained prompts of a source; below
    1 if the run kept a plan with apportionment=carry."""

    problems: tuple[str, ...]
    """One sentence each, worst kinds first; empty if the run kept the plan."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def trained(self) -> dict[str, int]:
        """Source -> prompts trained."""
        return {name: own.outcomes.get("trained", 0) for name, own in self.sources.items()}


Plans = list[tuple[int, MixturePlan]]
"""(first step, plan of the steps from there on), in order of steps."""


def plans_in(lines: Sequence[Line], choices: Mapping[str, ChosenRows] | None = None) -> Plans:
    """The plans in a ledger, which follow the decisions in it.

    Args:
        choices: see `MixturePlan.from_description`.

    Raises:
        ValueError: a plan cannot be read.
    """
    plans: Plans = []
    for line in lines:
        if isinstance(line, PlanStart):
            plans = [earlier for earlier in plans if earlier[0] < line.from_step]
            plans.append((line.from_step, MixturePlan.from_description(line.plan, choices)))
    for _, plan in plans:
        if plan.policy is not None:
            plan.follow([*plan.decisions[:1], *_well_formed(lines, plan)[0]])
    return plans


def _well_formed(lines: Sequence[Line], plan: MixturePlan) -> tuple[list[Decision], list[str]]:
    """(The decisions before the first that cannot be followed, what is wrong with the others)."""
    assert plan.policy is not None
    decisions: list[Decision] = []
    problems: list[str] = []
    ended, window = 0, plan.policy.window
    for line in lines:
        if isinstance(line, StepEnd):
            ended = line.step
        if not isinstance(line, Decision) or problems:
            continue
        name = f"the decision for the steps from {line.from_step} on"
        if words := malformed(plan.policy, len(decisions) + 1, line):
            problems.append(f"{name} {words}")
        elif line.from_step != ended + 2:
            problems.append(f"{name} is written in step {ended + 1}")
        else:
            decisions.append(line)
    if not problems and len(decisions) < ended // window:
        problems.append(f"step {(len(decisions) + 1) * window} ends a window without a decision")
    return decisions, problems


def drew_ahead(lines: Sequence[Line]) -> bool:
    """Whether a step has a prompt that was drawn before the step began, as in asynchronous runs."""
    drawn: Mapping[str, int] = {}
    under_way: list[LedgerEntry] = []
    for line in lines:
        if isinstance(line, LedgerEntry):
            under_way.append(line)
        elif isinstance(line, StepEnd):
            if any(entry.draw < drawn.get(entry.source, 0) for entry in under_way):
                return True
            drawn, under_way = line.drawn, []
    return False


def audit(
    lines: Sequence[Line],
    plan: MixturePlan,
    *,
    in_flight: bool = False,
    row_ids: Mapping[str, Sequence[str]] | None = None,
) -> AuditReport:
    """Compare a ledger with the plan of its run.

    Args:
        lines: all lines in file order.
        plan: the plan with the settings of the run.
        in_flight: the run is asynchronous and not complete, so prompts may have no outcome yet.
        row_ids: source -> the row ids of its rows; None to skip the check of row ids.
    """
    entries = [line for line in lines if isinstance(line, LedgerEntry)]
    ends = [line for line in lines if isinstance(line, StepEnd)]
    plans, problems = _plans_of(lines, plan)
    by_step: defaultdict[int, Counter[str]] = defaultdict(Counter)
    failed: Counter[tuple[int, str]] = Counter()
    for end in ends:
        by_step[end.step] = Counter()
    for entry in entries:
        by_step[entry.step][entry.source] += entry.outcome == "trained"
        failed[entry.step, entry.source] += entry.outcome == "failed"
    worst, cumulative, due, found = _batches(by_step, failed, plans)
    problems += _steps([end.step for end in ends])
    if plans[-1][1].policy is not None:  # first, because batches after a wrong decision differ too
        problems += _well_formed(lines, plans[-1][1])[1]
    problems += _few(found)
    problems += _few(_decided(plans[-1][1], entries))
    problems += _few(_rows(entries, plans, row_ids))
    problems += _few(_twice(entries))
    problems += _few(_miscounted(entries, ends))
    drawn = ends[-1].drawn if ends else {}
    missing = _missing(entries, drawn)
    if not in_flight:
        problems += _few(_skipped(missing))
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        outcomes[entry.source][entry.outcome] += 1
    return AuditReport(
        steps=len(by_step),
        sources={
            name: SourceAccount(
                due=float(due.get(name, Fraction(0))),
                outcomes=dict(outcomes[name]),
                under_way=missing.get(name, (0, 0))[0],
            )
            for name in dict.fromkeys([*plan.sources, *outcomes])
        },
        worst_batch=worst,
        cumulative_error=float(cumulative),
        problems=tuple(problems),
    )


def _plans_of(lines: Sequence[Line], plan: MixturePlan) -> tuple[Plans, list[str]]:
    """The plans in the ledger, and whether the last one is the plan of the run."""
    plans = plans_in(lines, plan.choices)
    if not plans:
        unnamed = ["the ledger does not say which plan it follows"]
        return [(1, plan)], unnamed if lines else []
    differing = plan.differences(plans[-1][1].state_dict())
    return plans, [f"the ledger's plan has {words}" for words in differing]


def _decided(plan: MixturePlan, entries: Sequence[LedgerEntry]) -> list[str]:
    """Whether each decision follows its rule, by the prompts of the window before it."""
    if plan.policy is None:
        return []
    by_window: defaultdict[int, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        by_window[(entry.step - 1) // plan.policy.window].append(entry)
    return [
        f"the decision for the steps from {after.from_step} on {words}"
        for before, after in pairwise(plan.decisions)
        for words in shortcomings(
            plan.policy, plan.asked(after.window), before, after, by_window[before.window]
        )
    ]


def _batches(
    by_step: Mapping[int, Counter[str]], failed: Mapping[tuple[int, str], int], plans: Plans
) -> tuple[int, Fraction, dict[str, Fraction], list[str]]:
    """(worst batch, largest cumulative error, source -> prompts due in total, problems)"""
    found: list[str] = []
    worst, largest = 0, Fraction(0)
    due: defaultdict[str, Fraction] = defaultdict(Fraction)
    trained: Counter[str] = Counter()
    for step in sorted(by_step):
        if step < 1:
            continue  # the check of steps reports it
        plan = [own for start, own in plans if start <= step or start == plans[0][0]][-1]
        planned, counts = plan.counts(step - 1), by_step[step]
        for source in sorted(planned.keys() | counts.keys()):
            error = counts[source] - planned.get(source, 0)
            worst = max(worst, abs(error))
            if error:
                words = (
                    f"step {step} trained {counts[source]} prompts of source={source!r}, "
                    f"the plan has {planned.get(source, 0)}"
                )
                if error + failed[step, source] == 0:
                    words += (
                        f": {-error} failed and left their places empty; {REFILL}=true replaces "
                        "such prompts"
                    )
                found.append(words)
        before = plan.due((step - 1) * plan.batch_size)
        after = plan.due(step * plan.batch_size)
        for source in plan.sources:
            due[source] += after[source] - before[source]
        trained.update(counts)
        largest = max([largest, *(abs(trained[name] - due[name]) for name in due)])
    return worst, largest, dict(due), found


def _steps(steps: list[int]) -> list[str]:
    found: list[str] = []
    seen = sorted(set(steps))
    if seen and seen[0] != 1:
        found.append(f"the first step is {seen[0]}, not 1")
    found += [
        f"step {after} follows step {before}"
        for before, after in pairwise(seen)
        if after != before + 1
    ]
    if steps != sorted(steps):
        found.append("steps are out of order")
    if len(seen) != len(steps):
        found.append("a step ends twice")
    return _few(found)


def _rows(
    entries: Sequence[LedgerEntry],
    plans: Plans,
    row_ids: Mapping[str, Sequence[str]] | None,
) -> list[str]:
    found: list[str] = []
    by_source: defaultdict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        by_source[entry.source].append(entry)
    for source, own in by_source.items():
        known = [(start, plan) for start, plan in plans if plan.sizes.get(source)]
        if not known:
            found.append(f"source={source!r} is in the ledger and in no plan")
            continue
        wrong = [entry for entry in own if entry.draw < 0]
        found += [f"step {e.step} has draw={e.draw} of source={source!r}" for e in wrong]
        own = [entry for entry in own if entry.draw >= 0]
        # A prompt that was drawn before the plan changed has a row of the earlier plan.
        choices = [plan.rows(source, [e.draw for e in own]).tolist() for _, plan in known]
        for number, entry in enumerate(own):
            rows = {
                chosen[number]
                for (start, _), chosen in zip(known, choices, strict=True)
                if start <= entry.step or start == known[0][0]
            }
            if entry.row not in rows:
                found.append(
                    f"step {entry.step} has row={entry.row} for draw={entry.draw} of "
                    f"source={source!r}, the plan has row={choices[-1][number]}"
                )
        found += _row_names(source, own, row_ids)
    return found


def _row_names(
    source: str, own: Sequence[LedgerEntry], row_ids: Mapping[str, Sequence[str]] | None
) -> list[str]:
    names = row_ids.get(source) if row_ids is not None else None
    if names is None:
        return []
    return [
        f"step {entry.step} has row_id={entry.row_id!r} for row={entry.row} of source={source!r}, "
        f"the files have {names[entry.row] if 0 <= entry.row < len(names) else 'no such row'!r}"
        for entry in own
        if entry.row_id and not (0 <= entry.row < len(names) and names[entry.row] == entry.row_id)
    ]


def _twice(entries: Sequence[LedgerEntry]) -> list[str]:
    seen: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for entry in entries:
        seen[entry.source, entry.draw].append(entry.step)
    return [
        f"draw={draw} of source={source!r} is in the ledger {len(steps)} times, in steps "
        f"{', '.join(map(str, steps))}"
        for (source, draw), steps in seen.items()
        if len(steps) > 1
    ]


def _miscounted(entries: Sequence[LedgerEntry], ends: Sequence[StepEnd]) -> list[str]:
    counts = Counter(entry.step for entry in entries)
    return [
        f"step {end.step} has {counts[end.step]} lines of prompts, its end says {end.prompts}"
        for end in ends
        if counts[end.step] != end.prompts
    ]


def _missing(
    entries: Sequence[LedgerEntry], drawn: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """source -> (number of draws that have no line in the ledger, the first of them)"""
    made: defaultdict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if entry.draw >= 0:
            made[entry.source].add(entry.draw)
    return {
        name: (
            max([0, total, *(draw + 1 for draw in made[name])]) - len(made[name]),
            next(draw for draw in count() if draw not in made[name]),
        )
        for name, total in drawn.items()  # of the last plan; a removed source owes nothing
    }


def _skipped(missing: Mapping[str, tuple[int, int]]) -> list[str]:
    return [
        f"{draws} prompts of source={source!r} were drawn and are not accounted for: "
        f"skipped, the first of them draw={first}"
        for source, (draws, first) in missing.items()
        if draws
    ]


def _few(found: list[str]) -> list[str]:
    """The first problems of one kind, and the number of the others."""
    rest = len(found) - _SHOWN
    return found if rest <= 1 else [*found[:_SHOWN], f"{rest} more like: {found[_SHOWN]}"]
