"""After any number of prompts every source has had within one of what it is due."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.prompt_order import BLOCK, MAX_PERIOD, Counts, Dues, PromptOrder, _floor_sum

Knots = dict[int, Counts]

SMALL_BLOCKS = st.sampled_from([16, 64, 5, 2])
SMALL_PERIODS = st.sampled_from([1, 8, 64, 512])

WEIGHT = st.one_of(
    st.integers(0, 5),
    st.integers(0, 100),
    st.sampled_from([1, 10**9 - 1, 10**9, 10**18]),
    st.integers(1, 10**9),
)


@contextmanager
def blocks_of(block: int, max_period: int) -> Iterator[None]:
    """Orders built inside have so short blocks and periods that an example crosses many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.prompt_order.BLOCK", block)
        patch.setattr("samplers.prompt_order.MAX_PERIOD", max_period)
        patch.setattr("samplers.prompt_order._KEPT_BLOCKS", 3)
        yield


def constant(weights: Sequence[int], prompts_per_step: int = 1) -> Dues:
    return Dues({0: tuple(weights)}, prompts_per_step)


@st.composite
def knots(draw: st.DrawFn, whole_slopes: bool = False) -> Knots:
    """One to nine sources of any weights, zeros among them; one knot or several."""
    sources = draw(st.integers(1, 9))
    row = st.lists(WEIGHT, min_size=sources, max_size=sources).filter(any)
    count = draw(st.integers(1, 4))
    rows = draw(st.lists(row, min_size=count, max_size=count))
    later = st.sets(st.integers(1, 40), min_size=count - 1, max_size=count - 1)
    steps = [0, *sorted(draw(later))]
    total = math.lcm(*map(sum, rows))
    finest = math.lcm(*(b - a for a, b in pairwise(steps))) if whole_slopes else 1
    return {
        step: tuple(weight * (total // sum(weights)) * finest for weight in weights)
        for step, weights in zip(steps, rows, strict=True)
    }


PROMPTS_PER_STEP = st.integers(1, 12)


def parts_due(dues: Dues, prompts: int) -> list[int]:
    """(S,) parts that each source is due after a number of prompts."""
    whole, parts = dues.after(prompts)
    assert all(0 <= part < dues.scale for part in parts)
    return [a * dues.scale + int(b) for a, b in zip(whole.tolist(), parts, strict=True)]


def farthest_from_due(dues: Dues, prompts: Sequence[int]) -> Fraction:
    """The largest difference between prompts had and due, over all sources and prefixes."""
    had = [0] * dues.sources
    worst = 0
    for prompt, source in enumerate(prompts, start=1):
        had[source] += 1
        due = parts_due(dues, prompt)
        strays = (abs(count * dues.scale - own) for count, own in zip(had, due, strict=True))
        worst = max(worst, *strays)
    return Fraction(worst, dues.scale)


def weights_by_hand(given_knots: Knots, step: int) -> list[Fraction]:
    """What each source is due in one prompt of a step, of a whole prompt."""
    total = sum(given_knots[0])
    for left, right in pairwise(given_knots):
        if left <= step < right:
            way = Fraction(step - left, right - left)
            pairs = zip(given_knots[left], given_knots[right], strict=True)
            return [(a + (b - a) * way) / total for a, b in pairs]
    return [Fraction(weight, total) for weight in last_of(given_knots)]


def last_of(given_knots: Knots) -> Counts:
    """The weights after the last knot."""
    return [*given_knots.values()][-1]


# --- dues ---------------------------------------------------------------------------------------


@given(knots(whole_slopes=True), PROMPTS_PER_STEP, st.integers(1, 200))
def test_what_is_due_is_the_sum_over_the_prompts_so_far(
    given_knots: Knots, prompts_per_step: int, prompts: int
):
    dues = Dues(given_knots, prompts_per_step)
    total = [Fraction(0)] * len(given_knots[0])
    for prompt in range(prompts):
        rates = weights_by_hand(given_knots, prompt // prompts_per_step)
        total = [due + rate for due, rate in zip(total, rates, strict=True)]
    assert [Fraction(due, dues.scale) for due in parts_due(dues, prompts)] == total
    step = prompts // prompts_per_step
    own = [Fraction(int(weight), dues.scale) for weight in dues.weights(step)]
    assert own == weights_by_hand(given_knots, step)


@given(knots(), PROMPTS_PER_STEP, st.integers(1, 200))
def test_weights_that_are_no_whole_numbers_are_rounded_and_their_sums_are_exact(
    given_knots: Knots, prompts_per_step: int, prompts: int
):
    dues, total = Dues(given_knots, prompts_per_step), [0] * len(given_knots[0])
    for prompt in range(prompts):
        step = prompt // prompts_per_step
        weights = [int(weight) for weight in dues.weights(step)]
        line = [rate * dues.scale for rate in weights_by_hand(given_knots, step)]
        assert sum(weights) == dues.scale and min(weights) >= 0
        assert all(abs(own - exact) < 1 for own, exact in zip(weights, line, strict=True))
        total = [due + weight for due, weight in zip(total, weights, strict=True)]
    assert parts_due(dues, prompts) == total


@pytest.mark.parametrize("before", [(4, 0, 0), (2, 2, 0)], ids=["alone", "two"])
def test_an_order_computes_no_knot_that_no_source_waits_for(before: Counts):
    given_knots: Knots = {0: before, 500: before} | dict.fromkeys(range(501, 900), (2, 1, 1))
    asked: list[int] = []

    class Asked(dict[int, Counts]):
        def __getitem__(self, step: int) -> Counts:
            asked.append(step)
            return super().__getitem__(step)

    order = PromptOrder(Dues(Asked(given_knots), 100))
    order.between(0, 5 * BLOCK)
    assert max(asked) <= 501


@given(st.integers(0, 1000), st.integers(1, 1000), st.lists(st.integers(0, 999), min_size=1))
def test_a_sum_of_rounded_slopes_is_the_sum_of_its_terms(
    count: int, length: int, slopes: list[int]
):
    slopes = [slope % length for slope in slopes]
    sums = [sum(slope * k // length for k in range(count)) for slope in slopes]
    for dtype in (np.int64, object):
        assert _floor_sum(count, length, np.array(slopes, dtype=dtype)).tolist() == sums


def test_a_constant_source_keeps_its_whole_prompts_beside_rounded_ones():
    given_knots: Knots = {0: (50, 20, 30), 7: (50, 41, 9), 18: (50, 0, 50)}
    dues = Dues(given_knots, 10)
    assert all(dues.weights(step)[0] == 50 for step in range(30))
    assert [dues.after(10 * step)[0][0] for step in range(30)] == [5 * step for step in range(30)]


@pytest.mark.parametrize("length", [10**5, 10**10, 10**18])
def test_a_schedule_may_take_any_number_of_steps(length: int):
    dues = Dues({0: (1, 9), length: (7, 3)}, 3)
    assert dues.weights(length // 2).tolist() == [4, 6]
    prompts = length // 3
    wholes = dues.after(prompts)[0] + 1
    for deadline, source in dues.in_order(prompts, np.arange(2), wholes):
        assert dues.after(int(deadline))[0][source] == wholes[source]
        assert dues.after(int(deadline) - 1)[0][source] < wholes[source]


@given(knots(), PROMPTS_PER_STEP, st.integers(0, 10**9))
def test_all_sources_together_are_due_every_prompt(
    given_knots: Knots, prompts_per_step: int, prompts: int
):
    dues = Dues(given_knots, prompts_per_step)
    assert sum(parts_due(dues, prompts)) == prompts * dues.scale


@given(knots(), PROMPTS_PER_STEP, st.integers(0, 300), st.integers(1, 60), st.integers(0, 5))
def test_a_window_says_after_which_prompt_a_source_is_due_a_number_of_prompts(
    given_knots: Knots, prompts_per_step: int, first: int, length: int, more: int
):
    dues = Dues(given_knots, prompts_per_step)
    window = dues.window(first, first + length)
    due = [parts_due(dues, first + offset) for offset in range(1, length + 1)]
    sources = np.arange(dues.sources)
    for parts in (0, 1):
        found = window.first_with(sources, window.floors + more, parts)
        for source, floor in enumerate(window.floors.tolist()):
            wanted = (floor + more) * dues.scale + parts
            by_hand = [offset for offset, own in enumerate(due) if own[source] >= wanted]
            assert found[source] == (by_hand[0] if by_hand else length)


@given(knots(), st.integers(1, 6), st.integers(0, 60), st.integers(1, 12))
def test_deadlines_are_where_a_prompt_is_due_and_was_not_before_and_come_in_order(
    given_knots: Knots, prompts_per_step: int, prompts: int, more: int
):
    dues = Dues(given_knots, prompts_per_step)
    wholes = dues.after(prompts)[0] + more
    found = list(
        Dues(given_knots, prompts_per_step).in_order(prompts, np.arange(dues.sources), wholes)
    )
    assert found == sorted(found)
    assert sorted(source for _, source in found) == list(range(dues.sources))
    for deadline, source in found:
        wanted = int(wholes[source]) * dues.scale
        if math.isinf(deadline):
            assert last_of(given_knots)[source] == 0
            assert parts_due(dues, 41 * prompts_per_step)[source] < wanted
        elif deadline < 2**62:
            assert parts_due(dues, int(deadline))[source] >= wanted
            assert parts_due(dues, int(deadline) - 1)[source] < wanted


# --- the order ----------------------------------------------------------------------------------


@given(knots(), PROMPTS_PER_STEP, SMALL_BLOCKS, SMALL_PERIODS, st.integers(1, 150))
def test_every_prefix_is_within_one_prompt_of_what_is_due(
    given_knots: Knots, prompts_per_step: int, block: int, max_period: int, length: int
):
    dues = Dues(given_knots, prompts_per_step)
    with blocks_of(block, max_period):
        prompts = PromptOrder(dues).between(0, length).tolist()
    assert len(prompts) == length
    assert farthest_from_due(dues, prompts) < 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any), SMALL_BLOCKS)
def test_a_period_gives_every_source_its_weight(weights: list[int], block: int):
    period = sum(weights) // math.gcd(*weights)
    for max_period in (1, 512):  # pins without end, and one period kept
        with blocks_of(block, max_period):
            prompts = PromptOrder(constant(weights)).between(0, 2 * period)
        assert farthest_from_due(constant(weights), prompts.tolist()) < 1
        for cycle in (prompts[:period], prompts[period:]):
            seats = np.bincount(cycle, minlength=len(weights)) * math.gcd(*weights)
            assert seats.tolist() == weights


@pytest.mark.parametrize(
    "weights",
    [
        [5, 3, 2],
        [1, 10**9 - 1],
        [1, 1, 10**9],
        [333_333_331, 333_333_333, 333_333_336],
        [1, 2, 3, 5, 7, 11, 13, 17, 10**7],
        [10**18, 1, 10**18 + 7],
    ],
)
def test_the_law_holds_over_several_blocks_of_full_size(weights: list[int]):
    dues, length = constant(weights), 3 * BLOCK + 100
    prompts = PromptOrder(dues).between(0, length)
    prefix = np.arange(1, length + 1, dtype=object)
    for source, weight in enumerate(weights):
        had = np.cumsum(prompts == source).astype(object)
        assert np.abs(had * dues.scale - prefix * weight).max() < dues.scale


def test_one_in_a_billion_has_its_prompt_once_in_a_billion():
    dues = constant([1, 999_999_999])
    assert [*dues.in_order(0, np.array([0]), np.array([1]))] == [(10**9, 0)]
    assert PromptOrder(dues).had(20_000)[0] <= 1


@given(knots(), PROMPTS_PER_STEP, SMALL_BLOCKS, SMALL_PERIODS, st.integers(0, 120), st.data())
def test_prompts_had_are_the_prompts_between(
    given_knots: Knots,
    prompts_per_step: int,
    block: int,
    max_period: int,
    first: int,
    data: st.DataObject,
):
    last = data.draw(st.integers(first, 180))
    with blocks_of(block, max_period):
        order = PromptOrder(Dues(given_knots, prompts_per_step))
        inside = np.bincount(order.between(first, last), minlength=len(given_knots[0]))
        before, after = order.had(first), order.had(last)
    assert [b - a for a, b in zip(before, after, strict=True)] == inside.tolist()
    assert sum(before) == first


@pytest.mark.slow
@given(
    knots(),
    PROMPTS_PER_STEP,
    SMALL_BLOCKS,
    SMALL_PERIODS,
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=1, max_size=6),
)
def test_slots_read_anywhere_and_in_any_order_are_those_read_in_sequence(
    given_knots: Knots,
    prompts_per_step: int,
    block: int,
    max_period: int,
    reads: list[tuple[int, int]],
):
    dues = Dues(given_knots, prompts_per_step)
    with blocks_of(block, max_period):
        in_sequence, anywhere = PromptOrder(dues), PromptOrder(dues)
        sequence = [
            source
            for first in range(0, 190, 19)
            for source in in_sequence.between(first, first + 19).tolist()
        ]
        for first, length in reads:
            read = anywhere.between(first, first + length).tolist()
            assert read == sequence[first : first + length]
            seen = [sequence[:first].count(source) for source in range(dues.sources)]
            assert list(anywhere.had(first)) == seen


@pytest.mark.slow
@given(knots(), PROMPTS_PER_STEP, SMALL_BLOCKS, SMALL_PERIODS, st.integers(0, 300))
def test_an_order_goes_on_from_a_pin_without_what_came_before(
    given_knots: Knots, prompts_per_step: int, block: int, max_period: int, first: int
):
    with blocks_of(block, max_period):
        through, resumed = (PromptOrder(Dues(given_knots, prompts_per_step)) for _ in range(2))
        pin = json.loads(json.dumps(through.pin(first)))
        if pin:
            resumed.load_pin(pin)
            assert resumed.pin(pin["turn"]) == pin
        assert resumed.had(first) == through.had(first)
        assert resumed.between(first, first + 40).tolist() == (
            through.between(first, first + 40).tolist()
        )
        assert resumed.pin(first + 40) == through.pin(first + 40)
        assert resumed.had(first // 2) == through.had(first // 2)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any),
    SMALL_BLOCKS,
    st.integers(0, 10**15),
    st.integers(0, 100),
)
def test_far_out_a_periodic_order_is_the_one_at_its_place_in_the_period(
    weights: list[int], block: int, cycle: int, place: int
):
    period = sum(weights) // math.gcd(*weights)
    with blocks_of(block, 512):
        order = PromptOrder(constant(weights))
        here, there = order.between(place, place + 50), cycle * period + place
        assert order.between(there, there + 50).tolist() == here.tolist()
        grown = [b - a for a, b in zip(order.had(place), order.had(there), strict=True)]
    assert grown == [cycle * own // math.gcd(*weights) for own in weights]


def test_the_order_far_into_an_endless_one_is_lawful():
    dues = constant([314_159, 271_828, 141_421, 577_215])
    with blocks_of(BLOCK, 1):
        order = PromptOrder(dues)
        first = 200 * BLOCK + 17
        had = list(order.had(first))
        for prompt, source in enumerate(order.between(first, first + 500).tolist(), start=1):
            had[source] += 1
            due = parts_due(dues, first + prompt)
            assert all(abs(a * dues.scale - b) < dues.scale for a, b in zip(had, due, strict=True))


@pytest.mark.slow
@given(knots(whole_slopes=True), PROMPTS_PER_STEP, SMALL_BLOCKS)
def test_numbers_beyond_64_bits_give_the_order_of_the_same_weights_within(
    given_knots: Knots, prompts_per_step: int, block: int
):
    huge = {
        step: tuple(weight << 64 for weight in weights) for step, weights in given_knots.items()
    }
    with blocks_of(block, 1):
        within = PromptOrder(Dues(given_knots, prompts_per_step)).between(0, 80)
        beyond = PromptOrder(Dues(huge, prompts_per_step)).between(0, 80)
    assert beyond.tolist() == within.tolist()


def test_a_source_of_weight_zero_has_no_prompt():
    assert 1 not in PromptOrder(constant([3, 0, 2])).between(0, 500)


def test_always_serving_the_furthest_behind_would_break_the_law():
    weights = [1, 1, 15, 70, 3]
    greedy: list[int] = []
    for prompt in range(1, 91):
        due = [prompt * own - greedy.count(name) * 90 for name, own in enumerate(weights)]
        greedy.append(due.index(max(due)))
    assert farthest_from_due(constant(weights), greedy) >= 1
    ours = PromptOrder(constant(weights)).between(0, 90).tolist()
    assert farthest_from_due(constant(weights), ours) < 1


def test_a_period_is_kept_whole_up_to_its_limit_only():
    long = PromptOrder(constant([1, MAX_PERIOD]))  # one slot too long
    short = PromptOrder(constant([1, MAX_PERIOD - 1]))
    far = 10**15  # beyond any walk from pin to pin
    assert short.between(far, far + 3).tolist() == [1, 1, 1]
    assert long.had(BLOCK)[0] in (0, 1)
    assert short.had(MAX_PERIOD * 10**9) == (10**9, (MAX_PERIOD - 1) * 10**9)


def test_the_order_of_prompts_never_changes():
    assert PromptOrder(constant([5, 3, 2])).between(0, 10).tolist() == PINNED
    ramp = {0: (8, 1, 1), 3: (2, 4, 4)}
    assert PromptOrder(Dues(ramp, 4)).between(0, 20).tolist() == PINNED_RAMP


# Written down once: a change here reorders the data of every run that resumes.
PINNED = [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
PINNED_RAMP = [0, 0, 0, 0, 1, 0, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1]
