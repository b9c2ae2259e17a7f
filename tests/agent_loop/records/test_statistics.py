"""pass@k, intervals over prompts and paired differences, against definitions and simulations."""

import itertools
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.records.evaluation_records import Record
from agent_loop.records.paired import (
    Difference,
    difference,
    paired_means,
    sign_flip_p,
)
from agent_loop.records.statistics import estimate, pass_at_k, results_of, student_quantile, wilson
from tests.fakes.records import of_policy, record


def differences(first: list[Record], last: list[Record]) -> dict[str, Difference]:
    pairs = paired_means(first, last)
    return {source: difference(own.first, own.last, len(pairs)) for source, own in pairs.items()}


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_k_samples_with_a_solved_one(solved: list[bool], data):
    k = data.draw(st.integers(1, len(solved)))
    sets = list(itertools.combinations(solved, k))
    expected = sum(any(chosen) for chosen in sets) / len(sets)
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(expected, abs=1e-12)


def test_more_samples_than_there_are_give_no_pass_at_k():
    with pytest.raises(ValueError, match=r"pass@3 of 2 samples.*draw more samples"):
        pass_at_k(2, 1, 3)


def test_quantiles_are_those_of_the_tables():
    found = [student_quantile(0.95, freedom) for freedom in (1, 2, 5, 30)]
    assert found == pytest.approx([12.706, 4.303, 2.571, 2.042], abs=1e-3)
    assert student_quantile(1 - 0.05 / 3, 10) == pytest.approx(2.8701, abs=1e-3)


def test_wilson_gives_the_published_intervals() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I
    for solved, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(solved / count, count) == pytest.approx((low, high), abs=5e-5)
    for solved, count, low, high in ((0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        assert wilson(solved / count, count) == pytest.approx((low, high), abs=5e-5)


@given(share=st.floats(0, 1), count=st.integers(1, 10_000))
def test_wilson_holds_the_mean_stays_in_its_range_and_narrows_with_the_count(
    share: float, count: int
) -> None:
    low, high = wilson(share, count)
    low_4, high_4 = wilson(share, 4 * count)

    assert 0 <= low <= share <= high <= 1
    assert high_4 - low_4 <= high - low


def test_samples_of_one_prompt_count_as_one_observation():
    twice = {str(i): [float(i % 2)] * 2 for i in range(40)}
    once = {row: own[:1] for row, own in twice.items()}
    a, b = estimate(twice), estimate(once)
    assert a is not None and b is not None and a.mean == b.mean == 0.5
    assert a.interval == pytest.approx(b.interval, abs=1e-9)
    assert (a.prompts, a.trajectories) == (40, 80)


def test_equal_values_do_not_make_a_mean_certain():
    solved = estimate({str(i): [1.0] for i in range(20)})
    assert solved is not None and solved.interval == pytest.approx((0.839, 1.0), abs=1e-3)
    one = estimate({"a": [1.0, 0.0]})
    assert one is not None and one.interval is None
    assert estimate({}) is None


def test_an_interval_covers_the_mean_of_the_policy_about_as_often_as_it_says():
    chance = random.Random(0)
    covered, rounds = 0, 400
    for seed in range(rounds):
        hardness = [chance.betavariate(0.5, 1.0) for _ in range(40)]
        (result,) = results_of(of_policy(hardness, 4, seed)).values()
        assert result.reward is not None and result.reward.interval is not None
        low, high = result.reward.interval
        covered += low <= 1 / 3 <= high
    assert 0.93 <= covered / rounds <= 0.985


def test_a_lost_trajectory_is_no_failure():
    records = [record(row="0"), record(row="1", reward=0.0), record(row="2", reward=0.0, lost=True)]
    (result,) = results_of(records).values()
    assert result.reward is not None and result.reward.mean == 0.5
    assert result.pass_at[1].mean == 0.5
    assert (result.prompts, result.trajectories, result.lost) == (2, 2, 1)
    assert result.total_tool_calls == 3


def test_pass_at_k_is_of_the_prompts_that_have_k_judged_samples():
    records = [record(row="0", sample=i, reward=float(i == 0)) for i in range(4)]
    records += [record(row="1", sample=0)]
    (result,) = results_of(records, ks=(1, 2, 4, 8)).values()
    assert result.pass_at.keys() == {1, 2, 4}
    assert result.pass_at[2].mean == 0.5 and result.pass_at[2].prompts == 1
    assert result.pass_at[1].prompts == 2


@given(st.randoms())
def test_the_order_of_records_does_not_matter(chance: random.Random):
    records = of_policy([0.1, 0.5, 0.9], 3, 1) + of_policy([0.3, 0.7], 3, 2, source="math")
    shuffled = list(records)
    chance.shuffle(shuffled)
    assert results_of(shuffled, (1, 3)) == results_of(records, (1, 3))
    assert differences(shuffled, records) == differences(records, records)


_MEAN = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(_MEAN, _MEAN), min_size=1))
def test_a_difference_turns_its_sign_with_its_sides(means: dict[str, tuple[float, float]]):
    first, last = ({row: pair[side] for row, pair in means.items()} for side in (0, 1))
    there, back = difference(first, last, 3), difference(last, first, 3)
    assert there.change == pytest.approx(-back.change) and there.p == pytest.approx(back.p)
    words = {"improved": "got worse", "got worse": "improved"}
    assert back.verdict == words.get(there.verdict, there.verdict)
    assert there.change == pytest.approx(there.last - there.first)


def test_pairs_see_a_change_that_is_small_beside_the_differences_of_prompts():
    before = {str(i): float(i % 2) for i in range(60)}
    after = {row: 1.0 if int(row) % 6 == 0 else mean for row, mean in before.items()}
    found = difference(before, after)
    assert found.changed == 10 and found.verdict == "improved"
    unpaired = [estimate({row: [mean] for row, mean in each.items()}) for each in (before, after)]
    (a, b) = (one.interval for one in unpaired if one is not None and one.interval is not None)
    assert a[1] > b[0]  # the intervals of the means overlap


def test_a_few_changed_prompts_are_no_verdict_whatever_students_t_says():
    before = dict.fromkeys("abc", 1.0)
    found = difference(before, dict.fromkeys("abc", 0.0))
    assert found.interval is None and found.p == 0.25
    assert found.verdict == "no clear change"


def test_equal_evaluations_differ_by_nothing():
    found = difference({"a": 0.1, "b": 0.7}, {"a": 0.1, "b": 0.7})
    assert found.changed == 0 and found.p == 1.0
    assert (found.change, found.interval, found.verdict) == (0.0, None, "no clear change")


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), max_size=7))
def test_the_sign_flip_test_is_the_share_of_its_patterns(gaps: list[float]):
    seen = abs(sum(gaps)) - 1e-9
    patterns = list(itertools.product((1, -1), repeat=len(gaps)))
    as_far = [
        abs(sum(s * gap for s, gap in zip(signs, gaps, strict=True))) >= seen for signs in patterns
    ]
    assert sign_flip_p(gaps) == pytest.approx(fmean(as_far))


def test_drawn_patterns_agree_with_all_of_them():
    gaps = [1.0] * 11 + [-1.0] * 4
    exact = sum(
        abs(sum(signs)) >= 7 for signs in itertools.product((1, -1), repeat=len(gaps))
    ) / 2 ** len(gaps)
    assert sign_flip_p(gaps) == pytest.approx(exact, abs=0.01)


def test_both_sides_of_a_prompt_have_the_same_number_of_samples():
    first = [record(sample=i, reward=float(i == 0)) for i in range(4)]
    last = [record(sample=i, reward=float(i == 2), lost=i < 2) for i in range(4)]
    last += [record(row="1"), record("math")]  # prompts that the first side lacks
    (pairs,) = paired_means(first[::-1], last[::-1]).values()
    assert pairs.first == {"nq:0": 0.5} and pairs.last == {"nq:0": 0.5}
    assert pairs.left_out == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "solved", "samples", "lost"),
    [
        (8, None, (1, 1), 0.0),
        (50, 0.02, (1, 8), 0.0),
        pytest.param(30, None, (1, 1), 0.0, marks=pytest.mark.nightly),
        pytest.param(100, None, (2, 2), 0.0, marks=pytest.mark.nightly),
        pytest.param(50, 0.02, (16, 1), 0.0, marks=pytest.mark.nightly),
        pytest.param(50, 0.02, (8, 8), 0.85, marks=pytest.mark.nightly),
    ],
)
def test_an_unchanged_policy_has_a_verdict_in_one_of_twenty_looks_at_most(
    prompts: int, solved: float | None, samples: tuple[int, int], lost: float
):
    """A look compares three sources, as validations before and after steps at a rate of 0.

    Args:
        solved: pass rate of all prompts; None: drawn for each.
        samples: of each prompt, before and after.
        lost: share of the samples after.
    """
    chance = random.Random(prompts)
    rounds, wrong = 250, 0
    for seed in range(rounds):
        rates = [chance.random() if solved is None else solved for _ in range(prompts)]
        before, after = (
            [
                each
                for source in ("math", "nq", "taco")
                for each in of_policy(rates, count, 2 * seed + turn, source)
            ]
            for turn, count in enumerate(samples)
        )
        after = [replace(each, lost=chance.random() < lost) for each in after]
        verdicts = [one.verdict for one in differences(before, after).values()]
        wrong += any(verdict != "no clear change" for verdict in verdicts)
    slack = 2 * (0.05 * 0.95 / rounds) ** 0.5  # two standard errors of a rate of 5 %
    assert wrong / rounds <= 0.05 + slack


@settings(deadline=None)
@given(st.integers(1, 6))
def test_more_comparisons_make_each_interval_wider(comparisons: int):
    before = {str(i): 0.0 for i in range(12)}
    after = {str(i): float(i % 3 == 0) for i in range(12)}
    one, several = difference(before, after), difference(before, after, comparisons)
    assert one.interval is not None and several.interval is not None
    assert several.level == pytest.approx(1 - 0.05 / comparisons)
    assert several.interval[0] <= one.interval[0] + 1e-12
