"""Anthropic's messages: POST /v1/messages, and /v1/messages/count_tokens.

Source: https://platform.claude.com/docs/en/api/messages. A thinking block of ours has an empty
signature, because nothing here verifies one.
"""

import json
from collections.abc import Iterator
from typing import Any

from agent_loop.gateway.chat_form import (
    NO_FUNCTION,
    TEXT_ONLY,
    AssistantTurn,
    answer_schema,
    content_texts,
    function_tool,
    model_request,
    tool_message,
)
from agent_loop.gateway.fields import MOST_TOKENS, Fields, unsupported, wrong
from agent_loop.gateway.replies import event_frame, pieces
from agent_loop.gateway.wire import ModelReply, ModelRequest, WireError

_TEXT = {"text": "text"}
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


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    request = parse_count(body)
    if request.max_tokens is None:
        raise wrong("max_tokens", None, f"must be an integer from 1 to {MOST_TOKENS}")
    if request.messages[-1]["role"] == "assistant":
        place = "messages"
        rule = "an assistant message cannot be continued (prefill); end with a user message"
        raise unsupported(place, request.messages, rule)
    return request


def parse_count(body: object) -> ModelRequest:
    """As `parse`, for a request that asks how many tokens its prompt has and for no reply.

    It needs no `max_tokens` and may end with an assistant message.
    """
    fields = Fields(body)
    system = content_texts(fields, "system", _TEXT)
    messages = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for each in fields.needed_each("messages", _messages):
        messages.extend(each)
    choice, output = fields.object("tool_choice"), fields.object("output_config")
    form = (output and output.object("format")) or fields.object("output_format")  # the beta's name
    return model_request(
        fields,
        messages=messages,
        tools=fields.each("tools", _tool),
        choice=_tool_choice(choice),
        answer_schema=answer_schema(form),
        parallel_tool_calls=not (choice and choice.flag("disable_parallel_tool_use")),
        max_tokens=fields.integer("max_tokens", 1, MOST_TOKENS),
        stop="stop_sequences",
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


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages of chat templates for one of Anthropic's: a tool result is one of its own."""
    role = fields.needed_text("role")
    fields.require("content")
    if role == "assistant":
        return [_assistant_message(fields)]
    if role == "system":
        texts = content_texts(fields, "content", _TEXT)
        return [{"role": "system", "content": "\n\n".join(texts)}]
    if role != "user":
        raise wrong(fields.at("role"), role, "must be user, assistant or system")
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    for kind, block in _content_blocks(fields):
        if kind == "text":
            texts.append(block.needed_text("text"))
        elif kind == "tool_result":
            results.append(_tool_result(block))
        else:
            raise unsupported(block.place, kind, TEXT_ONLY)
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant_message(fields: Fields) -> dict[str, Any]:
    turn = AssistantTurn()
    for kind, block in _content_blocks(fields):
        if kind == "text":
            block.skip("citations")
            turn.texts.append(block.needed_text("text"))
        elif kind == "thinking":
            block.skip("signature")
            turn.thoughts.append(block.needed_text("thinking"))
        elif kind == "redacted_thinking":
            block.ignore("redacted_thinking")
            block.skip("data")
        elif kind == "tool_use":
            arguments = block.json_object("input") or {}
            turn.add_call(block.needed_text("id"), block.needed_name(), arguments)
        else:
            raise unsupported(block.place, kind, TEXT_ONLY)
    return turn.message()


def _content_blocks(fields: Fields) -> Iterator[tuple[str, Fields]]:
    """The blocks of a message's content with their types."""
    if fields.is_text("content"):
        block = {"type": "text", "text": fields.take("content")}
        blocks = [Fields(block, fields.at("content"))]
    else:
        blocks = fields.objects("content")
    return ((block.needed_text("type"), block) for block in blocks)


def _tool_result(fields: Fields) -> dict[str, Any]:
    content = "\n".join(content_texts(fields, "content", _TEXT))
    if fields.flag("is_error") and not content.lower().startswith("error"):
        content = f"error: {content}"
    return tool_message(fields.needed_text("tool_use_id"), content)


def _tool(fields: Fields) -> tuple[dict[str, Any], bool]:
    if (kind := fields.text("type") or "custom") != "custom":
        raise unsupported(fields.at("type"), kind, NO_FUNCTION)
    return function_tool(fields, "input_schema")


def _tool_choice(choice: Fields | None) -> tuple[str, bool]:
    """The choice, and whether it is the name of a tool."""
    if choice is None:
        return "auto", False
    kind = choice.needed_text("type")
    if kind == "tool":
        return choice.needed_name(), True
    if kind not in _CHOICES:
        raise wrong("tool_choice.type", kind, "must be auto, any, tool or none")
    return _CHOICES[kind], False


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
