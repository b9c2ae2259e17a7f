"""The audit finds every way in which a ledger can differ from the plan, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.audit import AuditReport, SourceAccount, audit, drew_ahead
from samplers.ledger import LedgerEntry, Line, PlanStart, StepEnd
from samplers.mixture_plan import MixturePlan
from tests.samplers.made_runs import (
    RATIOS,
    ROW_IDS,
    SIZES,
    changed,
    entry_of,
    new_plan,
    prompts_of,
    run_ahead,
    run_of,
    step_of,
    without,
)

STEPS = 5


def sound(lost: Sequence[int] = (1,)) -> list[Line]:
    return run_of(new_plan(), STEPS, lost)


def problems_of(lines: Sequence[Line], **options: Any) -> str:
    report = audit(lines, new_plan(), **options)
    assert not report.ok
    return "\n".join(report.problems)


def number_of(lines: Sequence[Line], outcome: str, step: int = 3) -> int:
    """Which prompt is the first of a step with an outcome."""
    return next(
        number
        for number, entry in enumerate(prompts_of(lines))
        if entry.outcome == outcome and entry.step == step
    )


# --- sound ledgers --------------------------------------------------------------------------------


def test_a_ledger_that_follows_the_plan_has_no_problems():
    report = audit(run_of(new_plan(), STEPS), new_plan(), row_ids=ROW_IDS)
    assert report == AuditReport(
        steps=5,
        sources={
            "math": SourceAccount(due=4.0, outcomes={"trained": 4}, under_way=0),
            "nq": SourceAccount(due=6.0, outcomes={"trained": 6}, under_way=0),
            "taco": SourceAccount(due=10.0, outcomes={"trained": 10}, under_way=0),
        },
        worst_batch=0,
        cumulative_error=report.cumulative_error,
        problems=(),
    )
    assert 0 < report.cumulative_error < 1
    assert report.trained == {"math": 4, "nq": 6, "taco": 10}


def test_prompts_that_were_replaced_are_no_problem():
    report = audit(sound(lost=(0, 1, 2)), new_plan(), row_ids=ROW_IDS)
    assert report.ok
    outcomes = [account.outcomes for account in report.sources.values()]
    assert {name: sum(own.get(name, 0) for own in outcomes) for name in outcomes[-1]} == {
        "filtered": 5,
        "failed": 5,
        "stale": 5,
        "trained": 20,
    }


def test_an_empty_ledger_has_no_problems():
    report = audit([], new_plan())
    assert report.ok
    assert (report.steps, report.worst_batch, report.cumulative_error) == (0, 0, 0.0)
    assert audit(run_of(new_plan(), 0), new_plan()).ok


@given(
    st.dictionaries(
        st.sampled_from("abcdefg"), st.sampled_from([1, 2, 0.3, 0.05, 1e-9]), min_size=1
    ),
    st.integers(1, 9),
    st.integers(0, 6),
    st.sets(st.integers(0, 8), max_size=3),
)
def test_whatever_the_mixture_a_run_that_follows_it_is_sound_and_its_error_is_below_one(
    ratios: dict[str, float], batch_size: int, steps: int, lost: set[int]
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.prompt_order.BLOCK", 64)
        plan = MixturePlan(dict.fromkeys(ratios, 6), ratios, batch_size, 0)
        report = audit(run_of(plan, steps, lost), plan)
    assert report.problems == ()
    assert report.steps == steps
    assert report.worst_batch == 0
    assert 0 <= report.cumulative_error < 1
    assert sum(report.trained.values()) == steps * batch_size
    for name, account in report.sources.items():
        assert account.due == pytest.approx(float(plan.due(steps * batch_size)[name]))


def test_the_error_is_the_largest_after_any_step():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": 1, "b": 1}, 1, 0)
    assert audit(run_of(plan, 6), plan).cumulative_error == 0.5


# --- planted violations ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, STEPS])
@pytest.mark.parametrize("outcome", ["trained", "failed"])
def test_a_missing_prompt_is_found(step: int, outcome: str):
    lines = sound()
    lost = prompts_of(lines)[number_of(lines, outcome, step)]
    problems = problems_of(without(lines, number_of(lines, outcome, step)))
    assert (
        f"1 prompts of source={lost.source!r} were drawn and are not accounted for: "
        f"skipped, the first of them draw={lost.draw}"
    ) in problems
    assert (f"step {step} trained" in problems) == (outcome == "trained")


@given(st.integers(0, 24))
def test_any_missing_prompt_is_found(number: int):
    assert "skipped" in problems_of(without(sound(), number))


@given(st.integers(0, 24), st.integers(1, STEPS))
def test_any_prompt_that_is_there_twice_is_found(number: int, step: int):
    lines = sound()
    twice = replace(prompts_of(lines)[number], step=step)
    end = next(at for at, line in enumerate(lines) if line == _end_of(lines, step))
    problems = problems_of([*lines[:end], twice, *lines[end:]])
    assert f"draw={twice.draw} of source={twice.source!r} is in the ledger 2 times" in problems


def _end_of(lines: Sequence[Line], step: int) -> StepEnd:
    return next(line for line in lines if isinstance(line, StepEnd) and line.step == step)


def test_a_batch_with_another_count_of_a_source_is_found():
    lines = run_of(new_plan(), STEPS)
    plan, step = new_plan(), 3
    number = next(
        number
        for number, entry in enumerate(prompts_of(lines))
        if entry.step == step and entry.source == "taco"
    )
    swapped = changed(lines, number, source="math")
    report = audit(swapped, plan)
    counts = plan.counts(step - 1)
    assert report.worst_batch == 1
    for source, error in (("math", 1), ("taco", -1)):
        words = f"step 3 trained {counts[source] + error} prompts of source={source!r}, "
        assert f"{words}the plan has {counts[source]}" in "\n".join(report.problems)


def test_a_batch_that_is_too_large_or_too_small_is_found():
    plan = new_plan()
    lines = run_of(plan, 2)
    extra = plan.take(1)[0]
    more = [*lines[:-1], entry_of(extra, 2), StepEnd(step=2, prompts=5, drawn=dict(plan.drawn))]
    assert f"step 2 trained {new_plan().counts(1)[extra.source] + 1} prompts" in problems_of(more)
    given_up = changed(lines, -1, outcome="failed")
    assert "step 2 trained" in problems_of(given_up)


def test_one_batch_off_by_one_shows_in_the_cumulative_error_also_when_it_is_made_good():
    plan = MixturePlan({"a": 90, "b": 90}, {"a": 1, "b": 1}, 4, 0)
    lines: list[Line] = [PlanStart(from_step=1, plan=plan.description())]
    for step, wanted in ((1, {"a": 4}), (2, {"b": 4}), (3, {"a": 2, "b": 2})):
        entries = [entry_of(prompt, step) for prompt in plan.replace(wanted)]
        lines += [*entries, StepEnd(step=step, prompts=4, drawn=dict(plan.drawn))]
    report = audit(lines, plan)
    assert (report.worst_batch, report.cumulative_error) == (2, 2.0)
    assert len(report.problems) == 4


@given(st.integers(0, 19), st.integers(-3, 9))
def test_a_row_that_is_not_the_draws_is_found(number: int, row: int):
    lines = run_of(new_plan(), STEPS)
    entry = prompts_of(lines)[number]
    if row != entry.row:
        assert (
            f"step {entry.step} has row={row} for draw={entry.draw} of "
            f"source={entry.source!r}, the plan has row={entry.row}"
        ) in problems_of(changed(lines, number, row=row))


@pytest.mark.parametrize("name", ["taco:ffff", "nq:0000"])
def test_a_row_id_that_is_not_the_rows_is_found(name: str):
    lines = changed(sound(), 7, row_id=name)
    entry = prompts_of(lines)[7]
    assert (
        f"step {entry.step} has row_id={name!r} for row={entry.row} of source={entry.source!r}, "
        f"the files have {ROW_IDS[entry.source][entry.row]!r}"
    ) in problems_of(lines, row_ids=ROW_IDS)
    assert audit(lines, new_plan()).ok  # without the files nothing is known of it


def test_a_row_that_the_files_do_not_have_is_found():
    short = {source: names[:2] for source, names in ROW_IDS.items()}
    assert "the files have 'no such row'" in problems_of(sound(), row_ids=short)


def test_a_row_id_that_is_not_known_is_not_looked_at():
    assert audit(changed(sound(), 3, row_id=""), new_plan(), row_ids=ROW_IDS).ok


@pytest.mark.parametrize("source", ["taco", "nq", "math"])
def test_a_draw_that_was_passed_over_is_found(source: str):
    plan = new_plan()
    lines = run_of(plan, 2)
    skipped = plan.drawn[source]
    plan.drawn[source] += 1
    lines += step_of(plan, 3)
    lines += step_of(plan, 4)
    lines += step_of(plan, 5)
    problems = problems_of(lines)
    assert f"1 prompts of source={source!r} were drawn and are not accounted for" in problems
    assert f"the first of them draw={skipped}" in problems


def test_a_draw_before_the_first_is_found():
    assert "has draw=-1 of source=" in problems_of(changed(sound(), 2, draw=-1))


def test_a_draw_far_beyond_the_others_costs_no_memory():
    lines = changed(sound(), 7, draw=1 << 62)
    source = prompts_of(sound())[7].source
    made = sum(entry.source == source for entry in prompts_of(lines))
    assert f"{(1 << 62) + 1 - made} prompts of source={source!r} were" in problems_of(lines)


def test_a_missing_step_is_found():
    lines = [line for line in sound() if getattr(line, "step", 0) != 3]
    problems = problems_of(lines)
    assert "step 4 follows step 2" in problems
    assert "skipped" in problems


def test_a_step_whose_end_is_missing_is_found():
    lines = [line for line in sound() if line != _end_of(sound(), 3)]
    assert "step 4 follows step 2" in problems_of(lines)


def test_a_late_start_is_found():
    lines = [line for line in sound() if getattr(line, "step", 9) > 1]
    assert "the first step is 2, not 1" in problems_of(lines)


def test_a_step_that_is_there_twice_is_found():
    plan = new_plan()
    lines = run_of(plan, 2)
    problems = problems_of([*lines, *lines[-5:]])
    assert "a step ends twice" in problems
    assert "is in the ledger 2 times, in steps 2, 2" in problems
    assert "step 2 trained" in problems
    assert "a step ends twice" in problems_of([*lines, *step_of(plan, 2)])


def test_steps_out_of_order_are_found():
    plan = new_plan()
    start, first, second = run_of(plan, 0), step_of(plan, 1), step_of(plan, 2)
    assert "steps are out of order" in problems_of([*start, *second, *first])


def test_a_source_that_is_in_no_plan_is_found():
    lines = changed(sound(), 4, source="web")
    assert "source='web' is in the ledger and in no plan" in problems_of(lines)
    assert audit(lines, new_plan()).sources["web"].outcomes == {"trained": 1}


@pytest.mark.parametrize("error", [-1, 1])
def test_a_step_that_says_another_number_of_prompts_than_it_has_is_found(error: int):
    end = _end_of(sound(), 3)
    lines = [replace(end, prompts=end.prompts + error) if line == end else line for line in sound()]
    assert "step 3" in problems_of(lines)


def test_a_prompt_that_was_lost_from_the_file_of_a_run_in_flight_is_found():
    lines = sound()
    lost = prompts_of(lines)[number_of(lines, "failed", 3)]  # its step's end still counts it
    problems_of([line for line in lines if line is not lost], in_flight=True)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (MixturePlan(SIZES, RATIOS, 4, 9), "seed=9"),
        (MixturePlan(SIZES, {**RATIOS, "nq": 4}, 4, 3), "ratios="),
        (MixturePlan({**SIZES, "nq": 6}, RATIOS, 4, 3), "sizes="),
        (MixturePlan(SIZES, RATIOS, 5, 3), "batch_size=5"),
        (MixturePlan(SIZES, RATIOS, 4, 3, "fixed"), "apportionment='fixed'"),
    ],
)
def test_a_ledger_of_another_plan_than_the_runs_is_found(other: MixturePlan, word: str):
    problems = problems_of(run_of(other, STEPS))
    assert f"the ledger's plan has {word}" in problems
    by_its_own = [line.startswith("the ledger's plan has ") for line in problems.splitlines()]
    assert all(by_its_own)


@pytest.mark.parametrize(
    "other",
    [MixturePlan(SIZES, RATIOS, 4, 9), MixturePlan(SIZES, {"taco": 2, "nq": 3, "math": 5}, 4, 3)],
)
def test_a_ledger_that_names_the_runs_plan_and_follows_another_is_found(other: MixturePlan):
    start = run_of(new_plan(), 0)
    assert problems_of([*start, *run_of(other, STEPS)[1:]])


def test_a_ledger_that_does_not_say_its_plan_is_found():
    assert problems_of(sound()[1:]) == "the ledger does not say which plan it follows"


@pytest.mark.parametrize("description", [{}, {"sizes": 3}])
def test_what_is_no_plan_is_an_error(description: dict[str, Any]):
    with pytest.raises(ValueError, match="not the description of a mixture plan"):
        audit([PlanStart(from_step=1, plan=description)], new_plan())


def test_a_long_list_of_one_kind_is_cut_with_its_number():
    lines: list[Line] = [
        replace(line, row=-1) if isinstance(line, LedgerEntry) else line for line in sound()
    ]
    report = audit(lines, new_plan())
    assert len(report.problems) == 6
    assert report.problems[-1].startswith("20 more like: step ")


MUTATIONS: dict[str, Callable[[LedgerEntry], LedgerEntry]] = {
    "another draw": lambda entry: replace(entry, draw=entry.draw + 1),
    "another row": lambda entry: replace(entry, row=entry.row + 1),
    "another source": lambda entry: replace(entry, source="nq" if entry.source != "nq" else "math"),
    "another step": lambda entry: replace(entry, step=entry.step % STEPS + 1),
    "not trained": lambda entry: replace(entry, outcome="filtered"),
    "another row_id": lambda entry: replace(entry, row_id=entry.row_id + "0"),
}


@given(st.integers(0, 19), st.sampled_from(sorted(MUTATIONS)), st.booleans())
def test_no_change_of_a_trained_prompt_goes_unseen(number: int, what: str, in_flight: bool):
    lines = run_of(new_plan(), STEPS)
    old = prompts_of(lines)[number]
    new = MUTATIONS[what](old)
    lines = [new if line is old else line for line in lines]
    assert problems_of(lines, in_flight=in_flight, row_ids=ROW_IDS)


# --- runs that are not over -----------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5))
def test_open_draws_at_the_end_are_tolerated_in_a_run_in_flight_and_only_there(
    ahead: int, steps: int
):
    lines = run_ahead(new_plan(), steps, ahead)
    report = audit(lines, new_plan(), in_flight=True, row_ids=ROW_IDS)
    assert report.problems == ()
    assert sum(account.under_way for account in report.sources.values()) == ahead
    over = audit(lines, new_plan())
    assert all("were drawn and are not accounted for" in words for words in over.problems)
    assert not over.ok


def test_unfinished_prompts_account_for_what_was_open_when_the_run_was_over():
    plan = new_plan()
    lines = run_of(plan, 2)
    left = [entry_of(prompt, 2, "unfinished") for prompt in plan.take(3)]
    over = [*lines[:-1], *left, StepEnd(step=2, prompts=7, drawn=dict(plan.drawn))]
    assert audit(over, new_plan()).ok
    assert "skipped" in problems_of([*over[:-2], over[-1]])


@pytest.mark.parametrize("step", [1, 3, STEPS])
def test_a_trained_prompt_that_is_missing_is_found_also_in_flight(step: int):
    lines = sound()
    problems = problems_of(without(lines, number_of(lines, "trained", step)), in_flight=True)
    assert f"step {step} trained" in problems


def test_prompts_under_way_have_no_line_yet_and_all_others_are_held_against_the_plan():
    lines = run_ahead(new_plan(), 4, 5)
    assert "has row=" in problems_of(changed(lines, 3, row=-1), in_flight=True)
    assert "2 times" in problems_of([*lines[:-1], lines[1], lines[-1]], in_flight=True)


# --- runs whose plan changes ----------------------------------------------------------------------


def two_eras(first: MixturePlan, second: MixturePlan, steps: int = 4) -> list[Line]:
    lines = run_of(first, steps, lost=[1])
    second.load_state_dict(first.state_dict(), on_change="continue")
    return lines + run_of(second, steps, lost=[1], first=steps + 1)


@pytest.mark.parametrize(
    "second",
    [
        MixturePlan(SIZES, RATIOS, 4, 8),
        MixturePlan(SIZES, {"taco": 1, "nq": 1, "math": 2}, 4, 3),
        MixturePlan(SIZES, RATIOS, 6, 3),
        MixturePlan({**SIZES, "nq": 11}, RATIOS, 4, 3),
        MixturePlan({**SIZES, "web": 8}, {**RATIOS, "web": 5}, 4, 3),
        MixturePlan({"taco": 7, "nq": 5}, {"taco": 5, "nq": 3}, 4, 3),
        MixturePlan(SIZES, {**RATIOS, "nq": {4: 3, 8: 1}}, 4, 3),
    ],
    ids=["seed", "ratios", "batch size", "sizes", "new source", "source left", "schedule"],
)
def test_a_plan_that_changes_in_the_middle_of_a_run_is_no_problem(second: MixturePlan):
    second = MixturePlan.from_description(second.description())
    lines = two_eras(new_plan(), second)
    report = audit(lines, second)
    assert report.problems == ()
    assert report.steps == 8
    assert report.worst_batch == 0


def test_each_step_is_held_against_the_plan_of_its_time():
    second = MixturePlan(SIZES, {"taco": 2, "nq": 3, "math": 5}, 4, 3)
    lines = two_eras(new_plan(), second)
    late = next(at for at, line in enumerate(lines) if isinstance(line, PlanStart) and at)
    moved = replace(lines[late], from_step=7)  # type: ignore[type-var]
    assert "step 5 trained" in "\n".join(
        audit([*lines[:late], moved, *lines[late + 1 :]], second).problems
    )


def test_a_run_that_ends_under_another_plan_than_its_own_is_found():
    lines = two_eras(new_plan(), MixturePlan(SIZES, RATIOS, 4, 8))
    assert audit(lines, MixturePlan(SIZES, RATIOS, 4, 8)).ok
    assert problems_of(lines) == "the ledger's plan has seed=8 where this plan has 3"


def test_of_two_plans_from_the_same_step_the_later_holds():
    start = PlanStart(from_step=1, plan=MixturePlan(SIZES, RATIOS, 4, 8).description())
    assert audit([start, *sound()], new_plan()).ok


def test_a_draw_that_was_passed_over_where_the_plan_changed_is_found():
    first, second = new_plan(), MixturePlan(SIZES, RATIOS, 4, 8)
    lines = run_of(first, 3)
    second.load_state_dict(first.state_dict(), on_change="continue")
    second.drawn["taco"] += 1
    lines += run_of(second, 3, first=4)
    report = audit(lines, second)
    assert ["source='taco' were drawn and are not accounted for" in p for p in report.problems] == [
        True
    ]


def test_prompts_under_way_when_the_plan_changed_are_of_the_rows_that_the_first_plan_chose():
    first, second = new_plan(), MixturePlan(SIZES, RATIOS, 4, 8)
    lines = run_of(first, 2)
    under_way = first.replace(second.counts(2))
    lines += [
        PlanStart(from_step=3, plan=second.description()),
        *(entry_of(prompt, 3) for prompt in under_way),
        StepEnd(step=3, prompts=4, drawn=dict(first.drawn)),
    ]
    assert audit(lines, second).problems == ()


@given(st.integers(0, 6), st.integers(2, 5))
def test_only_an_asynchronous_run_drew_ahead(ahead: int, steps: int):
    assert not drew_ahead(run_of(new_plan(), steps, lost=(0, 2)))
    assert drew_ahead(run_ahead(new_plan(), steps, ahead)) == bool(ahead)
