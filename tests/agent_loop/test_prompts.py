"""Prompts: the template of a source around the row's own words, with the configured tags."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl")

from agent_loop.math_agent_loop import MathAgentLoop
from agent_loop.prompts import prompt_of, with_system_text
from agent_loop.react_agent_loop import ReactAgentLoop
from agent_loop.toolbox.own import SPECS
from agent_loop.turn_agent_loop import TurnAgentLoop
from config.schema import (
    TAG_FIELDS,
    ConfigError,
    MixedConfig,
    PromptConfig,
    SourceConfig,
    ToolConfig,
    load_section,
    template_of,
)

TOOLS = ToolConfig(server_url="http://127.0.0.1:1")
ASKED = [{"role": "user", "content": "Who wrote it?"}]


def test_the_question_stands_where_the_template_has_it():
    template = PromptConfig(system="Use {search_start_tag}.", user="Q: {question}\nA:")
    assert prompt_of(ASKED, template, TOOLS) == [
        {"role": "system", "content": "Use <search>."},
        {"role": "user", "content": "Q: Who wrote it?\nA:"},
    ]


@pytest.mark.parametrize("name", TAG_FIELDS)
def test_another_tag_is_another_prompt(name: str):
    template = PromptConfig(system=f"Write {{{name}}}.", user="{question}")
    changed = TOOLS.model_copy(update={name: "[[other]]"})
    assert prompt_of(ASKED, template, TOOLS) != prompt_of(ASKED, template, changed)
    assert prompt_of(ASKED, template, changed)[0]["content"] == "Write [[other]]."


@given(st.text(max_size=60))
def test_the_default_template_changes_nothing(question: str):
    asked = [{"role": "user", "content": question}]
    assert prompt_of(asked, PromptConfig(), TOOLS) == asked


@given(question=st.text("{}question_start_tag ab", max_size=40), before=st.text(max_size=5))
def test_what_a_question_has_in_braces_is_its_own(question: str, before: str):
    before = before.replace("{", "").replace("}", "")
    template = PromptConfig(user=f"{before}{{code_start_tag}}{{question}}")
    (message,) = prompt_of([{"role": "user", "content": question}], template, TOOLS)
    assert message["content"] == f"{before}<code>{question}"


@pytest.mark.parametrize(
    ("source", "row", "template", "loop", "said"),
    [
        ("S", "R", "T", "L", "S\n\nR\n\nT\n\nL"),
        (None, "R", "T", None, "R\n\nT"),
        ("S", None, None, "L", "S\n\nL"),
        (
            "Write {answer_start_tag}.",
            "{answer_start_tag}",
            None,
            None,
            "Write <answer>.\n\n{answer_start_tag}",
        ),
        (None, None, None, None, None),
    ],
)
def test_the_system_message_has_all_parts_that_there_are(
    source: str | None, row: str | None, template: str | None, loop: str | None, said: str | None
):
    own = [] if row is None else [{"role": "system", "content": row}]
    messages = prompt_of([*own, *ASKED], PromptConfig(system=template), TOOLS, source)
    messages = with_system_text(messages, after=loop or "")
    system = [] if said is None else [{"role": "system", "content": said}]
    assert messages == [*system, *ASKED]


def test_a_system_message_of_parts_keeps_them():
    own = {"role": "system", "content": [{"type": "text", "text": "R"}]}
    (first, _) = prompt_of([own, *ASKED], PromptConfig(system="T"), TOOLS)
    assert [part["text"] for part in first["content"]] == ["R", "\n\nT"]


@pytest.mark.parametrize(
    ("prompt", "agent", "asked"),
    [
        (None, "search_agent", "[Q]"),
        (None, "single_turn_agent", "Q"),
        (None, None, "Q"),
        ("maths", "search_agent", "(Q)"),
        ({}, "search_agent", "Q"),
        ({"user": "<{question}>"}, "search_agent", "<Q>"),
    ],
)
def test_a_source_without_a_prompt_takes_the_one_of_its_agent(
    prompt: Any, agent: str | None, asked: str
):
    prompts = {
        "search_agent": PromptConfig(user="[{question}]"),
        "maths": PromptConfig(user="({question})"),
    }
    source = SourceConfig.model_validate({"ratio": 1, "prompt": prompt})
    template = template_of("math", source, agent, prompts)
    assert prompt_of([{"role": "user", "content": "Q"}], template, TOOLS)[0]["content"] == asked


@pytest.mark.parametrize(
    ("name", "reward", "agent", "asked"),
    [
        ("math", None, "code_agent", "maths"),
        ("mine", "math_reward_format", "code_agent", "maths"),
        ("math", "qa_f1", "code_agent", "search"),
        ("nq", None, "code_agent", "search"),
        ("mine", None, "code_agent", "search"),  # exact_match
        ("taco", None, "code_agent", "agent"),  # no template of its own for code
        ("mine", "judge", "code_agent", "agent"),
        ("mine", "code_agent/math.py:math_of_mine", "code_agent", "agent"),
        ("math", None, "other_agent", "{question}"),
        ("math", None, None, "{question}"),
    ],
)
def test_the_template_follows_the_reward(
    name: str, reward: str | None, agent: str | None, asked: str
):
    prompts = {
        "code_agent": PromptConfig(user="agent {question}"),
        "code_agent_maths": PromptConfig(user="maths {question}"),
        "code_agent_search": PromptConfig(user="search {question}"),
    }
    source = SourceConfig.model_validate({"ratio": 1, "reward": reward})
    assert template_of(name, source, agent, prompts).user.startswith(asked)


@pytest.mark.parametrize(
    ("loop_class", "given", "tools", "said"),
    [
        (ReactAgentLoop, None, {"search"}, ["You may use these tools:\nsearch: find", "Action:"]),
        (ReactAgentLoop, "Think.", {"search"}, ["Think.\n\nAnswer the question.", "Action:"]),
        (ReactAgentLoop, "Only {tools}", {"search"}, ["Only search: find passages"]),
        (
            ReactAgentLoop,
            "Think.",
            set(),
            ["Think.\n\nAnswer the question. Write", "Final Answer:"],
        ),
        (MathAgentLoop, "Use {code_start_tag}.", set(), ["Use <code>."]),
    ],
)
def test_what_a_loop_says_is_added_to_what_the_row_says(
    loop_class: type[TurnAgentLoop], given: str | None, tools: set[str], said: list[str]
):
    loop: Any = object.__new__(loop_class)
    loop.system_prompt, loop.settings = given, SimpleNamespace(tools=TOOLS)
    loop.specs = {name: spec for name, spec in SPECS.items() if name in tools}
    system, asked = loop._messages([{"role": "system", "content": "R"}, *ASKED])
    assert system["content"].startswith("R\n\n") and asked == ASKED[0]
    assert all(text in system["content"] for text in said)
    if not tools:
        assert "tools" not in system["content"] and "Action" not in system["content"]


def test_a_question_with_an_image_stands_there_too():
    image = {"type": "image", "image": "cat.png"}
    rows_own = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    (message,) = prompt_of(rows_own, PromptConfig(user="Q: {question}"), TOOLS)
    assert message["content"] == [{"type": "text", "text": "Q: "}, *rows_own[0]["content"]]
    assert prompt_of(rows_own, PromptConfig(), TOOLS) == rows_own


def test_of_a_conversation_the_last_user_message_is_the_question():
    rows_own = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "2+2?"},
    ]
    said = prompt_of(rows_own, PromptConfig(user="[{question}]"), TOOLS)
    assert [message["content"] for message in said] == ["hi", "hello", "[2+2?]"]


def test_examples_are_turns_between_the_system_message_and_the_rows_own():
    example = {"user": "1+1?", "assistant": "{answer_start_tag}2{answer_end_tag}"}
    template = load_section(
        PromptConfig, {"system": "Be brief.", "user": "[{question}]", "examples": [example]}, "p"
    )
    rows_own = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "2+2?"}]
    said = prompt_of(rows_own, template, TOOLS)
    assert [(message["role"], message["content"]) for message in said] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", "<answer>2</answer>"),
        ("assistant", "hello"),
        ("user", "[2+2?]"),
    ]
    with_system = [{"role": "system", "content": "own"}, *rows_own]
    assert prompt_of(with_system, template, TOOLS) == [
        {"role": "system", "content": "own\n\nBe brief."},
        *said[1:],
    ]


def test_the_row_is_not_changed():
    prompt_of(ASKED, PromptConfig(user="[{question}]"), TOOLS)
    assert ASKED == [{"role": "user", "content": "Who wrote it?"}]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"user": "no question"}, "leaves the question out"),
        ({"system": "{code_begin_tag}"}, "{code_begin_tag}: no such tag"),
        (
            {"examples": [{"user": "1+1?", "assistant": "{answer_tag}2"}]},
            "{answer_tag}: no such tag",
        ),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words.replace("{", r"\{")):
        load_section(PromptConfig, values, "mixed.prompts.p")


def test_a_system_prompt_of_a_source_names_tags_that_exist():
    with pytest.raises(
        ConfigError, match=r"mixed.sources.s.system_prompt: \{answer_tag\}: no such"
    ):
        load_section(SourceConfig, {"ratio": 1, "system_prompt": "{answer_tag}"}, "mixed.sources.s")


def test_latex_in_a_template_is_no_tag():
    template = PromptConfig(system=r"Write \boxed{answer}.")
    assert prompt_of(ASKED, template, TOOLS)[0]["content"] == r"Write \boxed{answer}."


def test_a_prompt_that_is_not_there_is_named_with_those_that_are():
    values = {
        "experiment": "x",
        "run_dir": "/x",
        "sources": {"nq": {"ratio": 1, "prompt": "serch"}},
        "prompts": {"search": {}},
    }
    with pytest.raises(ConfigError, match=r"sources.nq.prompt='serch'.*has search"):
        load_section(MixedConfig, values, "mixed")
