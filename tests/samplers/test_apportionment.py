"""Exact shares, largest remainders, and turns that stay within one of what is due."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.apportionment import apportion, assign_turns, exact_shares

RATIOS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.one_of(st.integers(0, 1000), st.floats(0.01, 10.0)),
    min_size=1,
    max_size=8,
).filter(lambda ratios: any(ratios.values()))


def test_a_decimal_means_itself_and_not_its_binary_neighbour():
    assert exact_shares({"a": 0.1, "b": 0.9}) == {"a": Fraction(1, 10), "b": Fraction(9, 10)}


def test_a_third_written_as_a_float_is_a_third():
    assert exact_shares({"a": 1 / 6, "b": 1 / 3, "c": 1 / 2}) == {
        "a": Fraction(1, 6),
        "b": Fraction(1, 3),
        "c": Fraction(1, 2),
    }


@given(RATIOS)
def test_shares_sum_to_one_and_keep_zeros_and_proportions(ratios: dict[str, float]):
    shares = exact_shares(ratios)
    assert sum(shares.values()) == 1
    assert list(shares) == list(ratios)
    for source, ratio in ratios.items():
        assert (shares[source] == 0) == (ratio == 0)
        assert abs(float(shares[source]) - ratio / sum(ratios.values())) < 1e-5


@pytest.mark.parametrize("ratio", [-1.0, float("nan"), float("inf")])
def test_a_ratio_that_is_no_share_is_refused_by_name(ratio: float):
    with pytest.raises(ValueError, match=f"ratio={ratio} of source='bad'"):
        exact_shares({"good": 1.0, "bad": ratio})


def test_all_zero_ratios_are_refused():
    with pytest.raises(ValueError, match="no source has a ratio above 0"):
        exact_shares({"a": 0.0, "b": 0.0})


def test_a_share_too_small_to_be_kept_is_refused_instead_of_dropped():
    with pytest.raises(ValueError, match=r"\['tiny'\] is below one in 1000000"):
        exact_shares({"big": 1.0, "tiny": 1e-9})


@given(RATIOS, st.integers(0, 300))
def test_counts_sum_to_seats_and_each_is_its_quota_rounded_down_or_up(
    ratios: dict[str, float], seats: int
):
    shares = exact_shares(ratios)
    counts = apportion(shares, seats)
    assert sum(counts.values()) == seats
    assert all(abs(counts[name] - seats * shares[name]) < 1 for name in shares)


@given(RATIOS, st.integers(0, 300), st.randoms())
def test_counts_do_not_depend_on_the_order_of_sources(ratios: dict[str, float], seats: int, random):
    shares = exact_shares(ratios)
    names = list(shares)
    random.shuffle(names)
    assert apportion({name: shares[name] for name in names}, seats) == apportion(shares, seats)


def test_the_largest_remainders_get_the_seats_left_over():
    shares = {"a": Fraction(1, 2), "b": Fraction(3, 10), "c": Fraction(1, 5)}
    assert apportion(shares, 4) == {"a": 2, "b": 1, "c": 1}
    assert apportion(shares, 2) == {"a": 1, "b": 1, "c": 0}


@pytest.mark.parametrize(
    ("shares", "seats"),
    [({"a": Fraction(1)}, -1), ({"a": Fraction(1, 2)}, 4), ({"a": Fraction(2), "b": -1}, 4)],
)
def test_apportioning_what_is_no_whole_is_refused(shares: dict[str, Fraction], seats: int):
    with pytest.raises(ValueError, match="cannot apportion"):
        apportion(shares, seats)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any))
def test_every_prefix_of_turns_is_within_tijdemans_bound_of_what_is_due(seats: list[int]):
    turns = assign_turns(seats)
    period, active = sum(seats), sum(own > 0 for own in seats)
    bound = 1 - Fraction(1, 2 * active - 2) if active > 1 else 0
    had = np.cumsum(turns[:, None] == np.arange(len(seats)), axis=0)  # (period, S)
    due = np.arange(1, period + 1)[:, None] * np.array(seats)
    assert np.abs(had * period - due).max() <= bound * period
    assert had[-1].tolist() == seats


def test_turns_keep_the_bound_where_always_serving_the_furthest_behind_breaks_it():
    seats = [1, 1, 15, 70, 3]
    had = np.cumsum(assign_turns(seats)[:, None] == np.arange(5), axis=0)
    due = np.arange(1, 91)[:, None] * np.array(seats)
    assert np.abs(had * 90 - due).max() < 90
    behind, worst = [0] * 5, 0
    for turn in range(1, 91):
        source = max(range(5), key=lambda own: turn * seats[own] - behind[own] * 90)
        behind[source] += 1
        worst = max(
            worst, *(abs(count * 90 - turn * own) for count, own in zip(behind, seats, strict=True))
        )
    assert worst >= 90
