"""The three laws of the prompt stream, its resume, and what it refuses."""

import json
import logging
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.mixture_plan import MAX_PERIOD, MixturePlan

SIZES = {"taco": 40, "nq": 25, "math": 10}
RATIOS = {"taco": 0.5, "nq": 0.3, "math": 0.2}


@st.composite
def plans(draw: st.DrawFn, apportionment: str = "carry") -> MixturePlan:
    """Up to eight sources, one to 40 rows each, batches smaller and larger than their number."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True))
    ratio = st.one_of(st.integers(1, 20), st.decimals("0.01", "1", places=2).map(float))
    return MixturePlan(
        sizes={name: draw(st.integers(1, 40)) for name in names},
        ratios={name: draw(ratio) for name in names},
        batch_size=draw(st.integers(1, 24)),
        seed=draw(st.integers(-5, 2**40)),
        apportionment=apportionment,  # type: ignore[arg-type]
    )


@given(plans(), st.integers(1, 400))
def test_every_prefix_is_within_one_prompt_of_every_share(plan: MixturePlan, length: int):
    source_ids = plan.prompts(np.arange(length)).source_ids
    drawn = np.cumsum(source_ids[:, None] == np.arange(len(plan.sources)), axis=0)
    for source_id, share in enumerate(plan.shares.values()):
        for i in range(1, length + 1):
            assert abs(int(drawn[i - 1, source_id]) - i * share) < 1


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=4), st.integers(0, 2**40))
def test_awkward_fractions_keep_the_law_for_the_nearest_shares_of_a_bounded_period(
    values: list[float], seed: int
):
    period = 2**10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.mixture_plan.MAX_PERIOD", period)
        ratios = dict(zip("abcd", values, strict=False))
        plan = MixturePlan(dict.fromkeys(ratios, 50), ratios, 16, seed)
    for name, share in plan.shares.items():
        assert abs(float(share) - plan.ratios[name]) <= 1 / period
    source_ids = plan.prompts(np.arange(3 * period)).source_ids
    length = np.arange(1, 3 * period + 1)
    for source_id, share in enumerate(plan.shares.values()):
        drawn = np.cumsum(source_ids == source_id)
        strays = np.abs(drawn * share.denominator - length * share.numerator)
        assert strays.max() < share.denominator


def test_the_period_is_bounded_when_denominators_explode():
    plan = MixturePlan(
        {"a": 5, "b": 5, "c": 5}, {"a": 0.123457, "b": 0.3141593, "c": 0.2718281828}, 8, 0
    )
    assert all(share.denominator <= MAX_PERIOD for share in plan.shares.values())
    assert all(abs(float(plan.shares[name]) - plan.ratios[name]) < 1e-6 for name in plan.sources)


def test_a_batch_whose_quotas_are_whole_holds_exactly_them():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    for index in range(50):
        assert plan.counts(index) == {"taco": 10, "nq": 6, "math": 4}


def test_remainders_are_carried_to_later_batches():
    plan = MixturePlan({"a": 9, "b": 9}, {"a": 3, "b": 1}, batch_size=2, seed=0)
    drawn = [plan.counts(index)["b"] for index in range(8)]
    assert sorted(set(drawn)) == [0, 1]
    assert sum(drawn) == 4


@given(plans())
def test_a_source_repeats_no_row_before_its_pass_is_over(plan: MixturePlan):
    prompts = plan.prompts(np.arange(600))
    for source_id, name in enumerate(plan.sources):
        rows, size = prompts.rows[prompts.source_ids == source_id].tolist(), plan.sizes[name]
        for start in range(0, len(rows), size):
            one_pass = rows[start : start + size]
            assert len(set(one_pass)) == len(one_pass)
            assert all(0 <= row < size for row in one_pass)


@given(plans(), st.integers(0, 10**9))
def test_a_batch_is_the_prompts_at_its_positions(plan: MixturePlan, index: int):
    batch = plan.batch(index)
    first = index * plan.batch_size
    alone = [plan.prompt(first + offset) for offset in range(plan.batch_size)]
    together = [
        (plan.sources[source_id], row)
        for source_id, row in zip(batch.source_ids.tolist(), batch.rows.tolist(), strict=True)
    ]
    assert together == alone
    assert (batch.source_ids.dtype, batch.rows.dtype) == (np.int16, np.int64)
    assert plan.counts(index) == {
        name: sum(source == name for source, _ in alone) for name in plan.sources
    }


@given(plans("fixed"), st.integers(0, 10**6))
def test_fixed_batches_all_hold_the_same_largest_remainder_counts(plan: MixturePlan, index: int):
    counts = plan.counts(index)
    assert counts == plan.counts(0)
    assert sum(counts.values()) == plan.batch_size
    for name, count in counts.items():
        assert abs(count - plan.batch_size * plan.ratios[name]) < 1 + 1e-9


@given(plans("fixed"))
def test_fixed_batches_spread_their_sources_smoothly(plan: MixturePlan):
    source_ids = plan.batch(0).source_ids
    for source_id, name in enumerate(plan.sources):
        drawn = np.cumsum(source_ids == source_id).tolist()
        share = Fraction(plan.counts(0)[name], plan.batch_size)
        assert all(abs(had - i * share) < 1 for i, had in enumerate(drawn, start=1))


def test_fixed_apportionment_that_starves_a_source_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        MixturePlan({"a": 1, "b": 1}, {"a": 99, "b": 1}, 4, 0, apportionment="fixed")
    assert "source=b seats=0 batch_size=4" in caplog.text


@given(plans(), st.integers(0, 10**12), st.integers(1, 50))
def test_a_resumed_stream_goes_on_as_if_never_interrupted(
    plan: MixturePlan, position: int, length: int
):
    plan.position = position
    saved = json.loads(json.dumps(plan.state_dict()))
    resumed = MixturePlan(
        dict(reversed(plan.sizes.items())),
        dict(reversed(plan.shares.items())),  # type: ignore[arg-type]
        plan.batch_size,
        plan.seed,
    )
    resumed.load_state_dict(saved)
    ahead = np.arange(position, position + length)
    assert resumed.position == position
    assert resumed.prompts(ahead).source_ids.tolist() == plan.prompts(ahead).source_ids.tolist()
    assert resumed.prompts(ahead).rows.tolist() == plan.prompts(ahead).rows.tolist()


def test_a_pickled_plan_is_the_same_stream():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    assert pickle.loads(pickle.dumps(plan)).prompt(12345) == plan.prompt(12345)


def test_the_state_is_small():
    state = MixturePlan(SIZES, RATIOS, batch_size=256, seed=0).state_dict()
    assert len(json.dumps(state)) <= 200


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sizes": {**SIZES, "nq": 26}}, "sizes="),
        ({"ratios": {**RATIOS, "nq": 0.4}}, "ratios="),
        ({"batch_size": 21}, "batch_size=20 where this plan has 21"),
        ({"seed": 1}, "seed=0 where this plan has 1"),
        ({"apportionment": "fixed"}, "apportionment='carry' where this plan has 'fixed'"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_what_differs(change: dict[str, Any], word: str):
    settings: dict[str, Any] = {"sizes": SIZES, "ratios": RATIOS, "batch_size": 20, "seed": 0}
    state = MixturePlan(**settings).state_dict()
    other = MixturePlan(**{**settings, **change})
    with pytest.raises(ValueError, match="cannot continue a plan") as caught:
        other.load_state_dict(state)
    assert word in str(caught.value)
    assert other.position == 0


@pytest.mark.parametrize("position", [-1, 1.5, None, "3"])
def test_a_state_without_a_position_is_refused(position: object):
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    with pytest.raises(ValueError, match="want an int >= 0"):
        plan.load_state_dict({**plan.state_dict(), "position": position})


@pytest.mark.parametrize(
    ("sizes", "ratios", "word"),
    [
        (SIZES, {**RATIOS, "nq": -0.1}, "ratio=-0.1 of source='nq'"),
        (SIZES, {**RATIOS, "nq": float("nan")}, "ratio=nan of source='nq'"),
        (SIZES, dict.fromkeys(SIZES, 0.0), "no source has a ratio above 0"),
        ({}, {}, "no source has a ratio above 0"),
        ({**SIZES, "math": 0}, RATIOS, "source='math' has ratio=0.2 but no rows"),
        ({"taco": 1, "nq": 1}, RATIOS, "source='math' has ratio=0.2 but no rows"),
        ({**SIZES, "qa": 3}, RATIOS, "source='qa' has rows but no ratio"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused(
    sizes: dict[str, int], ratios: dict[str, float], word: str
):
    with pytest.raises(ValueError, match="cannot plan the mixture") as caught:
        MixturePlan(sizes, ratios, 16, 0)
    assert word in str(caught.value)


def test_all_mistakes_are_said_at_once():
    with pytest.raises(ValueError, match="cannot plan") as caught:
        MixturePlan({"a": 0, "b": 1}, {"a": 1.0, "c": -1.0}, 0, 0, "greedy")  # type: ignore[arg-type]
    for word in ("'a' has ratio", "'b' has rows", "of source='c'", "batch_size=0", "'greedy'"):
        assert word in str(caught.value)


def test_a_source_with_ratio_zero_is_left_out_with_or_without_rows():
    plan = MixturePlan({"a": 3, "b": 3}, {"a": 1, "b": 0, "c": 0}, 4, 0)
    assert plan.counts(0) == {"a": 4, "b": 0, "c": 0}


def test_positions_and_batches_before_the_start_are_refused():
    plan = MixturePlan(SIZES, RATIOS, batch_size=20, seed=0)
    with pytest.raises(ValueError, match="position=-1"):
        plan.prompt(-1)
    with pytest.raises(ValueError, match="batch_index=-1"):
        plan.batch(-1)
