"""What the three protocols read from a request, and what they refuse."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agent_loop.gateway import anthropic_messages, chat_completions, responses
from agent_loop.gateway.demands import check_schemas
from agent_loop.gateway.forms import MAX_DEPTH
from agent_loop.gateway.wire import ModelRequest, WireError

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH = {"name": "search", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": SEARCH}
BLOCK_TOOL = {"name": "search", "description": "d", "input_schema": SCHEMA}
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found", "name": "search"}
WRONG, NO = "invalid_value", "unsupported_value"
CHOICE = {"type": "function", "name": "search"}
USAGE = {"include_usage": True}
REDACTED = {"type": "redacted_thinking", "data": "x"}
DEEP: Any = {"a": json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)}


def chat_call(arguments: str) -> dict[str, Any]:
    return CALL | {"function": {"name": "search", "arguments": arguments}}


def chat(*given: Any, **more: Any) -> ModelRequest:
    return chat_completions.parse({"model": "p", "messages": [*given] or [HELLO]} | more)


def blocks(*given: Any, **more: Any) -> ModelRequest:
    body = {"model": "p", "messages": [*given] or [HELLO], "max_tokens": 9}
    return anthropic_messages.parse(body | more)


def items(*given: Any, **more: Any) -> ModelRequest:
    return responses.parse({"model": "p", "input": [*given] or [HELLO]} | more)


def text(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": each} for each in texts]


TURN = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]}
CHAT_TURN = TURN | {"tool_calls": [chat_call('{"q": "x"}')]}
BLOCK_TURN = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "r", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
    ],
}
ITEM_CALL = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "x"}'}
REASONING = {"type": "reasoning", "summary": [], "content": text("r", kind="reasoning_text")}
SUMMARY = {"type": "reasoning", "summary": text("r", kind="summary_text")}
ITEM_TURN = [REASONING, {"role": "assistant", "content": "a"}, ITEM_CALL]


def tool_result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **more}


def item_result(output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c1", "output": output}


def part(kind: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": kind}]}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            chat({"role": "developer", "content": text("a", "b")}, HELLO),
            [{"role": "system", "content": "a\nb"}, HELLO],
        ),
        (chat(HELLO, CHAT_TURN, RESULT | {"name": None}, HELLO), [HELLO, TURN, RESULT, HELLO]),
        (
            chat({**TURN, "content": None, "tool_calls": None, "reasoning": "r", "refusal": "no"}),
            [{"role": "assistant", "content": "no", "reasoning_content": "r"}],
        ),
        (
            chat({"role": "tool", "tool_call_id": "unknown", "content": None, "name": "t"}),
            [{"role": "tool", "tool_call_id": "unknown", "content": "", "name": "t"}],
        ),
        (
            blocks(HELLO, system=text("a", "b")),
            [{"role": "system", "content": "a\n\nb"}, HELLO],
        ),
        (
            blocks(HELLO, BLOCK_TURN, {"role": "user", "content": [tool_result(text("found"))]}),
            [HELLO, TURN, RESULT],
        ),
        (
            blocks(BLOCK_TURN, {"role": "user", "content": [*text("hello"), tool_result("found")]}),
            [TURN, RESULT, HELLO],
        ),
        (items(HELLO, instructions="s"), [{"role": "system", "content": "s"}, HELLO]),
        (responses.parse({"model": "p", "input": "hello"}), [HELLO]),
        (
            items(HELLO, *ITEM_TURN, item_result(text("found", kind="input_text")), HELLO),
            [HELLO, TURN, RESULT, HELLO],
        ),
        (items(*ITEM_TURN, *ITEM_TURN[:2], HELLO), [TURN, {**TURN, "tool_calls": None}, HELLO]),
        (items(SUMMARY), [{"role": "assistant", "content": "", "reasoning_content": "r"}]),
        (items(ITEM_CALL), [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
    ],
)
def test_messages_have_the_form_of_chat_templates(
    request_: ModelRequest, expected: list[dict[str, Any]]
):
    kept = [{key: value for key, value in each.items() if value is not None} for each in expected]
    assert request_.messages == kept


def parts(*texts: str, kind: str = "text") -> dict[str, Any]:
    return {"content": text(*texts, kind=kind)}


NONE = {"role": "assistant", "content": ""}
CALLS = {**NONE, "tool_calls": [CALL]}
BARE_CALL = CALL | {"function": {"name": "search", "arguments": '{"q": "x"}'}}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        # openai, langchain: no content beside calls, fields without value
        (chat(CALLS | {"content": None, "tool_calls": [BARE_CALL], "refusal": None}), [CALLS]),
        (chat({"role": "assistant", "tool_calls": [BARE_CALL], "audio": None}), [CALLS]),
        (chat(CALLS | {"content": [], "tool_calls": [BARE_CALL], "annotations": []}), [CALLS]),
        (chat({**NONE, "tool_calls": [], "function_call": None}), [NONE]),
        # mastra, dspy, smolagents: content parts in messages of every role
        (
            chat({"role": "system", **parts("a")}, {"role": "user", **parts("b", "c")}),
            [{"role": "system", "content": "a"}, {"role": "user", "content": "b\nc"}],
        ),
        (
            chat(
                {"role": "assistant", **parts("a")},
                {"role": "tool", "tool_call_id": "c1", **parts("b")},
            ),
            [{**NONE, "content": "a"}, {"role": "tool", "tool_call_id": "c1", "content": "b"}],
        ),
        # openai-agents, ai: items with ids and states, a call before its message
        (
            items(HELLO | {"type": "message"}, {**ITEM_CALL, "id": "fc_1", "status": "completed"}),
            [HELLO, CALLS],
        ),
        (
            items({"role": "assistant", "id": "msg_1", **parts("a", kind="output_text")}),
            [{**NONE, "content": "a"}],
        ),
        # anthropic's own client: fields without value, a result without text
        (
            blocks(
                {"role": "assistant", "content": [BLOCK_TURN["content"][2] | {"caller": None}]},
                {"role": "user", "content": [tool_result(None)]},
            ),
            [CALLS, RESULT | {"content": ""}],
        ),
    ],
)
def test_messages_as_frameworks_send_them_are_taken(
    request_: ModelRequest, expected: list[dict[str, Any]]
):
    assert (request_.messages, request_.ignored) == (expected, ())


@pytest.mark.parametrize(
    "request_",
    [
        chat(tools=[], tool_choice=None, parallel_tool_calls=None, response_format=None, stop=None),
        chat(tools=None, tool_choice="auto", max_completion_tokens=9, temperature=None, seed=None),
        items(tools=[], text={}, include=None, instructions=None, max_output_tokens=None),
        blocks(tools=[], system="", stop_sequences=[], temperature=None, output_config={}),
    ],
)
def test_settings_without_a_value_ask_for_nothing(request_: ModelRequest):
    asked = (request_.tools, request_.tool_choice, request_.answer_schema, request_.temperature)
    assert asked == ([], "auto", None, None) and request_.ignored == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [("bad", "error: bad"), ("Error: bad", "Error: bad"), (None, "error: ")],
)
def test_a_failed_tool_result_says_that_it_is_an_error(content: str | None, expected: str):
    message = {"role": "user", "content": [tool_result(content, is_error=True)]}
    assert blocks(message).messages[0]["content"] == expected


@pytest.mark.parametrize(
    "arguments", ["[1]", "{", '{"a": 1} x', '{"a": NaN}', r'{"a": "\ud83d"}', json.dumps(DEEP)]
)
def test_arguments_that_are_no_json_object_stay_text(arguments: str):
    message = {"role": "assistant", "tool_calls": [chat_call(arguments)]}
    assert chat(message).messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "given", [{"arguments": x} for x in ("", " \n", "null", None, "{}")] + [{}]
)
def test_a_call_without_arguments_has_an_empty_object(given: dict[str, Any]):
    call = CALL | {"function": {"name": "search", **given}}
    item = {"type": "function_call", "call_id": "c1", "name": "search", **given}
    for request in (chat({"role": "assistant", "tool_calls": [call]}), items(item)):
        assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(tools=[TOOL]), ("auto", True)),
        (chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=False), ("none", False)),
        (chat(tools=[TOOL], tool_choice="required"), ("required", True)),
        (
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "search"}}),
            ("search", True),
        ),
        (items(tools=[{"type": "function", **SEARCH}], tool_choice=CHOICE), ("search", True)),
        (
            blocks(
                tools=[BLOCK_TOOL],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
            ),
            ("required", False),
        ),
        (
            blocks(tools=[BLOCK_TOOL], tool_choice={"type": "tool", "name": "search"}),
            ("search", True),
        ),
    ],
)
def test_tools_and_their_choice_are_the_same_in_all_protocols(
    request_: ModelRequest, expected: tuple[str, bool]
):
    assert (request_.tools, request_.ignored) == ([TOOL], ())
    assert (request_.tool_choice, request_.parallel_tool_calls) == expected


FORM = {"type": "json_schema", "schema": SCHEMA}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
ITEM_FORM = {**FORM, "name": "n", "strict": True, "description": "d"}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(response_format={"type": "text"}), None),
        (chat(response_format=OBJECT), {"type": "object"}),
        (chat(response_format=CHAT_FORM), SCHEMA),
        (items(text={"format": ITEM_FORM, "verbosity": None}), {"description": "d", **SCHEMA}),
        (items(text={"format": OBJECT}), {"type": "object"}),
        (blocks(output_config={"format": FORM}), SCHEMA),
        (blocks(output_format=FORM), SCHEMA),
    ],
)
def test_the_schema_of_the_answer_is_read_in_all_protocols(
    request_: ModelRequest, expected: dict[str, Any] | None
):
    assert (request_.answer_schema, request_.ignored) == (expected, ())


@pytest.mark.parametrize(
    "request_",
    [
        chat(tools=[{"type": "function", "function": {**SEARCH, "strict": True}}]),
        items(tools=[{"type": "function", **SEARCH, "strict": True}]),
        blocks(tools=[{**BLOCK_TOOL, "strict": True}]),
    ],
)
def test_strict_tools_are_named_and_their_schemas_are_those_of_other_tools(request_: ModelRequest):
    assert (request_.strict, request_.tools, request_.ignored) == (("search",), [TOOL], ())


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(stop="a", max_tokens=3), {"stop": ("a",), "max_tokens": 3}),
        (chat(stop=["a", "b"], max_completion_tokens=3, max_tokens=4), {"max_tokens": 3}),
        (chat(temperature=0, top_p=1.0), {"temperature": 0, "ignored": ()}),
        (chat(top_p=0.9, seed=5), {"ignored": ("seed", "top_p")}),
        (chat(logprobs=True, top_logprobs=0, n=1), {"logprobs": True}),
        (chat(stream=True, stream_options=USAGE), USAGE | {"stream": True}),
        (chat(stream=True), {"include_usage": False}),
        (blocks(stop_sequences=["a"], top_k=-1), {"stop": ("a",), "ignored": ()}),
        (items(max_output_tokens=3, include=None), {"max_tokens": 3, "ignored": ()}),
    ],
)  # fmt: skip
def test_settings_are_read(request_: ModelRequest, expected: dict[str, Any]):
    assert {name: getattr(request_, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(user="u", store=None), ["user"]),
        (chat({**HELLO, "name": "n"}, {**HELLO, "name": "n"}), ["messages.name"]),
        (chat(**{"\n" * 50: 1}), ["'" + r"\n" * 40 + "...'"]),
        (
            blocks(
                {"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {}}]},
                metadata={},
                thinking={"type": "adaptive"},
            ),
            ["messages.content.cache_control", "metadata", "thinking"],
        ),
        (
            blocks({"role": "assistant", "content": [REDACTED]}, HELLO),
            ["messages.content.data"],
        ),
        (items(store=True, include=["reasoning"]), ["include", "store"]),
        (items(text={"verbosity": "low"}), ["text.verbosity"]),
        (blocks(output_config={"effort": "low"}), ["output_config.effort"]),
    ],
)  # fmt: skip
def test_fields_without_effect_are_named(request_: ModelRequest, expected: list[str]):
    assert list(request_.ignored) == expected


def test_a_count_needs_no_limit_and_may_end_with_the_assistant():
    body = {"model": "p", "messages": [HELLO, {"role": "assistant", "content": "a"}]}
    assert anthropic_messages.parse_count(body).max_tokens is None


@pytest.mark.parametrize(
    ("parser", "given", "code", "param"),
    [
        (chat, {"messages": []}, WRONG, "messages"),
        (chat, {"messages": "hi"}, WRONG, "messages"),
        (chat, {"messages": [1]}, WRONG, "messages[0]"),
        (chat, {"messages": [HELLO, part("image_url")]}, NO, "messages[1].content[0].type"),
        (chat, {"messages": [part("input_audio")]}, NO, "messages[0].content[0].type"),
        (chat, {"messages": [part("text")]}, WRONG, "messages[0].content[0].text"),
        (items, {"input": [part("input_text")]}, WRONG, "input[0].content[0].text"),
        (chat, {"messages": [HELLO | {"content": 5}]}, WRONG, "messages[0].content"),
        (chat, {"messages": [HELLO | {"role": "function"}]}, WRONG, "messages[0].role"),
        (chat, {"messages": [HELLO | {"role": "robot"}]}, WRONG, "messages[0].role"),
        (chat, {"messages": [{"role": "tool"}]}, WRONG, "messages[0].tool_call_id"),
        (chat, {"messages": [{"role": "user"}]}, WRONG, "messages[0].content"),
        (chat, {"response_format": "json"}, WRONG, "response_format"),
        (chat, {"response_format": {"type": "grammar"}}, NO, "response_format.type"),
        (chat, {"response_format": {"type": "json_schema"}}, WRONG, "response_format.schema"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, WRONG,
         "response_format.json_schema.schema"),
        (items, {"text": {"format": {**FORM, "schema": {"type": "array"}}}}, WRONG,
         "text.format.schema.type"),
        (items, {"text": {"format": {**FORM, "schema": {"$ref": "#/$defs/None"}}}}, WRONG,
         "text.format.schema"),
        (blocks, {"output_config": {"format": {**FORM, "schema": {"type": 5}}}}, WRONG,
         "output_config.format.schema.type"),
        (blocks, {"output_config": {"format": {"type": "regex"}}}, NO, "output_config.format.type"),
        (chat, {"structured_outputs": {"regex": "a+"}}, NO, "structured_outputs"),
        (chat, {"guided_choice": ["a"]}, NO, "guided_choice"),
        (chat, {"tools": [{"function": {**SEARCH, "strict": True, "parameters": {"$ref": "#/x"}}}]},
         WRONG, "tools[0].function.parameters"),
        (chat, {"tool_choice": "required"}, WRONG, "tool_choice"),
        (chat, {"model": None}, WRONG, "model"),
        (chat, {"n": 2}, NO, "n"),
        (chat, {"n": True}, WRONG, "n"),
        (chat, {"top_logprobs": 1}, WRONG, "top_logprobs"),
        (chat, {"functions": []}, NO, "functions"),
        (chat, {"function_call": "auto"}, NO, "function_call"),
        (chat, {"temperature": "hot"}, WRONG, "temperature"),
        (chat, {"max_tokens": 10**5000}, WRONG, "max_tokens"),
        (chat, {"max_tokens": 0}, WRONG, "max_tokens"),
        (chat, {"stop": [""]}, WRONG, "stop[0]"),
        (chat, {"stop": ["x"] * 65}, WRONG, "stop"),
        (chat, {"tools": [TOOL, TOOL]}, WRONG, "tools"),
        (chat, {"tools": [{"type": "custom"}]}, NO, "tools[0].type"),
        (chat, {"tools": [{"type": "function"}]}, WRONG, "tools[0].function"),
        (chat, {"tool_choice": "search"}, WRONG, "tool_choice"),
        (chat, {"tool_choice": CHOICE}, WRONG, "tool_choice"),
        (blocks, {"tools": [{"name": "t", "input_schema": DEEP}]}, WRONG, "tools[0].input_schema"),
        (blocks, {"tools": [{"type": "web_search_20250305"}]}, NO, "tools[0].type"),
        (blocks, {"max_tokens": None}, WRONG, "max_tokens"),
        (blocks, {"messages": [part("image")]}, NO, "messages[0].content[0].type"),
        (blocks, {"messages": [], "system": "s"}, WRONG, "messages"),
        (blocks, {"messages": [{"role": "assistant"}]}, WRONG, "messages[0].content"),
        (items, {"input": []}, WRONG, "input"),
        (items, {"input": [{"role": "user"}]}, WRONG, "input[0].content"),
        (items, {"previous_response_id": "r"}, NO, "previous_response_id"),
        (items, {"input": [{"type": "item_reference", "id": "x"}]}, NO, "input[0].type"),
        (items, {"input": [part("input_image")]}, NO, "input[0].content[0].type"),
        (items, {"tools": [{"type": "web_search"}]}, NO, "tools[0].type"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_the_rule(
    parser: Callable[..., ModelRequest], given: dict[str, Any], code: str, param: str
):
    with pytest.raises(WireError) as caught:
        asyncio.run(check_schemas(parser(**given)))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)
    assert caught.value.message.startswith(param) and len(caught.value.message) < 300


def test_a_body_that_is_nested_too_deeply_for_a_recursion_is_refused():
    schema: Any = {}
    for _ in range(100_000):
        schema = {"a": schema}
    with pytest.raises(WireError, match="must not be nested deeper than 64 levels"):
        chat(tools=[{"function": {**SEARCH, "parameters": schema}}])
