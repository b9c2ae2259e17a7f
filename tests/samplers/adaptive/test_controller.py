"""Decisions: bounds, exactness over windows, and the rules."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.adaptive.controller import (
    MILLION,
    clipped,
    decide,
    first_decision,
    mean_advantage,
    observed,
    shortcomings,
)
from samplers.apportionment import apportion
from samplers.ledger import Decision
from samplers.mixture_plan import MixturePlan
from tests.samplers.adaptive.test_windows import FACTS, SIZES, SOURCES, entries, make_plan, policy

Facts = Mapping[str, tuple[int, float, int]]


def decided(plan: MixturePlan, *facts: Facts) -> list[Decision]:
    for number, own in enumerate(facts):
        plan.decide(entries(plan, number, own))
    return plan.decisions


@given(
    facts=st.lists(FACTS, max_size=6),
    rule=st.sampled_from(["progress", "worst"]),
    unit=st.sampled_from(["prompts", "trajectories", "trained_tokens"]),
)
def test_shares_keep_floor_ceiling_and_largest_change(facts: list[Facts], rule: str, unit: str):
    plan = make_plan(rule=rule, unit=unit)
    own = plan.policy
    assert own is not None
    made = decided(plan, *facts)
    for decision in made:
        assert sum(decision.shares.values()) == MILLION
        assert sum(decision.prompts.values()) == own.window * own.batch_size
        assert all(
            own.floors[s] <= share <= own.ceilings[s] for s, share in decision.shares.items()
        )
    for before, after in pairwise(made):
        changes = [abs(after.shares[s] - before.shares[s]) for s in SOURCES]
        assert max(changes) <= own.max_change


@given(facts=st.lists(FACTS, max_size=12), rule=st.sampled_from(["progress", "worst"]))
def test_rounding_to_whole_prompts_does_not_sum_up(facts: list[Facts], rule: str):
    plan = make_plan(rule=rule)
    had, asked = dict.fromkeys(SOURCES, 0), dict.fromkeys(SOURCES, Fraction(0))
    for decision in decided(plan, *facts):
        for source in SOURCES:
            had[source] += decision.prompts[source]
            asked[source] += Fraction(decision.shares[source] * 20, MILLION)
            assert abs(had[source] - asked[source]) < 1


@given(
    facts=st.lists(FACTS, min_size=1, max_size=8), ratios=st.sampled_from([(1, 1, 1), (5, 3, 2)])
)
def test_tokens_that_a_source_lacks_are_those_foreseen_wrong_in_one_window(
    facts: list[Facts], ratios: tuple[int, int, int]
):
    """The bound of the module's docstring, where no correction was more than half a due."""
    plan = make_plan(rule="fixed", unit="trained_tokens", window=5)
    made = decided(plan, *facts)
    for number, (before, after) in enumerate(pairwise(made)):
        size = {s: Fraction(text) for s, text in before.foreseen.items()}
        usual = 50 / sum(Fraction(before.shares[s], MILLION) / size[s] for s in SOURCES)
        halves = [Fraction(before.shares[s], MILLION) * usual / 4 for s in SOURCES]
        if any(
            abs(before.owed[s]) >= half * MILLION for s, half in zip(SOURCES, halves, strict=True)
        ):
            continue
        tokens = {s: facts[number][s][2] * before.prompts[s] for s in SOURCES}
        wrong = sum(abs(tokens[s] - size[s] * before.prompts[s]) for s in SOURCES)
        most = wrong + sum(size.values())
        assert all(abs(after.owed[s]) <= most * MILLION for s in SOURCES)


@given(
    ratios=st.tuples(*[st.integers(1, 60)] * 3),
    sizes=st.tuples(*[st.integers(50, 1000)] * 3),
    first_masked=st.booleans(),
)
@pytest.mark.slow
def test_each_share_of_tokens_is_reached_however_small(
    ratios: tuple[int, int, int], sizes: tuple[int, int, int], first_masked: bool
):
    """Tokens of a prompt are constant, and in the first window those of `a` may all be masked."""
    own = policy(rule="fixed", unit="trained_tokens")
    plan = MixturePlan(SIZES, dict(zip(SOURCES, ratios, strict=True)), 10, 3, policy=own)
    for number in range(80):
        facts = {s: (2, 0.5, size) for s, size in zip(SOURCES, sizes, strict=True)}
        if first_masked and not number:
            facts["a"] = (2, 0.5, 0)
        plan.decide(entries(plan, number, facts))
    last = plan.decisions[-1]
    assert all(abs(owed) <= 2 * sum(sizes) * MILLION for owed in last.owed.values())


def test_a_source_at_its_floor_rises_when_its_pass_rate_falls():
    plan = make_plan(rule="worst")
    good, bad = {"a": (4, 0.5, 9), "b": (2, 0.5, 9), "c": (2, 0.5, 9)}, {"a": (0, 0.5, 9)}
    for number in range(100):
        plan.decide(entries(plan, number, good))
    assert plan.decisions[-1].shares["a"] == 100_000
    for number in range(100, 110):
        plan.decide(entries(plan, number, good | bad))
    assert plan.decisions[-1].shares["a"] > 300_000


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.1] * 8, 0.0),
        ([1.1] * 10, 0.0),
        ([], 0.0),
        ([1.0], 0.0),
        ([1.0, 0.0], 0.7071067811865475),
        ([1e308, -1e308, 0.0], 2 / 3),
        ([5e-324, 0.0], 0.7071067811865475),
    ],
)
def test_the_advantage_of_equal_rewards_is_nothing_and_no_reward_overflows(rewards, expected):
    assert mean_advantage(rewards) == pytest.approx(expected)


@given(facts=st.lists(FACTS, min_size=2, max_size=4), rule=st.sampled_from(["progress", "worst"]))
def test_a_decision_is_checked_against_its_rule(facts: list[Facts], rule: str):
    plan = make_plan(rule=rule)
    made = decided(plan, *facts)
    assert plan.policy is not None
    for number, (before, after) in enumerate(pairwise(made)):
        lines, asked = entries(plan, number, facts[number]), plan.asked(after.window)
        assert shortcomings(plan.policy, asked, before, after, lines) == []
        other = {**after.prompts, "a": after.prompts["a"] + 1, "b": after.prompts["b"] - 1}
        for changed, name in (
            (replace(after, prompts=other), "prompts"),
            (replace(after, owed={**after.owed, "a": after.owed["a"] + 1}), "owed"),
            (replace(after, held=["a", "b", "c"]), "held"),
            (replace(after, proposed=dict.fromkeys(SOURCES, MILLION // 3)), "proposed"),
            (replace(after, state={**after.state, "a": after.state["a"] + 1}), "state"),
        ):
            found = shortcomings(plan.policy, asked, before, changed, lines)
            assert any(f"has {name}=" in words for words in found), name
        found = shortcomings(plan.policy, asked, before, after, lines[1:])
        assert any("has inputs=" in words for words in found)


def test_a_filtered_group_counts_for_the_rule_and_is_no_prompt_of_the_window():
    plan = make_plan()
    [decision] = plan.decisions
    lines = entries(plan, 0, dict.fromkeys(SOURCES, (2, 0.5, 10)))
    one = next(line for line in lines if line.source == "a")
    filtered = replace(
        one, outcome="filtered", trajectories=0, solved=one.judged, advantage=None, tokens=None
    )
    alone, both = observed(lines, decision)["a"], observed([*lines, filtered], decision)["a"]
    assert both["prompts"] == alone["prompts"] and both["seen"] == alone["seen"] + 1
    assert both["judged"] == alone["judged"] + (one.judged or 0)
    assert both["pass_rate"] > alone["pass_rate"] and both["advantage"] < alone["advantage"]


@given(
    proposed=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10**6), min_size=2),
    data=st.data(),
)
def test_clipped_shares_are_proportional_where_no_bound_holds(
    proposed: dict[str, int], data: st.DataObject
):
    names = sorted(proposed)
    before = apportion({name: Fraction(1, len(names)) for name in names}, MILLION)
    floors = {name: data.draw(st.integers(1, before[name])) for name in names}
    ceilings = {name: data.draw(st.integers(before[name], MILLION)) for name in names}
    own = replace(
        policy(), floors=floors, ceilings=ceilings, max_change=data.draw(st.integers(1, MILLION))
    )
    held = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1))
    shares = clipped(own, proposed, before, sorted(held))
    assert sum(shares.values()) == MILLION
    low = {s: max(floors[s], before[s] - own.max_change) for s in names}
    high = {s: min(ceilings[s], before[s] + own.max_change) for s in names}
    assert all(low[s] <= shares[s] <= high[s] for s in names)
    free = [s for s in names if low[s] + 1 < shares[s] < high[s] - 1 and s not in held]
    for one in free:
        for other in free:
            wanted = Fraction(proposed[one], proposed[other]) * shares[other]
            assert abs(shares[one] - wanted) <= 1 + Fraction(proposed[one], proposed[other])


EVEN: Facts = {"a": (2, 0.9, 10), "b": (2, 0.9, 10), "c": (2, 0.9, 10)}


@pytest.mark.parametrize(
    ("rule", "facts", "grows"),
    [
        ("progress", {**EVEN, "a": (2, 0.1, 10)}, ["b", "c"]),
        ("progress", {**EVEN, "c": (4, 0.2, 10), "b": (0, 0.2, 10)}, ["a"]),
        ("worst", {**EVEN, "a": (4, 0.9, 10)}, ["b", "c"]),
        ("worst", {**EVEN, "c": (0, 0.3, 10)}, ["c"]),
    ],
)
def test_who_gains(rule: str, facts: Facts, grows: list[str]):
    first, *_, last = decided(make_plan(rule=rule), facts, facts)
    assert [s for s in SOURCES if last.shares[s] > first.shares[s]] == grows


@pytest.mark.parametrize("rule", ["progress", "worst"])
def test_a_reward_without_any_difference_is_held_at_its_floor_until_it_has_one(rule: str):
    broken: Facts = {**EVEN, "a": (0, 0.0, 10)}
    plan = make_plan(rule=rule, window=4)
    made = decided(plan, *[broken] * 4)
    assert [decision.held for decision in made] == [[], ["a"], ["a"], ["a"], ["a"]]
    assert [made[n].shares["a"] for n in range(5)] == [500_000, 350_000, 200_000, 100_000, 100_000]
    plan.decide(entries(plan, 4, EVEN))
    assert plan.decisions[-1].held == []


def test_nobody_is_held_if_no_source_has_a_difference():
    nothing: Facts = dict.fromkeys(SOURCES, (0, 0.0, 10))
    assert decided(make_plan(window=4), nothing)[-1].held == []


def test_equal_sources_keep_their_ratios():
    for rule in ("progress", "worst"):
        first, *_, last = decided(make_plan(rule=rule), *[EVEN] * 5)
        assert last.shares == first.shares == {"a": 500_000, "b": 300_000, "c": 200_000}


def test_trajectories_count_in_their_unit():
    sizes = {"a": 8, "b": 4, "c": 4}
    plan = make_plan(rule="fixed", unit="trajectories", window=6, trajectories=sizes)
    [decision] = plan.decisions
    had = {source: decision.prompts[source] * sizes[source] for source in SOURCES}
    assert had == {"a": 160, "b": 96, "c": 64}, "shares .5, .3, .2 of 320 trajectories"


def test_the_example_of_the_docstring():
    own = replace(policy(rule="fixed"), batch_size=4)
    ratios = {"a": 500_000, "b": 300_000, "c": 200_000}
    first = first_decision(own, ratios)
    assert first.prompts == {"a": 4, "b": 2, "c": 2}
    plan = MixturePlan({"a": 9, "b": 9, "c": 9}, {"a": 5, "b": 3, "c": 2}, 4, 0, policy=own)
    second = decide(own, ratios, first, entries(plan, 0, EVEN))
    assert second.owed == {"a": 0, "b": 400_000, "c": -400_000}
    assert second.prompts == {"a": 4, "b": 3, "c": 1}
    third = decide(own, ratios, second, entries(plan, 0, EVEN)[:0])
    assert third.owed == second.owed, "nothing was trained"
