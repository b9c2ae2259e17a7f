"""Shares as whole numbers of parts: what stays exact, and how far rounding goes."""

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.shares import MAX_EXACT, MAX_PARTS, Shares, steps_without_ratio

Schedules = dict[str, dict[int, Any]]

RATIO = st.one_of(
    st.sampled_from([0, 1, 3, 0.1, 0.25, 1 / 3, 1e-9]), st.floats(1e-6, 1e6), st.integers(1, 10**30)
)

SCHEDULES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.dictionaries(st.integers(0, 10**4), RATIO, min_size=1, max_size=3),
    min_size=1,
    max_size=24,
)


def ratio_at(schedule: dict[int, Any], step: int) -> Fraction:
    """The ratio of one schedule at a step, by hand."""
    own = {at: Fraction(str(ratio)) for at, ratio in sorted(schedule.items())}
    before = max((at for at in own if at <= step), default=min(own))
    after = min((at for at in own if at >= step), default=max(own))
    way = Fraction(step - before, after - before) if before < step < after else 0
    return own[before] + (own[after] - own[before]) * way


def share_at(schedules: Schedules, step: int) -> dict[str, Fraction]:
    """Source -> exact share at a step, by hand."""
    ratios = {name: ratio_at(schedules[name], step) for name in sorted(schedules)}
    total = sum(ratios.values())
    return {name: ratio / total for name, ratio in ratios.items()}


def lawful(schedules: Schedules, always: Any) -> Schedules:
    """The schedules and one source that always takes part."""
    return {**schedules, "z": {0: always}}


@given(SCHEDULES, st.integers(1, 4096), st.sampled_from([None, 10**6, MAX_PARTS]))
def test_parts_sum_to_a_prompt_are_less_than_one_from_the_share_and_keep_whole_ones(
    schedules: Schedules, batch_size: int, parts: int | None
):
    schedules = lawful(schedules, 0.37)
    shares = Shares(schedules, batch_size, parts)
    assert parts is not None or shares.exact or MAX_PARTS / 2 < shares.parts <= MAX_PARTS
    for step in shares.steps:
        own, exact = shares[step], share_at(schedules, step).values()
        assert sum(own) == shares.parts
        for part, share in zip(own, exact, strict=True):
            error = abs(part - share * shares.parts)
            assert error < (1 if shares.exact is None else 0.011)  # 0.333... means a third
            assert error == 0 or (share * shares.parts).denominator > 1


@given(SCHEDULES, st.integers(1, 4096))
def test_the_parts_of_a_rounded_prompt_divide_by_the_batch_size(
    schedules: Schedules, batch_size: int
):
    schedules = lawful(schedules, 0.1234567890123456)
    shares = Shares(schedules, batch_size)
    if shares.exact is None:
        assert shares.parts % batch_size == 0


@given(SCHEDULES, st.integers(1, 4096))
def test_shares_of_a_description_are_the_same_shares(schedules: Schedules, batch_size: int):
    shares = Shares(lawful(schedules, 7), batch_size)
    described = {
        name: {int(step): Fraction(ratio) for step, ratio in own.items()}
        for name, own in shares.description().items()
    }
    again = Shares(described, batch_size, 0 if shares.exact else shares.parts)
    assert again.description() == shares.description()
    for step in shares.steps:
        share, other = shares[step], again[step]
        assert [Fraction(own, shares.parts) for own in share] == [
            Fraction(own, again.parts) for own in other
        ]


@given(SCHEDULES, st.integers(1, 300), st.sampled_from([None, 10**9]))
def test_the_most_prompts_of_a_step_are_the_most_of_all_entries_rounded_up(
    schedules: Schedules, batch_size: int, parts: int | None
):
    shares = Shares(lawful(schedules, 2), batch_size, parts)
    at = zip(*(shares[step] for step in shares.steps), strict=True)
    most = shares.most(batch_size)
    for name, own in zip(most, at, strict=True):
        exact = Fraction(max(own) * batch_size, shares.parts)
        assert abs(most[name] - exact) < 1e-5
        assert max(1, math.ceil(most[name])) == max(1, math.ceil(exact))


@pytest.mark.parametrize(
    "schedules",
    [
        {"a": {0: 1e300, 10: 1e290}, "b": {0: 1e300, 10: 0.123456789}},
        {"a": {0: 1e308, 10: 1}, "b": {0: 1, 10: 1e308}, "c": {0: 1e-30}},
        {"a": {0: 10**500, 7: 1}, "b": {0: 3, 11: 0.1}},
        {"a": {0: 10**500}, "b": {0: 3}},
    ],
)
def test_ratios_may_be_any_number_of_times_as_large_as_others(schedules: Schedules):
    assert max(Shares(schedules, 10).most(10).values()) == pytest.approx(10)


@pytest.mark.parametrize(
    ("ratios", "batch_size", "parts"),
    [
        ({"a": 0.1, "b": 0.3, "c": 0.6}, 10, 10),
        ({"a": 1 / 3, "b": 1 / 6, "c": 0.5}, 4, 12),
        ({"a": {0: 0.8, 15: 0.2}, "b": {0: 0.2, 15: 0.8}}, 10, 50),
        ({"a": 1 - 1e-9, "b": 1e-9}, 1000, 10**9),
    ],
)
def test_ratios_with_a_small_denominator_are_not_rounded(
    ratios: dict[str, Any], batch_size: int, parts: int
):
    schedules = {name: own if isinstance(own, dict) else {0: own} for name, own in ratios.items()}
    shares = Shares(schedules, batch_size)
    assert shares.exact is not None
    assert shares.parts == math.lcm(shares.parts, parts)
    assert shares.parts <= MAX_PARTS


def test_the_work_on_exact_shares_is_bounded():
    few = {f"s{number}": {0: 1, 1 + number * 7: 1} for number in range(100)}
    many = {f"s{number}": {0: 1, 1 + number * 7: 1} for number in range(1000)}
    assert Shares(few, 100).exact is not None
    shares = Shares(many, 1000)
    assert len(many) * len(shares) > MAX_EXACT
    assert shares.exact is None
    assert set(shares[7 * 500 + 1]) == {shares.parts // 1000}


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.dictionaries(st.integers(0, 12), st.sampled_from([0, 0, 0.5]), min_size=1),
        min_size=1,
    )
)
def test_the_steps_at_which_no_source_takes_part_are_found(schedules: Schedules):
    steps = sorted({0}.union(*schedules.values()))
    assert steps_without_ratio(schedules) == [
        step for step in steps if not any(ratio_at(own, step) for own in schedules.values())
    ]
