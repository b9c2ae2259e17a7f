"""Rows by pass rate: what the window holds, what repeats, what a resume gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.adaptive.curriculum import ChosenRows, Curriculum, CurriculumOrder
from samplers.mixture_plan import MixturePlan

RATES = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=60)
SHARES = st.floats(0, 1)


@st.composite
def orders(draw: st.DrawFn) -> tuple[CurriculumOrder, np.ndarray, Curriculum, int, int]:
    rates = np.array(draw(RATES))
    curriculum = Curriculum(
        start=draw(SHARES), end=draw(SHARES), width=draw(st.floats(0.05, 1)), steps=1
    )
    draws, share = draw(st.integers(0, 120)), draw(st.integers(1, 12))
    order = CurriculumOrder(rates, curriculum, draws, share, share, draw(st.integers(0, 2**64 - 1)))
    return order, rates, curriculum, draws, share


@given(drawn=orders())
def test_no_row_of_the_window_is_drawn_again_before_the_others(drawn):
    order, rates, _, _, _ = drawn
    lows, highs = order.windows(np.arange(300))
    by_rate = np.argsort(rates, kind="stable")
    passes, current = np.zeros(len(rates), dtype=int), 0
    before = set[int]()
    for row, low, high in zip(order.rows(0, 300), lows, highs, strict=True):
        window = by_rate[low:high]
        for new in {*window.tolist()} - before:
            passes[new] = max(passes[new], current)
        before = {*window.tolist()}
        assert row in before
        assert passes[row] == passes[window].min()
        current = passes[row]
        passes[row] += 1


@given(drawn=orders())
def test_the_window_holds_the_pass_rates_around_its_centre(drawn):
    order, rates, curriculum, draws, share = drawn
    lows, highs = order.windows(np.arange(200))
    ordered = np.sort(rates)
    for draw, (low, high) in enumerate(zip(lows, highs, strict=True)):
        part = min(1.0, draw / max(1, draws))
        centre = curriculum.start + (curriculum.end - curriculum.start) * part
        inside = np.abs(ordered - centre) <= curriculum.width / 2 + 1e-6
        if inside[low:high].all():
            assert inside.sum() == high - low or high - low == min(len(rates), 2 * share)
        else:  # widened to the nearest rows
            assert high - low == min(len(rates), 2 * share)
            outside = np.delete(ordered, np.arange(low, high))
            farthest = np.abs(ordered[low:high] - centre).max()
            assert not outside.size or np.abs(outside - centre).min() >= farthest - 1e-6


@given(drawn=orders())
def test_no_row_is_twice_in_a_batch_if_there_are_enough(drawn):
    order, rates, _, _, share = drawn
    if len(rates) >= 2 * share:
        rows = order.rows(0, 200)
        for first in range(200 - share):
            assert len(set(rows[first : first + share].tolist())) == share


@given(drawn=orders(), first=st.integers(0, 250), count=st.integers(0, 50))
def test_rows_are_a_function_of_their_draws(drawn, first: int, count: int):
    order, rates, curriculum, draws, share = drawn
    again = CurriculumOrder(rates, curriculum, draws, share, share, order._key)
    there = again.rows(first, count).tolist()
    assert order.rows_at(np.arange(first, first + count)[::-1]).tolist() == there[::-1]


@pytest.mark.parametrize("curriculum", [None, Curriculum(start=0.9, end=0.2, width=0.2, steps=10)])
def test_a_plan_draws_only_the_chosen_rows(curriculum: Curriculum | None):
    rows, rates = np.arange(0, 200, 2), np.linspace(0, 1, 100)
    choice = ChosenRows(rows=rows, rates=rates, curriculum=curriculum, digest="d")
    plan = MixturePlan({"a": 100, "b": 50}, {"a": 1, "b": 1}, 8, 0, choices={"a": choice})
    taken = [own.row for own in plan.take(8 * 40) if own.source == "a"]
    assert set(taken) <= set(rows.tolist())
    if curriculum is None:
        assert len(set(taken[:100])) == 100
        assert plan.batches_of_passes(2) == 50
    else:
        with pytest.raises(ValueError, match="source='a' has a curriculum, and so no passes"):
            plan.batches_of_passes(2)
        assert all(abs(rates[row // 2] - 0.9) < 0.16 for row in taken[:4])
        assert all(abs(rates[row // 2] - 0.2) < 0.11 for row in taken[41:])
    described = plan.description()
    assert (
        MixturePlan.from_description(described, {"a": choice}).differences(plan.state_dict()) == []
    )
    other = ChosenRows(rows=rows, rates=rates, curriculum=curriculum, digest="e")
    with pytest.raises(ValueError, match="put the profiles back"):
        MixturePlan.from_description(described, {"a": other})


def test_a_controller_that_may_give_a_source_whole_batches_widens_no_window():
    rates = np.arange(500) / 500
    curriculum = Curriculum(start=0.8, end=0.8, width=0.2, steps=1)
    order = CurriculumOrder(rates, curriculum, 1, 256, 50, 1)
    assert rates[order.rows(0, 400)].min() >= 0.7 - 1e-9
