"""A plan whose shares are decided for one window at a time keeps the laws of a plan."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.adaptive.controller import Policy
from samplers.adaptive.windows import Windows
from samplers.ledger import LedgerEntry
from samplers.mixture_plan import MixturePlan

SOURCES = ("a", "b", "c")
SIZES = {"a": 40, "b": 25, "c": 70}


def policy(**settings: object) -> Policy:
    own: dict[str, object] = {
        "rule": "progress",
        "unit": "prompts",
        "window": 2,
        "batch_size": 10,
        "floors": dict.fromkeys(SOURCES, 100_000),
        "ceilings": dict.fromkeys(SOURCES, 800_000),
        "max_change": 150_000,
        "trajectories": dict.fromkeys(SOURCES, 4),
        "smoothing": 0.5,
        "temperature": 0.5,
        "speed": 4.0,
        "emphasis": 0.2,
    }
    return Policy(**(own | settings))  # type: ignore[arg-type]


def make_plan(**settings: object) -> MixturePlan:
    own = policy(**settings)
    return MixturePlan(SIZES, {"a": 0.5, "b": 0.3, "c": 0.2}, own.batch_size, 3, policy=own)


def trained(
    step: int, source: str, facts: tuple[int, float, int], **changes: object
) -> LedgerEntry:
    """A group; `facts` are solved of 4, advantage, tokens."""
    solved, advantage, tokens = facts
    entry = LedgerEntry(
        step=step,
        source=source,
        draw=0,
        row=0,
        row_id="",
        outcome="trained",
        trajectories=4,
        reward_mean=solved / 4,
        judged=4,
        solved=solved,
        advantage=advantage,
        tokens=tokens,
    )
    return replace(entry, **changes)  # type: ignore[arg-type]


def entries(
    plan: MixturePlan, window: int, facts: Mapping[str, tuple[int, float, int]]
) -> list[LedgerEntry]:
    """The ledger's lines of a window; `facts` are solved of 4, advantage, tokens per prompt."""
    assert plan.policy is not None
    found: list[LedgerEntry] = []
    for step in range(window * plan.policy.window, (window + 1) * plan.policy.window):
        for source, count in plan.counts(step).items():
            found += [trained(step + 1, source, facts[source])] * count
    return found


FACTS = st.fixed_dictionaries(
    {
        source: st.tuples(
            st.integers(0, 4),
            st.sampled_from([0.0, 0.5, 0.9]) | st.floats(0, 1),
            st.integers(1, 900),
        )
        for source in SOURCES
    }
)


@given(
    facts=st.lists(FACTS, max_size=6),
    rule=st.sampled_from(["fixed", "progress", "worst"]),
    unit=st.sampled_from(["prompts", "trajectories", "trained_tokens"]),
    window=st.integers(1, 3),
)
def test_each_prompt_keeps_every_source_within_one_of_what_it_is_due(
    facts: list[Mapping[str, tuple[int, float, int]]], rule: str, unit: str, window: int
):
    plan = make_plan(rule=rule, unit=unit, window=window)
    for number, own in enumerate(facts):
        plan.decide(entries(plan, number, own))
    had = Counter[str]()
    prompts = (len(facts) + 2) * window * plan.batch_size
    for i in range(prompts):
        had[plan.prompt(i)[0]] += 1
        due = plan.due(i + 1)
        assert all(abs(had[source] - due[source]) < 1 for source in SOURCES)
        if (i + 1) % (window * plan.batch_size) == 0:
            assert all(had[source] == due[source] for source in SOURCES)
    assert plan.counts_between(0, prompts) == had


@given(facts=st.lists(FACTS, min_size=1, max_size=5), at=st.integers(0, 4))
@pytest.mark.slow
def test_a_later_decision_changes_nothing_before_it(
    facts: list[Mapping[str, tuple[int, float, int]]], at: int
):
    plan = make_plan()
    at = min(at, len(facts) - 1)
    for number, own in enumerate(facts[:at]):
        plan.decide(entries(plan, number, own))
    steps = (at + 1) * 2
    before = [plan.batch(step).rows.tolist() for step in range(steps)]
    for number, own in enumerate(facts[at:], start=at):
        plan.decide(entries(plan, number, own))
    assert [plan.batch(step).rows.tolist() for step in range(steps)] == before


@given(facts=st.lists(FACTS, max_size=5), taken=st.integers(0, 60))
def test_a_resumed_plan_follows_the_decisions_that_were_made(
    facts: list[Mapping[str, tuple[int, float, int]]], taken: int
):
    plan = make_plan()
    for number, own in enumerate(facts):
        plan.decide(entries(plan, number, own))
    plan.take(taken)
    again = make_plan()
    again.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert again.decisions == plan.decisions
    assert again.take(40) == plan.take(40)
    assert MixturePlan.from_description(plan.description()).differences(plan.state_dict()) == []


@pytest.mark.parametrize("counts", [(5, 4), (11, -1), (0, 0)])
def test_a_window_has_all_its_prompts(counts: tuple[int, int]):
    windows = Windows((5, 5), steps=2, prompts_per_step=5)
    with pytest.raises(ValueError, match="sum to 10"):
        windows.append(counts)


def test_a_plan_with_a_controller_and_one_without_are_two_streams() -> None:
    controlled = make_plan()
    plain = MixturePlan(SIZES, {"a": 0.5, "b": 0.3, "c": 0.2}, 10, 3)
    for saved, other in ((controlled, plain), (plain, controlled)):
        with pytest.raises(ValueError, match="its state is of another stream, policy="):
            other.load_state_dict(saved.state_dict())
