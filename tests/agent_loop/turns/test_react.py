"""ReAct's grammar: what a turn asks for, and where it ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.turns.react import ReAct
from agent_loop.turns.tags import ActionKind

ONE, MANY = ReAct(), ReAct(max_actions=3)
SEARCH = 'Action: search\nAction Input: {"query": "x"}'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["Observation:", "\nFinal Answer: {", "Action: }"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip
CALLS = st.tuples(
    st.text("abc_ :", min_size=1, max_size=6).map(str.strip),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.booleans(),
)


def kinds(text: str, language: ReAct = ONE) -> list[str]:
    return [action.kind for action in language.actions(text)]


@given(calls=st.lists(CALLS, max_size=4), most=st.integers(1, 5))
def test_parsing_undoes_rendering(calls, most):
    language = ReAct(max_actions=most)
    text, ends = "Thought: first", []
    for name, arguments, is_ascii in calls:
        rendered = json.dumps(arguments, ensure_ascii=is_ascii)
        text += f"\nThought: why\nAction: {name}\nAction Input: {rendered}"
        ends.append(len(text))
    found = language.actions(text + "\nThought: and so on")
    assert [(a.kind, a.arguments) for a in found] == [(n, a) for n, a, _ in calls[:most]]
    assert language.find_end(text + "\nThought: so") == ([-1, *ends[:most]])[-1]


LINES = st.sampled_from(
    [
        *(SEARCH, "Action: a\nAction Input: [1]", "Action:", "Action Input: {", "\n"),
        *("Observation: y", "Final Answer: 4", "x", '"'),
    ]
)


@given(text=st.lists(LINES).map("\n".join))
def test_what_follows_a_stop_text_changes_nothing(text):
    at = text.find(MANY.stop_texts[0])
    stopped = text[: at + len(MANY.stop_texts[0])] if at >= 0 else text
    end = MANY.find_end(text)
    assert MANY.find_end(stopped) == end
    assert end == -1 or MANY.find_end(text[:end]) == end


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a": ', "Expecting value"),
        ("{'a': 1}", "Expecting property name"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": 1e999}', "not JSON compliant"),
        ("[1, 2]", "no JSON object"),
        ("12", "no JSON object"),
        ("", "Expecting value"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_arguments_that_are_no_json_object_are_the_model_s_mistake(arguments, problem):
    (action,) = ONE.actions(f"Action: a\nAction Input: {arguments}\nThought: so")
    assert action.kind == ActionKind.MALFORMED
    assert problem in action.content


@pytest.mark.parametrize("text", ["Action: search", "Action Input: {}", "Action: a\nThought: b"])
def test_half_an_action_is_malformed(text):
    assert kinds(text) == [ActionKind.MALFORMED]
    assert kinds(f"{text}\nFinal Answer: 4") == [ActionKind.MALFORMED]


def test_what_follows_a_malformed_action_is_not_asked_for():
    assert kinds(f"Action: a\nAction Input: [1]\n{SEARCH}", MANY) == [ActionKind.MALFORMED]


def test_any_name_is_an_action_since_only_the_loop_knows_its_tools():
    assert kinds("Action: no such tool\nAction Input: {}") == ["no such tool"]


def test_an_action_before_a_final_answer_is_run_and_one_behind_it_is_not():
    assert kinds(f"{SEARCH}\nFinal Answer: 4") == ["search"]
    assert ONE.find_end(f"{SEARCH}\nFinal Answer: 4") == len(SEARCH)
    assert kinds(f"Final Answer: 4\n{SEARCH}") == [ActionKind.ANSWER]


@pytest.mark.parametrize("text", ["Final Answer: 4", "Thought: a\n Final Answer:\n4\n"])
def test_the_answer_is_what_follows_its_words(text):
    assert [(each.content, each.is_message) for each in ONE.actions(text)] == [("4", True)]
    assert [a.content for a in ONE.actions(f"{text}\nObservation: 5")] == ["4"]


@pytest.mark.parametrize("own", ["", "Thought: a\n", SEARCH + "\n"])
@pytest.mark.parametrize("rest", [SEARCH, "Final Answer: 4"])
def test_nothing_counts_behind_an_observation_that_the_model_made_up(own, rest):
    made_up = f"{own}Observation: 4\n{rest}"
    cut = made_up[: MANY.find_end(made_up)]
    assert cut in (SEARCH, f"{own}Observation:")
    assert kinds(cut, MANY) == kinds(own, MANY)


def test_the_word_observation_inside_a_line_ends_nothing():
    text = 'Thought: its Observation: is odd\nAction: a\nAction Input: {"q": "Observation: {"}'
    assert kinds(text) == ["a"]
    assert not any(stop in text for stop in ONE.stop_texts)


def test_hostile_space_is_read_in_linear_time():
    text = "Action:" + " " * 200_000 + "x"  # cubic once: days
    assert ReAct().actions(text)[0].kind == ActionKind.MALFORMED
    assert ReAct().find_end("Final Answer:" + " \n" * 100_000) == -1


@pytest.mark.parametrize("name", ["answer", "malformed"])
def test_a_tool_cannot_be_called_by_a_word_of_the_loop_s_own(name):
    actions = ReAct().actions(f'Action: {name}\nAction Input: {{"text": "42"}}')
    assert [action.kind for action in actions] == [ActionKind.MALFORMED]
    assert f"no tool '{name}'" in actions[0].content
