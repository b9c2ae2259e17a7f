"""What an environment may return: laws over any value."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.environments.episode import (
    MAX_OBSERVATION_BYTES,
    InvalidAnswer,
    Step,
    start_of,
    step_of,
)
from agent_loop.rewards.number import MAX_REWARD

NUMBERS = st.floats() | st.integers(-(10**400), 10**400) | st.booleans()
JSON = st.recursive(
    st.none() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner),
)
KEYED = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("observation", "reward", "done", "info"), JSON)
)


@given(value=JSON | KEYED | st.tuples(JSON, JSON, JSON))
def test_a_step_is_valid_or_refused(value: Any):
    try:
        step = step_of(value)
    except InvalidAnswer:
        return
    assert math.isfinite(step.reward) and isinstance(step.done, bool)
    assert isinstance(step.observation, str) and all(map(math.isfinite, step.info.values()))
    assert step_of(step) == step


@given(
    observation=st.text(),
    reward=st.floats(-MAX_REWARD, MAX_REWARD),
    done=st.booleans(),
    cut=st.booleans(),
)
def test_all_forms_of_a_step_mean_the_same(observation: str, reward: float, done: bool, cut: bool):
    step = Step(observation=observation, reward=reward, done=done)
    assert step_of((observation, reward, done)) == step
    assert step_of({"observation": observation, "reward": reward, "done": done}) == step
    gymnasiums = step_of((observation, reward, done, cut, {}))
    assert gymnasiums == Step(observation=observation, reward=reward, done=done or cut)


@given(value=JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON})))
def test_a_start_has_messages_of_texts_or_is_refused(value: Any):
    try:
        start = start_of(value)
    except InvalidAnswer:
        return
    assert start.messages
    assert all(set(map(type, each.values())) == {str} for each in start.messages)


@pytest.mark.parametrize("text", ["x" * (MAX_OBSERVATION_BYTES + 1), "é" * MAX_OBSERVATION_BYTES])
def test_a_text_above_the_bound_is_refused(text: str):
    for refused in (lambda: step_of((text, 0.0, False)), lambda: start_of(text)):
        with pytest.raises(InvalidAnswer, match="the most is 1 MiB"):
            refused()
