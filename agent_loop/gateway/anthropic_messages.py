"""Anthropic's messages: POST /v1/messages, and /v1/messages/count_tokens.

Source: https://platform.claude.com/docs/en/api/messages. A thinking block of ours has an empty
signature, because nothing here verifies one.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import field

from agent_loop.gateway.chat_form import (
    AnswerForm,
    Asked,
    Function,
    Messages,
    Name,
    OpenAIChoice,
    Output,
    Stops,
    Text,
    Tools,
    assistant_message,
    call_of,
    model_request,
    texts_of,
    tool_message,
)
from agent_loop.gateway.forms import Form, check_depth, read, wrong
from agent_loop.gateway.wire import ModelReply, ModelRequest, WireError, event_frame, pieces

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
"""Type of a block -> its field that streams; type of the deltas, and their field."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class _Thinking(Form, tag_field="type", tag="thinking"):
    text: str = field(name="thinking")

    skipped = ("signature",)


class _Redacted(Form, tag_field="type", tag="redacted_thinking"):
    pass


class _ToolUse(Form, tag_field="type", tag="tool_use", kw_only=True):
    id: str
    name: Name
    input: dict[str, Any] | None = None


class _Result(Form, tag_field="type", tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool | None = None


class _System(Form, tag_field="role", tag="system"):
    content: str | list[Text]


class _User(Form, tag_field="role", tag="user"):
    content: str | list[Text | _Result]


class _Assistant(Form, tag_field="role", tag="assistant"):
    content: str | list[Text | _Thinking | _Redacted | _ToolUse]


class _Choice(Form, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Tool(Function, kw_only=True):
    type: Literal["custom"] | None = None
    parameters: dict[str, Any] | None = field(name="input_schema", default=None)


class _Asked(Asked, kw_only=True):
    messages: Messages[_System | _User | _Assistant]
    tools: Tools[_Tool] | None = None
    system: str | list[Text] | None = None
    tool_choice: _Choice | None = None
    output_config: Output | None = None
    output_format: AnswerForm | None = None  # the beta's name
    stop: Stops = field(name="stop_sequences", default=None)


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    request = parse_count(body)
    if request.max_tokens is None:
        raise wrong("max_tokens", "is required")
    return request


def parse_count(body: object) -> ModelRequest:
    """As `parse`, for a request that asks how many tokens its prompt has and for no reply.

    It needs no `max_tokens` and may end with an assistant message.
    """
    asked, ignored = read(body, _Asked)
    system = "\n\n".join(texts_of(asked.system))
    messages = [{"role": "system", "content": system}] if asked.system else []
    for number, each in enumerate(asked.messages):
        messages += _messages(each, f"messages[{number}]")
    choice, form = asked.tool_choice, asked.output_config and asked.output_config.format
    named = choice is not None and choice.type == "tool"
    return model_request(
        asked,
        messages=messages,
        tools=asked.tools or (),
        parameters_at="input_schema",
        ignored=ignored,
        choice=OpenAIChoice(type="function", name=choice.name)
        if named and choice
        else (choice and _CHOICES[choice.type]),
        answer=form or asked.output_format,
        answer_at="output_config.format" if form else "output_format",
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
    )


def reply_body(reply: ModelReply) -> dict[str, Any]:
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    return _head(reply) | {"content": list(_blocks(reply)), "usage": usage} | _stop(reply)


def reply_events(reply: ModelReply, include_usage: bool) -> Iterator[str]:
    """The reply as server-sent events, each a whole frame. They always have the usage."""
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    none_yet = {"content": [], "usage": usage, "stop_reason": None, "stop_sequence": None}
    yield event_frame({"type": "message_start", "message": _head(reply) | none_yet})
    for index, block in enumerate(_blocks(reply)):
        for event in _block_events(block):
            yield event_frame(event | {"index": index})
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    yield event_frame({"type": "message_delta", "delta": _stop(reply), "usage": usage})
    yield event_frame({"type": "message_stop"})


def error_body(error: WireError) -> dict[str, Any]:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _messages(form: _System | _User | _Assistant, place: str) -> list[dict[str, Any]]:
    """The messages of chat templates for one of Anthropic's: a tool result is one of its own."""
    blocks = [Text(form.content)] if isinstance(form.content, str) else form.content
    texts = [each.text for each in blocks if isinstance(each, Text)]
    if isinstance(form, _System):
        return [{"role": "system", "content": "\n\n".join(texts)}]
    if isinstance(form, _User):
        messages = [_result(each) for each in blocks if isinstance(each, _Result)]
        if texts or not messages:
            messages.append({"role": "user", "content": "\n".join(texts)})
        return messages
    calls = list[dict[str, Any]]()
    for number, each in enumerate(blocks):
        if isinstance(each, _ToolUse):
            check_depth(each.input, f"{place}.content[{number}].input")
            calls.append(call_of(each.id, each.name, each.input))
    thoughts = [each.text for each in blocks if isinstance(each, _Thinking)]
    return [assistant_message(texts, thoughts, calls)]


def _result(form: _Result) -> dict[str, Any]:
    content = "\n".join(texts_of(form.content))
    if form.is_error and not content.lower().startswith("error"):
        content = f"error: {content}"
    return tool_message(form.tool_use_id, content)


def _head(reply: ModelReply) -> dict[str, Any]:
    kind = {"type": "message", "role": "assistant"}
    return {"id": f"msg_{reply.id}", **kind, "model": reply.model}


def _stop(reply: ModelReply) -> dict[str, Any]:
    reason = _STOP_REASONS[reply.finish]
    if reply.finish == "stop" and reply.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_text}


def _blocks(reply: ModelReply) -> Iterator[dict[str, Any]]:
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
    if reply.has_text:
        yield {"type": "text", "text": reply.content}
    for call in reply.calls:
        arguments = json.loads(call.arguments)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _block_events(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one block, without its index."""
    own, kind, field = _DELTAS[block["type"]]
    value = block[own]
    yield {"type": "content_block_start", "content_block": block | {own: type(value)()}}
    for piece in pieces(value if isinstance(value, str) else json.dumps(value)):
        yield {"type": "content_block_delta", "delta": {"type": kind, field: piece}}
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        yield {"type": "content_block_delta", "delta": signature}
    yield {"type": "content_block_stop"}
