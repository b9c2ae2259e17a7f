"""The three laws of the prompt stream, its draws, its resume, and what it refuses."""

import copy
import json
import logging
import pickle
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.mixture_plan import Apportionment, MixturePlan, PlannedPrompt, Ratio
from samplers.prompt_order import PromptOrder

SIZES = {"taco": 40, "nq": 25, "math": 10}
RATIOS = {"taco": 0.5, "nq": 0.3, "math": 0.2}

PLAIN_RATIO = st.sampled_from([1, 2, 3, 7, 20, 0.1, 0.25, 0.37, 1000, 1e-9])


@pytest.fixture(autouse=True, scope="module")
def _small_chunks():
    """Examples cross blocks, periods and chunks; what a plan gives may not depend on them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.prompt_order.BLOCK", 64)
        patch.setattr("samplers.prompt_order.MAX_PERIOD", 256)
        patch.setattr("samplers.mixture_plan._CHUNK", 64)
        yield


@st.composite
def settings_of_plans(draw: st.DrawFn, schedules: bool = True) -> dict[str, Any]:
    """Up to eight sources, one to 40 rows each, batches smaller and larger than their number."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True))
    schedule = st.dictionaries(st.integers(0, 30), PLAIN_RATIO, min_size=1, max_size=3)
    ratio = st.one_of(PLAIN_RATIO, schedule) if schedules else PLAIN_RATIO
    return {
        "sizes": {name: draw(st.integers(1, 40)) for name in names},
        "ratios": {name: draw(ratio) for name in names},
        "batch_size": draw(st.integers(1, 24)),
        "seed": draw(st.integers(-5, 2**40)),
    }


@st.composite
def rounded_plans(draw: st.DrawFn, most: int = 24) -> MixturePlan:
    """Up to 26 sources with schedules of their own, whose ratios have many digits."""
    ratio = st.one_of(st.floats(0.01, 10), PLAIN_RATIO, st.just(0))
    schedule = st.dictionaries(st.integers(0, 30), ratio, min_size=1, max_size=3)
    own = draw(st.lists(schedule, min_size=1, max_size=most))
    ratios: dict[str, Ratio] = {f"s{number:02}": own for number, own in enumerate(own)}
    ratios |= {"a": {0: 1 / 7, 5: 0.123456789012345}, "b": 1}
    return MixturePlan(dict.fromkeys(ratios, draw(st.integers(1, 40))), ratios, 20, 0)


def plans(schedules: bool = True) -> st.SearchStrategy[MixturePlan]:
    few = settings_of_plans(schedules).map(lambda settings: MixturePlan(**settings))
    return st.one_of(few, few, few, rounded_plans()) if schedules else few


def pairs(prompts: list[PlannedPrompt]) -> list[tuple[str, int]]:
    return [(prompt.source, prompt.row) for prompt in prompts]


def again(plan: MixturePlan) -> MixturePlan:
    """The same plan before its first draw."""
    fresh = copy.deepcopy(plan)
    fresh.position, fresh.drawn = 0, dict.fromkeys(plan.sources, 0)
    return fresh


# --- law 1: shares --------------------------------------------------------------------------------


@given(plans(), st.integers(1, 200))
def test_after_any_prompt_each_source_was_drawn_within_one_of_what_it_is_due(
    plan: MixturePlan, length: int
):
    drawn = dict.fromkeys(plan.sources, 0)
    for i, prompt in enumerate(plan.take(length), start=1):
        drawn[prompt.source] += 1
        due = plan.due(i)
        assert all(abs(drawn[name] - due[name]) < 1 for name in plan.sources)
    ahead = [float(drawn[name] - own) for name, own in plan.due(length).items()]
    assert plan.ahead(length).tolist() == pytest.approx(ahead, abs=1e-9)
    assert plan.drawn == drawn
    assert plan.position == length


@given(plans(schedules=False), st.integers(0, 10**12))
def test_what_is_due_is_position_times_share(plan: MixturePlan, i: int):
    assert plan.due(i) == {name: i * share for name, share in plan.due(1).items()}
    assert sum(plan.due(i).values()) == i


def due_in(plan: MixturePlan, index: int) -> dict[str, Fraction]:
    """Source -> prompts that it is due in one batch."""
    before, after = plan.due(index * plan.batch_size), plan.due((index + 1) * plan.batch_size)
    return {name: after[name] - before[name] for name in plan.sources}


@given(plans(), st.integers(0, 60))
def test_what_is_due_in_a_batch_sums_to_its_size(plan: MixturePlan, index: int):
    assert sum(due_in(plan, index).values()) == plan.batch_size


def test_a_schedule_is_linear_between_its_entries_and_constant_outside():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": {5: 0.8, 15: 0.2}, "b": {5: 0.2, 15: 0.8}}, 10, 0)
    assert [due_in(plan, index)["a"] for index in (0, 5, 10, 15, 99)] == [8, 8, 5, 2, 2]
    assert plan.counts(0) == {"a": 8, "b": 2}
    assert plan.counts(10) == {"a": 5, "b": 5}
    assert plan.counts(99) == {"a": 2, "b": 8}
    assert plan.due(20 * 10)["a"] == 10 * sum(
        Fraction(8, 10) - Fraction(6, 100) * max(0, min(10, index - 5)) for index in range(20)
    )


def test_a_source_may_get_one_more_prompt_after_its_ratio_has_become_0():
    ratios: dict[str, Ratio] = {
        "a": {0: 4, 4: 0},
        "b": {0: 1, 4: 8.25},
        "c": {0: 1, 4: 2.75},
        "d": {0: 5, 4: 0},
    }
    plan = MixturePlan(dict.fromkeys(ratios, 9), ratios, 4, 0)
    assert plan.due(16)["a"] == plan.due(20)["a"] == Fraction(40, 11)
    assert [plan.counts_between(0, 4 * k)["a"] for k in (4, 5)] == [3, 4]


def test_an_entry_that_says_what_the_line_says_changes_nothing():
    line: dict[int, float] = {0: 0.8, 9: 0.2}
    plain = MixturePlan({"a": 9, "b": 9}, {"a": line, "b": {0: 0.2, 9: 0.8}}, 10, 0)
    entries: dict[int, float] = {0: 0.2, 3: 0.4, 6: 0.6, 9: 0.8, 20: 0.8}
    explicit = MixturePlan({"a": 9, "b": 9}, {"a": line, "b": entries}, 10, 0)
    assert [due_in(plain, k) for k in range(25)] == [due_in(explicit, k) for k in range(25)]
    assert plain.take(250) == explicit.take(250)


@given(
    st.dictionaries(st.sampled_from("abcdefghi"), st.integers(0, 9), min_size=1).filter(
        lambda quotas: any(quotas.values())
    ),
    st.booleans(),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
)
def test_a_batch_whose_quotas_are_whole_holds_exactly_them(
    quotas: dict[str, int], as_floats: bool, indexes: list[int]
):
    batch_size = sum(quotas.values())
    divisor = batch_size if as_floats else 1
    ratios = {name: quota / divisor for name, quota in quotas.items()}
    plan = MixturePlan(dict.fromkeys(quotas, 5), ratios, batch_size, seed=0)
    for index in indexes:
        assert plan.counts(index) == quotas


UGLY = {"a": 0.1, "b": 0.3, "c": 0.123456789012345, "d": 0.476543210987655}


def test_whole_quotas_stay_whole_beside_ratios_that_are_rounded():
    plan = MixturePlan(dict.fromkeys(UGLY, 9), UGLY, 10, seed=0)
    assert "parts" in plan.description()
    for index in [*range(50), 2_000]:
        counts = plan.counts(index)
        assert (counts["a"], counts["b"]) == (1, 3)
    for index in (10**6, 10**12):
        due = plan.due(10 * index)
        assert (due["a"], due["b"]) == (index, 3 * index)


@given(rounded_plans(most=6), st.integers(1, 10**4))
def test_rounding_moves_what_is_due_by_less_than_its_bound(plan: MixturePlan, i: int):
    described = plan.description()
    exact = MixturePlan.from_description({**described, "parts": 0}).due(i)
    assert "parts" in described
    assert all(abs(due - exact[name]) < Fraction(i, 2**38) for name, due in plan.due(i).items())


def test_a_thousand_sources_with_schedules_keep_the_first_law():
    ratios: dict[str, Ratio] = {
        f"s{number}": {0: 1 + number % 7, 1 + 13 * number: 0.37 + number / 100}
        for number in range(1000)
    }
    plan = MixturePlan(dict.fromkeys(ratios, 10**5), ratios, 1024, seed=0)
    assert "parts" in plan.description()
    for batch in range(3):
        plan.take(1024)
        due = plan.due(1024 * (batch + 1))
        assert all(abs(plan.drawn[name] - due[name]) < 1 for name in plan.sources)


def test_remainders_are_carried_to_later_batches():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": 3, "b": 1}, batch_size=2, seed=0)
    drawn = [plan.counts(index)["b"] for index in range(8)]
    assert sorted(set(drawn)) == [0, 1]
    assert sum(drawn) == 4


def test_every_source_has_its_turn_where_a_batch_is_smaller_than_their_number():
    names = "abcdefg"
    plan = MixturePlan(dict.fromkeys(names, 9), dict.fromkeys(names, 1), batch_size=3, seed=0)
    total = Counter[str]()
    for index in range(7):
        total.update(plan.counts(index))
    assert total == dict.fromkeys(names, 3)


@given(plans(), st.integers(0, 20), st.data())
def test_counts_of_mini_batches_sum_to_those_of_the_batch_and_are_its_prompts(
    plan: MixturePlan, index: int, data: st.DataObject
):
    size = plan.batch_size
    cuts = sorted(data.draw(st.sets(st.integers(0, size), max_size=4)) | {0, size})
    source_ids = plan.batch(index).source_ids
    total = Counter[str]()
    for start, stop in pairwise(cuts):
        first, last = index * size + start, index * size + stop
        counts = plan.counts_between(first, last)
        inside = np.bincount(source_ids[start:stop], minlength=len(plan.sources))
        assert list(counts.values()) == inside.tolist()
        due = {name: plan.due(last)[name] - plan.due(first)[name] for name in plan.sources}
        assert all(abs(counts[name] - due[name]) < 2 for name in plan.sources)
        total.update(counts)
    assert dict(total) == plan.counts(index)


def test_a_mini_batch_whose_quotas_are_whole_holds_exactly_them():
    plan = MixturePlan(SIZES, RATIOS, batch_size=40, seed=0)
    for first in range(0, 4000, 10):
        assert plan.counts_between(first, first + 10) == {"taco": 5, "nq": 3, "math": 2}


@given(settings_of_plans(schedules=False), st.integers(0, 10**6))
def test_fixed_batches_all_hold_the_same_largest_remainder_counts(
    settings: dict[str, Any], index: int
):
    asked = MixturePlan(**settings).due(1)
    plan = MixturePlan(**settings, apportionment="fixed")
    counts = plan.counts(index)
    assert counts == plan.counts(0)
    assert sum(counts.values()) == plan.batch_size
    assert all(abs(counts[name] - plan.batch_size * asked[name]) < 1 for name in plan.sources)


def test_fixed_apportionment_that_starves_a_source_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        MixturePlan({"a": 1, "b": 1}, {"a": 99, "b": 1}, 4, 0, apportionment="fixed")
    assert "source=b seats=0 batch_size=4" in caplog.text


def test_carry_starves_no_source_and_says_nothing(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        plan = MixturePlan({"a": 1, "b": 1}, {"a": 99, "b": 1}, 4, 0)
    assert caplog.text == ""
    assert plan.counts_between(0, 100) == {"a": 99, "b": 1}


# --- law 2: rows ----------------------------------------------------------------------------------


@given(plans())
def test_a_source_repeats_no_row_before_its_pass_is_over(plan: MixturePlan):
    prompts = plan.take(300)
    for name in plan.sources:
        rows, size = [prompt.row for prompt in prompts if prompt.source == name], plan.sizes[name]
        for start in range(0, len(rows), size):
            one_pass = rows[start : start + size]
            assert len(set(one_pass)) == len(one_pass)
            assert all(0 <= row < size for row in one_pass)


@pytest.mark.slow
@given(plans())
def test_no_row_is_twice_in_a_batch_unless_its_source_is_smaller_than_its_part(plan: MixturePlan):
    most = most_in_a_batch(plan)
    for index in range(30):
        counts = plan.counts(index)
        batch = pairs(plan.take(plan.batch_size))
        for name in plan.sources:
            rows = [row for source, row in batch if source == name]
            assert len(rows) == counts[name]
            if plan.sizes[name] >= most[name]:
                assert len(set(rows)) == len(rows)


def most_in_a_batch(plan: MixturePlan) -> dict[str, int]:
    """Source -> prompts that no batch exceeds, whatever the remainders."""
    dues = [due_in(plan, index) for index in range(32)]
    return {
        name: min(plan.batch_size, int(max(due[name] for due in dues) + Fraction(1, 10**9)) + 2)
        for name in plan.sources
    }


@pytest.mark.parametrize(("size", "quota"), [(6, 6), (7, 6), (9, 6), (24, 6), (25, 6), (31, 6)])
def test_a_source_of_just_its_quota_has_no_row_twice_in_a_batch(size: int, quota: int):
    plan = MixturePlan({"a": size, "b": 50}, {"a": quota, "b": 4}, 10, seed=1)
    for _ in range(100):
        rows = [row for source, row in pairs(plan.take(10)) if source == "a"]
        assert len(set(rows)) == quota


@pytest.mark.parametrize(
    ("ratios", "batch_size"),
    [
        (UGLY, 10),
        (UGLY, 20),
        (
            {
                "a": {0: 0.7, 53: 0.3512345678901, 997: 0.2, 1009: 0.11},
                "b": {0: 0.3},
                "c": {0: 0, 53: 0.3487654321099, 997: 0.5, 1009: 0.59},
            },
            20,
        ),
    ],
    ids=["constant", "another size", "schedule"],
)
@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_rounded_plan_repeats_no_row_in_a_batch_of_a_source_of_just_its_quota(
    ratios: dict[str, Ratio], batch_size: int, more: int
):
    quota = 3 * batch_size // 10
    plan = MixturePlan({**dict.fromkeys(ratios, 999), "b": quota + more}, ratios, batch_size, 0)
    assert "parts" in plan.description()
    for _ in range(100):
        rows = [row for source, row in pairs(plan.take(batch_size)) if source == "b"]
        assert len(set(rows)) == len(rows) == quota


def test_the_order_of_a_source_does_not_depend_on_the_other_sources():
    alone = MixturePlan({"nq": 500}, {"nq": 1}, 8, seed=3)
    among = MixturePlan({"nq": 500, "math": 90}, {"nq": 0.1, "math": 0.9}, 64, seed=3)
    assert alone.rows("nq", range(2000)).tolist() == among.rows("nq", range(2000)).tolist()


# --- law 3: functions of their arguments ----------------------------------------------------------


@pytest.mark.slow
@given(plans(), st.integers(0, 300))
def test_a_batch_is_the_prompts_at_its_positions(plan: MixturePlan, index: int):
    batch = plan.batch(index)
    first = index * plan.batch_size
    alone = [again(plan).prompt(first), plan.prompt(first + plan.batch_size - 1)]
    one_by_one = [plan.prompt(first + offset) for offset in range(plan.batch_size)]
    together = [
        (plan.sources[source_id], row)
        for source_id, row in zip(batch.source_ids.tolist(), batch.rows.tolist(), strict=True)
    ]
    assert together == one_by_one
    assert [together[0], together[-1]] == alone
    assert (batch.source_ids.dtype, batch.rows.dtype) == (np.int16, np.int64)
    assert plan.counts(index) == {
        name: sum(source == name for source, _ in together) for name in plan.sources
    }
    assert (plan.position, plan.drawn) == (0, dict.fromkeys(plan.sources, 0))


@given(plans(), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_what_is_taken_is_the_stream(plan: MixturePlan, pieces: list[int]):
    taken = [prompt for piece in pieces for prompt in plan.take(piece)]
    fresh = again(plan)
    assert pairs(taken) == [fresh.prompt(i) for i in range(sum(pieces))]
    assert taken == fresh.take(sum(pieces))
    batches = sum(pieces) // plan.batch_size
    rows = [row for index in range(batches) for row in plan.batch(index).rows.tolist()]
    assert rows == [prompt.row for prompt in taken[: batches * plan.batch_size]]


@given(st.integers(0, 10**9), st.integers(1, 24))
def test_batches_far_out_are_the_prompts_at_their_positions(index: int, batch_size: int):
    plan = MixturePlan({"a": 10**9, "b": 77, "c": 12_345}, RATIOS_OF_THREE, batch_size, seed=5)
    batch = plan.batch(index)
    for offset in {0, batch_size // 2, batch_size - 1}:
        source, row = plan.prompt(index * batch_size + offset)
        assert plan.sources[int(batch.source_ids[offset])] == source
        assert batch.rows[offset] == row


RATIOS_OF_THREE = {"a": 0.5, "b": 0.3, "c": 0.2}


def test_the_stream_does_not_depend_on_blocks_chunks_and_periods():
    ratios = {"taco": 0.50123, "nq": 0.3, "math": {0: 0.2, 40: 0.1}}
    small = MixturePlan(SIZES, ratios, 20, 0)
    small_batches = [small.batch(index).rows.tolist() for index in range(0, 80, 7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.prompt_order.BLOCK", 4096)
        patch.setattr("samplers.prompt_order.MAX_PERIOD", 2**20)
        patch.setattr("samplers.mixture_plan._CHUNK", 2**15)
        true = MixturePlan(SIZES, ratios, 20, 0)
        assert [true.batch(index).rows.tolist() for index in range(0, 80, 7)] == small_batches


def test_the_batches_of_a_plan_cannot_be_written_to():
    batch = MixturePlan(SIZES, RATIOS, 20, 0).batch(3)
    with pytest.raises(ValueError, match="read-only"):
        batch.rows[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        batch.source_ids[0] = 1


def test_the_order_in_which_sources_are_named_does_not_matter():
    plan = MixturePlan(SIZES, RATIOS, 20, 0)
    turned = MixturePlan(dict(reversed(SIZES.items())), dict(reversed(RATIOS.items())), 20, 0)
    assert turned.take(100) == plan.take(100)
    assert turned.state_dict() == plan.state_dict()


def test_a_pickled_plan_is_the_same_stream():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    plan.take(33)
    copied = pickle.loads(pickle.dumps(plan))
    assert copied.prompt(12345) == plan.prompt(12345)
    assert copied.take(33) == plan.take(33)


def test_the_stream_of_a_plan_never_changes():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    assert " ".join(f"{source}{row}" for source, row in pairs(plan.take(10))) == PINNED


# Written down once: a change here reorders the data of every run that resumes.
PINNED = "taco15 nq2 taco30 math6 taco12 nq7 taco9 math9 nq22 taco31"


# --- drawing --------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "replace", "give_back"]),
        st.integers(0, 7),
        st.integers(0, 9),
    ),
    max_size=25,
)
"""(what, which source, how many prompts)"""


def draw_one(plan: MixturePlan, operation: tuple[str, int, int]) -> list[PlannedPrompt]:
    """Take, replace or give back; what was drawn."""
    what, number, prompts = operation
    source = plan.sources[number % len(plan.sources)]
    if what == "take":
        return plan.take(prompts)
    if what == "replace":
        return plan.replace({source: prompts})
    plan.give_back({source: max(0, plan.drawn[source] - prompts)})
    return []


@given(plans(), OPERATIONS)
def test_whatever_is_drawn_the_draws_of_each_source_have_no_gap(
    plan: MixturePlan, operations: list[tuple[str, int, int]]
):
    coming = dict.fromkeys(plan.sources, 0)
    taken = 0
    for operation in operations:
        for prompt in draw_one(plan, operation):
            assert prompt.draw == coming[prompt.source]
            assert prompt.row == plan.rows(prompt.source, [prompt.draw])[0]
            coming[prompt.source] += 1
        if operation[0] == "give_back":
            source = plan.sources[operation[1] % len(plan.sources)]
            coming[source] = max(0, coming[source] - operation[2])
        taken += operation[2] if operation[0] == "take" else 0
        assert plan.drawn == coming
    assert plan.position == taken


@given(plans(), OPERATIONS, st.integers(1, 60))
def test_replacements_do_not_change_whose_turn_it_is(
    plan: MixturePlan, operations: list[tuple[str, int, int]], prompts: int
):
    for operation in operations:
        draw_one(plan, operation)
    first, fresh = plan.position, again(plan)
    assert [prompt.source for prompt in plan.take(prompts)] == [
        prompt.source for prompt in fresh.take(first + prompts)[first:]
    ]


def test_a_replacement_is_the_next_row_of_the_same_source():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    plan.take(20)
    replacements = plan.replace({"nq": 2, "math": 1})
    assert [(prompt.source, prompt.draw) for prompt in replacements] == [
        ("nq", 6),
        ("nq", 7),
        ("math", 4),
    ]
    assert plan.position == 20
    assert next(prompt.draw for prompt in plan.take(20) if prompt.source == "nq") == 8


def test_draws_given_back_come_again():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    plan.take(20)
    first = plan.replace({"nq": 3})
    plan.give_back({"nq": 6})
    assert plan.replace({"nq": 3}) == first


@pytest.mark.parametrize("count", [-1, 7])
def test_more_than_was_drawn_cannot_be_given_back(count: int):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    plan.take(20)
    with pytest.raises(ValueError, match=f"source='nq' back to {count}: 6 were drawn"):
        plan.give_back({"taco": 1, "nq": count})
    assert plan.drawn == {"math": 4, "nq": 6, "taco": 10}


def test_what_is_before_the_start_is_refused():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    with pytest.raises(ValueError, match="position=-1"):
        plan.prompt(-1)
    with pytest.raises(ValueError, match="batch_index=-1"):
        plan.batch(-1)
    with pytest.raises(ValueError, match="batch_index=-1"):
        plan.counts(-1)
    with pytest.raises(ValueError, match="draw=-2 of source='nq'"):
        plan.rows("nq", [3, -2])


# --- resume ---------------------------------------------------------------------------------------


@given(settings_of_plans(), OPERATIONS, st.sets(st.integers(0, 24), max_size=4))
def test_a_run_that_stops_anywhere_and_resumes_draws_what_it_would_have_drawn(
    settings: dict[str, Any], operations: list[tuple[str, int, int]], stops: set[int]
):
    through, resumed = MixturePlan(**settings), MixturePlan(**settings)
    for number, operation in enumerate(operations):
        if number in stops:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = MixturePlan(**settings)
            resumed.load_state_dict(state)
        assert draw_one(resumed, operation) == draw_one(through, operation)
    assert resumed.state_dict() == through.state_dict()


LONG_ORDERS = pytest.mark.parametrize(
    "ratios",
    [
        UGLY,
        {"a": 0.50123, "b": 0.3, "c": 0.19877},
        {"a": 1, "b": {0: 3, 170: 1}, "c": {0: 1, 19: 0.1, 230: 7}},
        {**UGLY, "e": {7: 1, 171: 0.1}, "f": {3: 0.1, 250: 1}},
    ],
    ids=["rounded", "long period", "schedule", "rounded schedule"],
)


@LONG_ORDERS
@pytest.mark.parametrize("ahead", [None, 0, 20, 2000])
def test_a_resume_computes_nothing_before_the_block_of_the_step_trained_next(
    ratios: dict[str, Ratio], ahead: int | None, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = {"sizes": dict.fromkeys(ratios, 99), "ratios": ratios}
    plan = MixturePlan(**settings, batch_size=20, seed=0)
    plan.take(4001)
    trained = 4001 if ahead is None else 4000 - ahead
    plan.trained = None if ahead is None else trained
    state = json.loads(json.dumps(plan.state_dict()))
    blocks: list[int] = []
    pin_after = PromptOrder._pin_after  # pyright: ignore[reportPrivateUsage]

    def counted(order: PromptOrder, block: int, had: Any) -> Any:
        blocks.append(block)
        return pin_after(order, block, had)

    monkeypatch.setattr(PromptOrder, "_pin_after", counted)
    resumed = MixturePlan(**settings, batch_size=20, seed=0)
    resumed.load_state_dict(state)
    assert resumed.take(20) == plan.take(20)
    assert resumed.counts(-(-trained // 20)) == plan.counts(-(-trained // 20))
    assert resumed.counts(201) == plan.counts(201)
    assert min(blocks, default=trained // 64) >= trained // 64
    assert resumed.counts(3) == plan.counts(3)


@pytest.mark.slow
@LONG_ORDERS
def test_a_pin_that_is_not_of_this_plan_and_turn_is_computed_again_with_a_warning(
    ratios: dict[str, Ratio], caplog: pytest.LogCaptureFixture
):
    settings: dict[str, Any] = {"sizes": dict.fromkeys(ratios, 9), "ratios": ratios}
    plan = MixturePlan(**settings, batch_size=20, seed=0)
    plan.take(4000)
    state = plan.state_dict()
    pin: dict[str, Any] = state["pin"]
    expected = plan.take(4000)
    later: dict[str, Any] = plan.state_dict()["pin"]
    other = MixturePlan(**settings, batch_size=20, seed=1)
    other.take(4000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.prompt_order.BLOCK", 32)
        of_other_blocks = MixturePlan(**settings, batch_size=20, seed=0)
        of_other_blocks.take(4000)
        blocks: dict[str, Any] = of_other_blocks.state_dict()["pin"]
    flipped = f"{int(pin['ahead'][0], 16) ^ 8:x}{pin['ahead'][1:]}"  # of the first source
    wrong: list[Any] = [{**pin, "ahead": flipped}, {**pin, "ahead": 3}, {"ahead": ""}, "pin"]
    wrong += [{**later, "turn": pin["turn"]}, other.state_dict()["pin"], blocks]
    if dues := pin.get("dues"):
        wrong += [{**pin, "dues": [dues[0] + 7, dues[1] - 7, *dues[2:]]}]
    for each in [later, *wrong]:  # a later pin is right, but of no use
        resumed = MixturePlan(**settings, batch_size=20, seed=0)
        caplog.clear()
        resumed.load_state_dict({**state, "pin": each})
        assert ("pin=ignored" in caplog.text) == (each is not later)
        assert resumed.take(100) == expected[:100]


OF_1_0_0: dict[str, Any] = {
    "position": 777,
    "drawn": {"math": 246, "nq": 287, "taco": 244},
    "sizes": "df2d3713",
    "ratios": "9400fda7",
    "batch_size": 20,
    "seed": 0,
    "apportionment": "carry",
}
"""What release 1.0.0 wrote for shares that are rounded today."""

AFTER_OF_1_0_0 = "nq6 taco14 nq24 math2 nq8 nq9 taco27 nq16 nq12 taco11 nq1 nq23"


def test_a_run_of_1_0_0_goes_on_with_exact_shares():
    ratios: dict[str, Ratio] = {
        "taco": 0.314159265358979,
        "nq": {0: 0.271828182845904, 7: 0.1, 31: 0.577215664901532},
        "math": {0: 0.141421356237309, 13: 0.9, 29: 0.05},
    }
    plan = MixturePlan(SIZES, ratios, 20, 0)
    assert "parts" in plan.description()
    assert plan.differences(OF_1_0_0) == []
    plan.load_state_dict(OF_1_0_0)
    assert "parts" not in plan.description()
    assert "parts" not in plan.state_dict()
    assert " ".join(f"{source}{row}" for source, row in pairs(plan.take(12))) == AFTER_OF_1_0_0
    plan.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert MixturePlan.from_description(plan.description()).counts(50) == plan.counts(50)


@pytest.mark.parametrize("ratio", [{0: 1, 70: 1}, {0: 1, 70: 0.25}], ids=["constant", "changing"])
def test_a_run_of_1_0_0_keeps_exact_shares_where_they_are_too_many_for_a_new_run(
    ratio: Ratio, monkeypatch: pytest.MonkeyPatch
):
    ratios: dict[str, Ratio] = {"taco": ratio, "nq": {0: 1, 60: 1}, "math": 0.5}
    saved = MixturePlan(SIZES, ratios, 20, 0)
    saved.take(777)
    state = saved.state_dict()
    assert "parts" not in saved.description()
    of_1_0_0 = {field: state[field] for field in OF_1_0_0}
    monkeypatch.setattr("samplers.shares.MAX_EXACT", 8)  # there are three sources and three steps
    plan = MixturePlan(SIZES, ratios, 20, 0)
    assert "parts" in plan.description()
    plan.load_state_dict(of_1_0_0)
    for _ in range(3):
        assert plan.take(500) == saved.take(500)
        state = json.loads(json.dumps(plan.state_dict()))
        assert "parts" not in state
        plan = MixturePlan(SIZES, ratios, 20, 0)
        plan.load_state_dict(state)
    assert MixturePlan.from_description(plan.description()).due(7000) == saved.due(7000)


@pytest.mark.parametrize("is_of_1_0_0", [False, True])
def test_exact_shares_are_not_computed_for_a_state_of_another_stream(
    is_of_1_0_0: bool, monkeypatch: pytest.MonkeyPatch
):
    saved = MixturePlan({"a": 9, "b": 9}, {"a": 1, "b": 3}, 10, 0)
    saved.take(10)
    state = saved.state_dict()
    sizes = dict.fromkeys(UGLY if is_of_1_0_0 else "ab", 9)
    if is_of_1_0_0:
        del state["parts"]  # the sizes differ instead
    ratios = UGLY if is_of_1_0_0 else {"a": 0.1, "b": 0.123456789012345}
    plan = MixturePlan(sizes, ratios, 10, 0)
    assert "parts" in plan.description()
    monkeypatch.setattr("samplers.mixture_plan.Shares", None)
    with pytest.raises(ValueError, match="its state is of another stream"):
        plan.load_state_dict(state)
    plan.load_state_dict(state, on_change="continue")
    assert (plan.position, plan.drawn["b"]) == (10, saved.drawn["b"])


@given(st.integers(0, 10**12), st.integers(1, 50))
def test_far_out_a_resumed_stream_goes_on_as_the_plan_says(position: int, length: int):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    drawn = plan.counts_between(0, position)
    plan.load_state_dict({**plan.state_dict(), "position": position, "drawn": drawn})
    ahead = range(position, position + length)
    assert pairs(plan.take(length)) == [plan.prompt(i) for i in ahead]


def test_a_state_is_at_most_220_bytes_for_three_sources():
    plan = MixturePlan(
        {"taco": 26_000, "nq": 10**9, "math": 12_500}, {"taco": 1, "nq": 1, "math": 1 / 3}, 1024, 42
    )
    plan.position, plan.drawn = 10**8, dict.fromkeys(plan.drawn, 10**8)
    assert len(json.dumps(plan.state_dict())) <= 220


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sizes": {**SIZES, "nq": 26}}, "sizes="),
        ({"ratios": {**RATIOS, "nq": 0.4}}, "ratios="),
        ({"ratios": {**RATIOS, "nq": {0: 0.3, 9: 0.2}}}, "ratios="),
        ({"sizes": {**SIZES, "qa": 3}, "ratios": {**RATIOS, "qa": 0}}, "sizes="),
        ({"batch_size": 21}, "batch_size=20 where this plan has 21"),
        ({"seed": 1}, "seed=0 where this plan has 1"),
        ({"apportionment": "fixed"}, "apportionment='carry' where this plan has 'fixed'"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_what_differs(change: dict[str, Any], word: str):
    settings: dict[str, Any] = {"sizes": SIZES, "ratios": RATIOS, "batch_size": 20, "seed": 0}
    saved = MixturePlan(**settings)
    saved.take(20)
    other = MixturePlan(**{**settings, **change})
    with pytest.raises(ValueError, match="cannot continue a plan") as caught:
        other.load_state_dict(saved.state_dict())
    assert word in str(caught.value)
    for unchanged in {"batch_size", "seed", "apportionment"} - change.keys():
        assert f"{unchanged}=" not in str(caught.value)
    assert "mixed.on_change=continue" in str(caught.value)
    assert (other.position, set(other.drawn.values())) == (0, {0})


def test_ratios_that_mean_the_same_shares_are_the_same_stream():
    saved = MixturePlan(SIZES, {"taco": 5, "nq": 3, "math": 2}, 20, 0)
    MixturePlan(SIZES, RATIOS, 20, 0).load_state_dict(saved.state_dict())
    ugly = MixturePlan(dict.fromkeys(UGLY, 9), UGLY, 10, 0)
    tenfold = {name: Fraction(str(ratio)) * 10 for name, ratio in UGLY.items()}
    MixturePlan(ugly.sizes, tenfold, 10, 0).load_state_dict(ugly.state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [-1, 1.5, None, "3"])
@pytest.mark.parametrize("on_change", ["refuse", "continue"])
def test_a_state_without_a_position_is_refused(position: object, on_change: str):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    state = {**plan.state_dict(), "position": position}
    with pytest.raises(ValueError, match="want an int >= 0"):
        plan.load_state_dict(state, on_change=on_change)


@pytest.mark.parametrize("drawn", [None, 3, {"nq": -1}, {"nq": 1.5}, {"nq": "1"}])
@pytest.mark.parametrize("on_change", ["refuse", "continue"])
def test_a_state_without_draws_is_refused(drawn: object, on_change: str):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    with pytest.raises(ValueError, match="want ints >= 0 by source"):
        plan.load_state_dict({**plan.state_dict(), "drawn": drawn}, on_change=on_change)


def test_a_state_without_the_draws_of_a_source_is_refused_unless_told_to_continue():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    plan.take(40)
    state = plan.state_dict()
    lacking = {**state, "drawn": {"nq": 12, "taco": 20}}
    resumed = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    with pytest.raises(ValueError, match=r"draws of sources=\['nq', 'taco'\]: the stream has"):
        resumed.load_state_dict(lacking)
    assert resumed.state_dict() == MixturePlan(SIZES, RATIOS, 20, 0).state_dict()
    resumed.load_state_dict(lacking, on_change="continue")
    assert resumed.drawn == {"math": 0, "nq": 12, "taco": 20}


@pytest.mark.parametrize("change", [{}, {"batch_size": 0}, {"batch_size": "20"}])
def test_a_state_without_a_batch_size_is_refused_where_it_is_needed(change: dict[str, Any]):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    state = {"position": 3, "drawn": {}, **change}
    with pytest.raises(ValueError, match="batch_size"):
        plan.load_state_dict(state, on_change="continue")


def test_a_changed_mixture_continues_each_sources_draws_and_starts_new_ones():
    saved = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    saved.take(60)
    saved.replace({"nq": 5})
    changed = MixturePlan(
        {"taco": 40, "nq": 25, "qa": 30}, {"taco": 0.2, "nq": 0.4, "qa": 0.4}, 20, seed=0
    )
    changed.load_state_dict(saved.state_dict(), on_change="continue")
    assert changed.position == 60
    assert changed.drawn == {"taco": 30, "nq": 23, "qa": 0}
    batch = changed.take(20)
    assert Counter(prompt.source for prompt in batch) == changed.counts(3)
    assert {name: min(p.draw for p in batch if p.source == name) for name in changed.sources} == {
        "taco": 30,
        "nq": 23,
        "qa": 0,
    }


def test_a_source_that_a_state_does_not_have_starts_at_its_first_draw():
    saved = MixturePlan({"nq": 25}, {"nq": 1}, batch_size=20, seed=0)
    used = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    used.take(20)
    used.load_state_dict(saved.state_dict(), on_change="continue")
    assert used.drawn == {"math": 0, "nq": 0, "taco": 0}


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_the_position_stays_at_the_same_batch_where_the_batch_size_changes(
    before: int, after: int, batches: int
):
    saved = MixturePlan(SIZES, RATIOS, before, 0)
    saved.position = batches * before
    changed = MixturePlan(SIZES, RATIOS, after, 0)
    changed.load_state_dict(saved.state_dict(), on_change="continue")
    assert changed.position == batches * after


def test_a_plan_that_may_change_and_did_not_goes_on_as_it_was():
    saved = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    saved.take(33)
    same = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    same.load_state_dict(saved.state_dict(), on_change="continue")
    assert same.take(30) == saved.take(30)


SIMPLE_RATIO = st.sampled_from([1, 2, 3, 7, 20, 0.1, 0.25, 0.37])


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), SIMPLE_RATIO, min_size=1),
    st.dictionaries(st.sampled_from([0, 10, 30]), SIMPLE_RATIO, min_size=1),
    st.sampled_from(["carry", "fixed"]),
    st.integers(1, 24),
    st.integers(1, 60),
)
def test_a_described_plan_is_the_same_stream(
    constant: dict[str, float],
    schedule: dict[int, float],
    apportionment: Apportionment,
    batch_size: int,
    length: int,
):
    ratios: dict[str, Ratio] = {**constant}
    if apportionment == "carry":
        ratios["web"] = schedule
    plan = MixturePlan(dict.fromkeys(ratios, 9), ratios, batch_size, 4, apportionment)
    described = json.loads(json.dumps(plan.description()))
    assert described == plan.description()  # what a ledger compares after reading
    twin = MixturePlan.from_description(described)
    assert twin.state_dict() == plan.state_dict()
    assert twin.description() == plan.description()
    assert twin.differences(plan.state_dict()) == []
    assert twin.take(length) == plan.take(length)


@pytest.mark.parametrize(
    "ratios",
    [
        {"a": 1 / 3, "b": 1e-9, "c": 2 / 3 - 1e-9},
        {
            "a": 3,
            "b": {20: 1e-9},
            "c": {11: 3, 28: 0.1},
            "d": {18: 1e-9, 27: 0.25},
            "e": {18: 1e-9, 27: 0.25},
        },
        UGLY,
        {**UGLY, "e": {7: 1, 171: 0.1}, "f": {3: 0.1, 250: 1}},
    ],
    ids=["constant", "schedule", "rounded", "rounded schedule"],
)
def test_a_described_plan_of_awkward_ratios_is_the_same_stream(ratios: dict[str, Ratio]):
    plan = MixturePlan(dict.fromkeys(ratios, 9), ratios, 8, 0)
    twin = MixturePlan.from_description(json.loads(json.dumps(plan.description())))
    assert twin.differences(plan.state_dict()) == []
    assert twin.take(100) == plan.take(100)


@pytest.mark.parametrize(
    "description",
    [{}, {"ratios": 3}, {"ratios": {"a": {"0": "x"}}}, {"sizes": {}, "ratios": {"a": {"x": "1"}}}],
)
def test_what_describes_no_plan_is_refused(description: dict[str, Any]):
    with pytest.raises(ValueError, match="not the description of a mixture plan"):
        MixturePlan.from_description(description)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ratios", "word"),
    [
        (SIZES, {**RATIOS, "nq": -0.1}, "ratio=-0.1 of source='nq'"),
        (SIZES, {**RATIOS, "nq": float("nan")}, "ratio=nan of source='nq'"),
        (SIZES, {**RATIOS, "nq": {0: 0.1, 5: -1.0}}, "ratio=-1.0 of source='nq'"),
        (SIZES, {**RATIOS, "nq": {}}, "the schedule of source='nq' is {}"),
        (SIZES, {**RATIOS, "nq": {-3: 0.5}}, "the schedule of source='nq' is {-3: 0.5}"),
        (SIZES, dict.fromkeys(SIZES, 0.0), "no source has a ratio above 0"),
        (SIZES, {"taco": {0: 1, 7: 0}, "nq": 0, "math": 0}, "ratio above 0 after 7 batches"),
        ({}, {}, "no source has a ratio above 0"),
        ({**SIZES, "math": 0}, RATIOS, "source='math' has ratio=0.2 but no rows"),
        ({"taco": 1, "nq": 1}, RATIOS, "source='math' has ratio=0.2 but no rows"),
        ({"taco": 1, "nq": 1}, {"taco": 1, "nq": 1, "math": {0: 0, 9: 1}}, "'math' has ratio="),
        ({**SIZES, "qa": 3}, RATIOS, "source='qa' has rows but no ratio"),
        ({}, {str(n): 0 for n in range(2**15)}, "there are 32768 sources; want at most 32767"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused(
    sizes: dict[str, int], ratios: dict[str, Ratio], word: str
):
    with pytest.raises(ValueError, match="cannot plan the mixture") as caught:
        MixturePlan(sizes, ratios, 16, 0)
    assert word in str(caught.value)


def test_fixed_batches_take_the_only_entry_of_a_schedule_at_any_step():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": {5: 0.5}, "b": 0.5}, 4, 0, "fixed")
    assert plan.counts(0) == {"a": 2, "b": 2}


def test_batches_and_steps_have_no_more_prompts_than_can_be_counted():
    most, latest = 2**21, 2**40
    plan = MixturePlan({"a": 9, "b": 9}, {"a": {0: 1, latest: 0.1}, "b": 1}, most, 0)
    assert sum(plan.counts_between(0, 500).values()) == 500
    assert sum(plan.due(most * (latest + 9)).values()) == most * (latest + 9)
    with pytest.raises(ValueError, match=f"batch_size={most + 1} is not between 1 and {most}"):
        MixturePlan(SIZES, RATIOS, most + 1, 0)
    with pytest.raises(ValueError, match=f"source='a' has an entry at step={latest + 1}; steps"):
        MixturePlan({"a": 9, "b": 9}, {"a": {0: 1, latest + 1: 0.5}, "b": 1}, 1, 0)


def test_a_schedule_is_refused_where_all_batches_have_the_same_counts():
    with pytest.raises(ValueError, match="source='a' has a schedule, and apportionment='fixed'"):
        MixturePlan({"a": 1, "b": 1}, {"a": {0: 1, 9: 2}, "b": 1}, 4, 0, "fixed")


def test_all_mistakes_are_said_at_once():
    with pytest.raises(ValueError, match="cannot plan") as caught:
        MixturePlan(
            {"a": 0, "b": 1, "d": 1},
            {"a": 1.0, "c": -1.0, "d": {-1: 1.0}, "e": {0: 1.0, 5: float("inf")}},
            0,
            0,
            "greedy",  # type: ignore[arg-type]
        )
    words = ["'a' has ratio", "'b' has rows", "of source='c'", "schedule of source='d'"]
    for word in [*words, "ratio=inf of source='e'", "batch_size=0", "'greedy'"]:
        assert word in str(caught.value)


def test_a_source_with_ratio_zero_is_left_out_with_or_without_rows():
    plan = MixturePlan({"a": 3, "b": 3}, {"a": 1, "b": 0, "c": 0}, 4, 0)
    assert plan.counts(0) == {"a": 4, "b": 0, "c": 0}
    assert {prompt.source for prompt in plan.take(40)} == {"a"}


def test_a_source_may_begin_and_end_within_a_run():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": {0: 1, 10: 0}, "b": {0: 0, 10: 1}}, 10, 0)
    assert plan.counts(0) == {"a": 10, "b": 0}
    assert plan.counts(20) == {"a": 0, "b": 10}


@given(settings=settings_of_plans(), passes=st.integers(1, 3))
def test_a_pass_of_the_mixture_ends_when_every_source_has_drawn_all_its_rows(
    settings: dict[str, Any], passes: int
):
    settings["ratios"] = {
        name: ratio if isinstance(ratio, dict) else max(ratio, 0.1)
        for name, ratio in settings["ratios"].items()
    }
    plan = MixturePlan(**settings)
    if min(plan.due(10**5 * plan.batch_size).values()) < 1000:
        return  # a share of a billionth: counting its batches one by one takes too long

    def has_drawn_all(batches: int) -> bool:
        drawn = plan.counts_between(0, batches * plan.batch_size)
        return all(drawn[name] >= passes * size for name, size in plan.sizes.items())

    batches = plan.batches_of_passes(passes)
    assert has_drawn_all(batches)
    assert not has_drawn_all(batches - 1)


def test_a_source_whose_ratio_ends_before_its_rows_has_no_pass():
    ratios: dict[str, Ratio] = {"a": 1, "b": {0: 1, 5: 0}}
    plan = MixturePlan(sizes={"a": 8, "b": 1000}, ratios=ratios, batch_size=4, seed=0)

    with pytest.raises(ValueError, match="source='b' never draws its 1000 rows"):
        plan.batches_of_passes(1)


@pytest.mark.parametrize(
    ("sizes", "ratios", "batch_size", "batches"),
    [
        ((8, 40), (1, 1), 4, 20),
        ((3, 0), (1, 0), 16, 1),
        ((22, 8), ({0: 1, 10: 0}, {0: 0, 10: 1}), 4, 10),  # a is due 22 prompts, and never more
    ],
)
def test_a_pass_of_the_mixture_in_batches(
    sizes: tuple[int, int], ratios: tuple[Ratio, Ratio], batch_size: int, batches: int
):
    of_a, of_b = ratios
    plan = MixturePlan(dict(zip("ab", sizes, strict=True)), {"a": of_a, "b": of_b}, batch_size, 0)

    assert plan.batches_of_passes(1) == batches


@pytest.mark.parametrize(
    ("ratio", "apportionment", "passes", "said"),
    [(0.01, "fixed", 1, "source='b' gets no prompt"), (1, "carry", 10**14, "more than")],
)
def test_passes_that_never_end_are_refused(
    ratio: float, apportionment: Apportionment, passes: int, said: str
):
    plan = MixturePlan({"a": 8, "b": 8}, {"a": 1, "b": ratio}, 4, 0, apportionment)

    with pytest.raises(ValueError, match=said):
        plan.batches_of_passes(passes)
