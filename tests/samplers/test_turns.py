"""After any number of turns every source has had within one of what it is due."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.turns import BLOCK, MAX_PERIOD, Counts, Dues, Turns

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
    """Turns built inside have so short blocks and periods that an example crosses many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.turns.BLOCK", block)
        patch.setattr("samplers.turns.MAX_PERIOD", max_period)
        patch.setattr("samplers.turns._KEPT_BLOCKS", 3)
        yield


def constant(weights: Sequence[int], turns_per_step: int = 1) -> Dues:
    return Dues({0: tuple(weights)}, turns_per_step)


@st.composite
def knots(draw: st.DrawFn, most_knots: int = 4) -> Knots:
    """One to nine sources of any weights, zeros among them; one knot or several."""
    sources = draw(st.integers(1, 9))
    row = st.lists(WEIGHT, min_size=sources, max_size=sources).filter(any)
    count = draw(st.integers(1, most_knots))
    rows = draw(st.lists(row, min_size=count, max_size=count))
    later = st.sets(st.integers(1, 40), min_size=count - 1, max_size=count - 1)
    total = math.lcm(*map(sum, rows))
    return {
        step: tuple(weight * (total // sum(weights)) for weight in weights)
        for step, weights in zip([0, *sorted(draw(later))], rows, strict=True)
    }


TURNS_PER_STEP = st.integers(1, 12)


def farthest_from_due(dues: Dues, turns: Sequence[int]) -> Fraction:
    """The largest difference between turns had and due, over all sources and prefixes."""
    had = [0] * len(dues.after(0))
    worst = 0
    for turn, source in enumerate(turns, start=1):
        had[source] += 1
        due = dues.after(turn)
        strays = (abs(count * dues.scale - own) for count, own in zip(had, due, strict=True))
        worst = max(worst, *strays)
    return Fraction(worst, dues.scale)


def weights_by_hand(given_knots: Knots, step: int) -> list[Fraction]:
    """What each source is due in one turn of a step, of a whole turn."""
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


@given(knots(), TURNS_PER_STEP, st.integers(1, 200))
def test_what_is_due_is_the_sum_over_the_turns_so_far(
    given_knots: Knots, turns_per_step: int, turns: int
):
    dues = Dues(given_knots, turns_per_step)
    total = [Fraction(0)] * len(given_knots[0])
    for turn in range(turns):
        rates = weights_by_hand(given_knots, turn // turns_per_step)
        total = [due + rate for due, rate in zip(total, rates, strict=True)]
    assert [Fraction(due, dues.scale) for due in dues.after(turns)] == total
    step = turns // turns_per_step
    own = [Fraction(weight, dues.scale) for weight in dues.weights(step)]
    assert own == weights_by_hand(given_knots, step)


@given(knots(), TURNS_PER_STEP, st.integers(0, 10**9))
def test_all_sources_together_are_due_every_turn(
    given_knots: Knots, turns_per_step: int, turns: int
):
    dues = Dues(given_knots, turns_per_step)
    assert sum(dues.after(turns)) == turns * dues.scale


@given(knots(), TURNS_PER_STEP, st.integers(0, 300), st.integers(1, 60))
def test_a_curve_is_what_is_due_after_each_of_its_turns(
    given_knots: Knots, turns_per_step: int, first: int, length: int
):
    dues = Dues(given_knots, turns_per_step)
    floors, curve = dues.curve(first, first + length)
    for offset in range(length + 1):
        due = [
            floor * dues.scale + int(own)
            for floor, own in zip(floors, curve[:, offset], strict=True)
        ]
        assert due == dues.after(first + offset)
    assert floors == [own // dues.scale for own in dues.after(first)]


@given(knots(), st.integers(1, 6), st.integers(1, 12))
def test_a_whole_turn_is_first_due_where_it_is_due_and_was_not_before(
    given_knots: Knots, turns_per_step: int, whole: int
):
    dues = Dues(given_knots, turns_per_step)
    for source in range(len(given_knots[0])):
        turns = dues.first_with(source, whole)
        if math.isinf(turns):
            assert last_of(given_knots)[source] == 0
            assert dues.after(41 * turns_per_step)[source] < whole * dues.scale
        else:
            assert dues.after(int(turns))[source] >= whole * dues.scale
            assert dues.after(int(turns) - 1)[source] < whole * dues.scale


# --- the order ----------------------------------------------------------------------------------


@given(knots(), TURNS_PER_STEP, SMALL_BLOCKS, SMALL_PERIODS, st.integers(1, 150))
def test_every_prefix_is_within_one_turn_of_what_is_due(
    given_knots: Knots, turns_per_step: int, block: int, max_period: int, length: int
):
    dues = Dues(given_knots, turns_per_step)
    with blocks_of(block, max_period):
        turns = Turns(dues).between(0, length).tolist()
    assert len(turns) == length
    assert farthest_from_due(dues, turns) < 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any), SMALL_BLOCKS)
def test_a_period_gives_every_source_its_weight(weights: list[int], block: int):
    period = sum(weights) // math.gcd(*weights)
    for max_period in (1, 512):  # pins without end, and one period kept
        with blocks_of(block, max_period):
            turns = Turns(constant(weights)).between(0, 2 * period)
        assert farthest_from_due(constant(weights), turns.tolist()) < 1
        for cycle in (turns[:period], turns[period:]):
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
    turns = Turns(dues).between(0, length)
    prefix = np.arange(1, length + 1, dtype=object)
    for source, weight in enumerate(weights):
        had = np.cumsum(turns == source).astype(object)
        assert np.abs(had * dues.scale - prefix * weight).max() < dues.scale


def test_one_in_a_billion_has_its_turn_once_in_a_billion():
    dues = constant([1, 999_999_999])
    assert dues.first_with(0, 1) == 10**9
    assert Turns(dues).had(20_000)[0] <= 1


@given(knots(), TURNS_PER_STEP, SMALL_BLOCKS, SMALL_PERIODS, st.integers(0, 120), st.data())
def test_turns_had_are_the_turns_between(
    given_knots: Knots,
    turns_per_step: int,
    block: int,
    max_period: int,
    first: int,
    data: st.DataObject,
):
    last = data.draw(st.integers(first, 180))
    with blocks_of(block, max_period):
        turns = Turns(Dues(given_knots, turns_per_step))
        inside = np.bincount(turns.between(first, last), minlength=len(given_knots[0]))
        before, after = turns.had(first), turns.had(last)
    assert [b - a for a, b in zip(before, after, strict=True)] == inside.tolist()
    assert sum(before) == first


@given(
    knots(),
    TURNS_PER_STEP,
    SMALL_BLOCKS,
    SMALL_PERIODS,
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=1, max_size=6),
)
def test_turns_read_anywhere_and_in_any_order_are_those_read_in_sequence(
    given_knots: Knots,
    turns_per_step: int,
    block: int,
    max_period: int,
    reads: list[tuple[int, int]],
):
    dues = Dues(given_knots, turns_per_step)
    with blocks_of(block, max_period):
        in_sequence, anywhere = Turns(dues), Turns(dues)
        sequence = [
            source
            for first in range(0, 190, 19)
            for source in in_sequence.between(first, first + 19).tolist()
        ]
        for first, length in reads:
            read = anywhere.between(first, first + length).tolist()
            assert read == sequence[first : first + length]
            seen = [sequence[:first].count(source) for source in range(len(dues.after(0)))]
            assert list(anywhere.had(first)) == seen


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
        turns = Turns(constant(weights))
        here, there = turns.between(place, place + 50), cycle * period + place
        assert turns.between(there, there + 50).tolist() == here.tolist()
        grown = [b - a for a, b in zip(turns.had(place), turns.had(there), strict=True)]
    assert grown == [cycle * own // math.gcd(*weights) for own in weights]


def test_the_order_far_into_an_endless_one_is_lawful():
    dues = constant([314_159, 271_828, 141_421, 577_215])
    with blocks_of(BLOCK, 1):
        turns = Turns(dues)
        first = 200 * BLOCK + 17
        had = list(turns.had(first))
        for turn, source in enumerate(turns.between(first, first + 500).tolist(), start=1):
            had[source] += 1
            due = dues.after(first + turn)
            assert all(abs(a * dues.scale - b) < dues.scale for a, b in zip(had, due, strict=True))


@given(knots(), TURNS_PER_STEP, SMALL_BLOCKS)
def test_numbers_beyond_64_bits_give_the_order_of_the_same_weights_within(
    given_knots: Knots, turns_per_step: int, block: int
):
    huge = {
        step: tuple(weight << 64 for weight in weights) for step, weights in given_knots.items()
    }
    with blocks_of(block, 1):
        within = Turns(Dues(given_knots, turns_per_step)).between(0, 80)
        beyond = Turns(Dues(huge, turns_per_step)).between(0, 80)
    assert beyond.tolist() == within.tolist()


def test_a_source_of_weight_zero_has_no_turn():
    assert 1 not in Turns(constant([3, 0, 2])).between(0, 500)


def test_always_serving_the_furthest_behind_would_break_the_law():
    weights = [1, 1, 15, 70, 3]
    greedy: list[int] = []
    for turn in range(1, 91):
        due = [turn * own - greedy.count(name) * 90 for name, own in enumerate(weights)]
        greedy.append(due.index(max(due)))
    assert farthest_from_due(constant(weights), greedy) >= 1
    ours = Turns(constant(weights)).between(0, 90).tolist()
    assert farthest_from_due(constant(weights), ours) < 1


def test_a_period_is_kept_whole_up_to_its_limit_only():
    long = Turns(constant([1, MAX_PERIOD]))  # one turn too long
    short = Turns(constant([1, MAX_PERIOD - 1]))
    far = 10**15  # beyond any walk from pin to pin
    assert short.between(far, far + 3).tolist() == [1, 1, 1]
    assert long.had(BLOCK)[0] in (0, 1)
    assert short.had(MAX_PERIOD * 10**9) == (10**9, (MAX_PERIOD - 1) * 10**9)


def test_the_order_of_turns_never_changes():
    assert Turns(constant([5, 3, 2])).between(0, 10).tolist() == PINNED
    ramp = {0: (8, 1, 1), 3: (2, 4, 4)}
    assert Turns(Dues(ramp, 4)).between(0, 20).tolist() == PINNED_RAMP


# Written down once: a change here reorders the data of every run that resumes.
PINNED = [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
PINNED_RAMP = [0, 0, 0, 0, 1, 0, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1]
