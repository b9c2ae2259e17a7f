"""Laws of the three protocols: hostile requests, streams, and replies that come back as history."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.gateway import anthropic_messages, chat_completions, responses
from agent_loop.gateway.wire import Finish, ModelReply, ReplyCall, TokenLogprob, WireError
from tests.agent_loop.gateway.test_requests import (
    BLOCK_TOOL,
    BLOCK_TURN,
    CHAT_TURN,
    HELLO,
    ITEM_TURN,
    RESULT,
    SEARCH,
    TOOL,
    item_result,
    tool_result,
)

TEXTS = st.text(max_size=200)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
WORDS = st.sampled_from(["type", "role", "content", "text", "tool", "function", "name", "id"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, st.text() | st.integers() | st.lists(st.booleans()), max_size=3)
BODIES: dict[Any, dict[str, Any]] = {
    chat_completions: {
        "messages": [HELLO, CHAT_TURN, RESULT, HELLO | {"content": [{"type": "text", "text": ""}]}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
    },
    anthropic_messages: {
        "messages": [HELLO, BLOCK_TURN, {"role": "user", "content": [tool_result("found")]}],
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "tools": [BLOCK_TOOL],
        "tool_choice": {"type": "tool", "name": "search"},
    },
    responses: {
        "input": [HELLO, *ITEM_TURN, item_result("found")],
        "tools": [{"type": "function", **SEARCH}],
        "include": ["x"],
        "text": {"format": {"type": "text"}},
    },
}
PROTOCOLS = pytest.mark.parametrize("protocol", BODIES, ids=lambda each: each.__name__[19:])


@st.composite
def replies(draw: st.DrawFn) -> ModelReply:
    calls = tuple(
        ReplyCall(id=f"call_{n}", name=f"tool_{n}", arguments=json.dumps(arguments))
        for n, arguments in enumerate(draw(st.lists(OBJECTS, max_size=3)))
    )
    tokens = [TokenLogprob(text=each, raw=each.encode(), logprob=-1.0) for each in "ab" * 20]
    finishes: list[Finish] = ["length", "tool_calls" if calls else "stop"]
    return replace(
        LONG,
        content=draw(TEXTS),
        reasoning=draw(TEXTS),
        calls=calls,
        finish=draw(st.sampled_from(finishes)),
        logprobs=draw(st.none() | st.just(tuple(tokens))),
    )


LONG = ModelReply(
    id="1",
    created=1,
    model="p",
    content="x" * 500,
    reasoning="",
    calls=(),
    finish="stop",
    stop_text=None,
    prompt_tokens=3,
    completion_tokens=4,
    logprobs=None,
)


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """`value`, in which some value is another one, or has one more field."""
    if not value or not isinstance(value, (dict, list)) or draw(st.integers(0, 5)) == 0:
        return draw(JSON)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    changed[key] = draw(damaged(value[key]))
    if isinstance(changed, dict) and draw(st.booleans()):
        changed[draw(TEXTS)] = draw(JSON)
    return changed


@PROTOCOLS
@given(data=st.data())
def test_a_body_of_any_kind_is_read_or_refused(protocol: Any, data: st.DataObject):
    body = data.draw(JSON | damaged({"model": "p"} | BODIES[protocol]))
    try:
        request = protocol.parse(body)
    except WireError as error:
        json.dumps(protocol.error_body(error)).encode()
        assert error.status == 400 and len(error.message) < 400
        error.message.encode()
    else:
        json.dumps(request.messages, ensure_ascii=False, allow_nan=False).encode()
        json.dumps(request.tools, ensure_ascii=False, allow_nan=False).encode()
        assert list(request.ignored) == sorted({*request.ignored})
        "".join([request.model, *request.stop, *request.ignored]).encode()


def test_a_body_without_damage_is_read():
    for protocol, body in BODIES.items():
        assert len(protocol.parse({"model": "p"} | body).messages) >= 3


def events_of(protocol: Any, reply: ModelReply) -> list[dict[str, Any]]:
    frames = list(protocol.reply_events(reply, True))
    if protocol is chat_completions:
        assert frames.pop() == "data: [DONE]\n\n"
    for frame in frames:
        assert frame.isascii() and frame.endswith("\n\n") and frame.count("\n\n") == 1
    return [json.loads(frame.partition("data: ")[2]) for frame in frames]


def streamed_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole body, from the chunks."""
    message: dict[str, Any] = {"refusal": None}
    logprobs: list[Any] = []
    choice: dict[str, Any] = {}
    for event in events[:-1]:
        (choice,) = event["choices"]
        delta = choice.pop("delta")
        for call in delta.pop("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call.pop("index") == len(calls)
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for key, value in delta.items():
            message[key] = message[key] + value if key in message else value
        logprobs += (choice["logprobs"] or {"content": []})["content"]
    choice = choice | {"message": message, "logprobs": None}
    if logprobs:
        choice["logprobs"] = {"content": logprobs, "refusal": None}
    kind = {"object": "chat.completion"}
    return events[0] | kind | {"choices": [choice], "usage": events[-1]["usage"]}


def streamed_blocks(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole body, from the events."""
    message = events[0]["message"]
    for event in events[1:]:
        kind = event["type"].removeprefix("content_block_")
        blocks = message["content"]
        if kind == "start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"input": ""})
        elif kind == "delta":
            _, (key, piece) = event["delta"].items()
            key = "input" if key == "partial_json" else key
            blocks[event["index"]][key] += piece
        elif kind == "stop":
            given = blocks[-1].pop("input")
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(given)
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return message


def streamed_items(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole body, whose output comes from the events before the last."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            output.append(event["item"])
        elif kind == "response.content_part.added":
            output[event["output_index"]]["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            output[event["output_index"]]["arguments"] += event["delta"]
        elif kind.endswith("_text.delta"):
            output[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "response.output_text.done":
            output[event["output_index"]]["content"][0]["logprobs"] = event["logprobs"]
        elif kind == "response.output_item.done":
            output[event["output_index"]]["status"] = event["item"]["status"]
            assert output[event["output_index"]] == event["item"]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    return events[-1]["response"] | {"output": output}


STREAMED = {
    chat_completions: streamed_chat,
    anthropic_messages: streamed_blocks,
    responses: streamed_items,
}


@PROTOCOLS
@given(reply=replies())
def test_the_events_of_a_stream_add_up_to_the_body(protocol: Any, reply: ModelReply):
    body = json.loads(json.dumps(protocol.reply_body(reply)))
    assert STREAMED[protocol](events_of(protocol, reply)) == body


@PROTOCOLS
@given(reply=replies())
def test_a_reply_that_comes_back_as_history_is_the_turn_that_the_policy_wrote(
    protocol: Any, reply: ModelReply
):
    body = protocol.reply_body(reply)
    if protocol is responses:
        history = {"input": [*body["output"], HELLO]}
    else:
        choice = body["choices"][0]["message"] if "choices" in body else body
        turn = {
            key: choice.get(key) for key in ("role", "content", "reasoning_content", "tool_calls")
        }
        history = {"messages": [turn, HELLO], "max_tokens": 1}
    request = protocol.parse({"model": "p", **history})
    turn, hello = request.messages
    calls = [
        (each["id"], each["function"]["name"], each["function"]["arguments"])
        for each in turn.get("tool_calls", ())
    ]
    assert calls == [(each.id, each.name, json.loads(each.arguments)) for each in reply.calls]
    assert (turn["content"], turn.get("reasoning_content", "")) == (reply.content, reply.reasoning)
    assert (hello, request.ignored) == (HELLO, ())


@pytest.mark.parametrize(
    ("status", "openai_type", "anthropic_type"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (529, "server_error", "overloaded_error"),
    ],
)
def test_an_error_has_the_type_of_its_protocol(status: int, openai_type: str, anthropic_type: str):
    error = WireError("m", status=status, code="c", param="p")
    inner = {"message": "m", "type": openai_type, "param": "p", "code": "c"}
    assert chat_completions.error_body(error) == responses.error_body(error) == {"error": inner}
    inner = {"type": anthropic_type, "message": "m"}
    assert anthropic_messages.error_body(error) == {"type": "error", "error": inner}


@pytest.mark.parametrize(
    ("finish", "stop_text", "expected"),
    [
        ("stop", None, ("stop", "end_turn", None, "completed")),
        ("stop", "END", ("stop", "stop_sequence", "END", "completed")),
        ("length", None, ("length", "max_tokens", None, "incomplete")),
        ("tool_calls", None, ("tool_calls", "tool_use", None, "completed")),
    ],
)
def test_each_protocol_says_why_the_reply_ended(
    finish: Finish, stop_text: str | None, expected: tuple[str | None, ...]
):
    reply = replace(LONG, finish=finish, stop_text=stop_text)
    chat, blocks, items = (protocol.reply_body(reply) for protocol in BODIES)
    found = (blocks["stop_reason"], blocks["stop_sequence"], items["status"])
    assert (chat["choices"][0]["finish_reason"], *found) == expected
    assert items["output"][-1]["status"] == items["status"]


@PROTOCOLS
def test_a_long_text_streams_in_several_events(protocol: Any):
    deltas = [event for event in events_of(protocol, LONG) if "xxx" in json.dumps(event)]
    assert len(deltas) > 5
