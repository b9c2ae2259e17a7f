"""Exact shares and largest remainders."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.apportionment import apportion, exact_shares

RATIOS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.one_of(st.integers(0, 1000), st.floats(0.01, 10.0)),
    min_size=1,
    max_size=8,
).filter(lambda ratios: any(ratios.values()))

ANY_RATIOS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.one_of(st.integers(0, 10**300), st.floats(0.0, allow_nan=False, allow_infinity=False)),
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
    assert exact_shares(dict.fromkeys("abc", 1 / 3)) == dict.fromkeys("abc", Fraction(1, 3))


def test_a_third_written_with_few_digits_is_no_third():
    shares = exact_shares({"a": 0.333, "b": 0.667})
    assert shares == {"a": Fraction(333, 1000), "b": Fraction(667, 1000)}


def test_a_fraction_is_read_as_it_is():
    third = Fraction(1, 3)
    assert exact_shares({"a": third, "b": 1 - third}) == {"a": third, "b": Fraction(2, 3)}  # type: ignore[dict-item]


@pytest.mark.parametrize("tiny", [1e-5, 1e-7, 1e-9, 1e-12, 1e-20, 5e-324])
def test_a_tiny_ratio_keeps_its_share(tiny: float):
    shares = exact_shares({"big": 1.0, "tiny": tiny})
    exact = Fraction(str(tiny))
    assert abs(shares["tiny"] / shares["big"] / exact - 1) <= Fraction(1, 10**13)
    assert sum(shares.values()) == 1


def test_one_in_a_billion_is_exact():
    shares = exact_shares({"big": 1.0, "tiny": 1e-9})
    assert shares == {
        "big": Fraction(10**9, 10**9 + 1),
        "tiny": Fraction(1, 10**9 + 1),
    }
    assert exact_shares({"big": 1 - 1e-9, "tiny": 1e-9})["tiny"] == Fraction(1, 10**9)


@given(ANY_RATIOS)
def test_ratios_of_any_size_have_shares_that_sum_to_one_and_keep_their_proportions(
    ratios: dict[str, float],
):
    shares = exact_shares(ratios)
    total = sum(Fraction(str(ratio)) for ratio in ratios.values())
    assert sum(shares.values()) == 1
    assert list(shares) == list(ratios)
    for source, ratio in ratios.items():
        meant = Fraction(str(ratio)) / total
        assert abs(shares[source] - meant) <= meant / 10**13
        assert (shares[source] == 0) == (ratio == 0)


@given(RATIOS, st.sampled_from([2, 10, 1000, 10**9]))
def test_only_proportions_count(ratios: dict[str, float], factor: int):
    exact = {source: Fraction(str(ratio)) for source, ratio in ratios.items()}
    scaled = {source: ratio * factor for source, ratio in exact.items()}
    assert exact_shares(scaled) == exact_shares(ratios)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ratios", [{"a": 1.0, "b": 1e-16}, {"a": 1 / 3, "b": 1e-9, "c": 2 / 3 - 1e-9}]
)
def test_shares_of_shares_are_the_same_shares(ratios: dict[str, float]):
    shares = exact_shares(ratios)
    assert exact_shares(shares) == shares  # type: ignore[arg-type]


@given(RATIOS, st.integers(0, 300))
def test_counts_sum_to_seats_and_each_is_its_quota_rounded_down_or_up(
    ratios: dict[str, float], seats: int
):
    shares = exact_shares(ratios)
    counts = apportion(shares, seats)
    assert sum(counts.values()) == seats
    assert list(counts) == list(shares)
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


def test_equal_remainders_go_to_the_name_that_sorts_first():
    shares = dict.fromkeys("cba", Fraction(1, 3))
    assert apportion(shares, 4) == {"c": 1, "b": 1, "a": 2}


@pytest.mark.parametrize(
    ("shares", "seats"),
    [
        ({"a": Fraction(1)}, -1),
        ({"a": Fraction(1, 2)}, 4),
        ({"a": Fraction(2), "b": Fraction(-1)}, 4),
    ],
)
def test_apportioning_what_is_no_whole_is_refused(shares: dict[str, Fraction], seats: int):
    with pytest.raises(ValueError, match="cannot apportion"):
        apportion(shares, seats)
