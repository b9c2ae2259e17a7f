"""OpenAI's responses: POST /v1/responses.

Source: https://platform.openai.com/docs/api-reference/responses. The gateway keeps no conversation:
each request holds its whole input.
"""

from collections.abc import Iterator
from typing import Any

from agent_loop.gateway.chat_form import (
    NO_FUNCTION,
    AssistantTurn,
    answer_schema,
    check_top_logprobs,
    content_texts,
    function_tool,
    model_request,
    openai_tool_choice,
    tool_message,
)
from agent_loop.gateway.fields import MOST_TOKENS, Fields, unsupported, wrong
from agent_loop.gateway.replies import event_frame, logprob_entries, openai_error_body, pieces
from agent_loop.gateway.wire import ModelReply, ModelRequest

_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_KEPT = "the gateway keeps no conversations; send the whole input"
_LOGPROBS = "message.output_text.logprobs"

error_body = openai_error_body


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    fields = Fields(body)
    for name in ("previous_response_id", "conversation", "prompt"):
        fields.refuse(name, _KEPT)
    check_top_logprobs(fields)
    include = fields.texts("include")
    if set(include) - {_LOGPROBS}:
        fields.ignore("include")
    output = fields.object("text")
    instructions = fields.text("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    return model_request(
        fields,
        messages=messages + _messages(fields),
        tools=fields.each("tools", _tool),
        choice=openai_tool_choice(fields),
        answer_schema=answer_schema(output and output.object("format")),
        parallel_tool_calls=fields.flag("parallel_tool_calls") is not False,
        max_tokens=fields.integer("max_output_tokens", 1, MOST_TOKENS),
        stop="stop",
        logprobs=_LOGPROBS in include,
    )


def reply_body(reply: ModelReply) -> dict[str, Any]:
    is_cut = reply.finish == "length"
    return _head(reply) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def reply_events(reply: ModelReply, include_usage: bool) -> Iterator[str]:
    """The reply as server-sent events, each a whole frame. They always have the usage."""
    for number, event in enumerate(_events(reply)):
        yield event_frame(event | {"sequence_number": number})


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The input as messages.

    The items of one turn of the policy become one assistant message. A turn is an optional
    reasoning item, then an optional message, then calls.
    """
    if fields.is_text("input"):
        return [{"role": "user", "content": fields.needed_text("input")}]
    messages: list[dict[str, Any] | AssistantTurn] = []
    turn: AssistantTurn | None = None
    for item in fields.needed_objects("input"):
        item.skip("id", "status")
        kind = item.text("type") or "message"
        role = item.needed_text("role") if kind == "message" else "assistant"
        if kind == "function_call_output" or role != "assistant":
            messages.append(_other_message(item, kind, role))
            turn = None
            continue
        if turn is None or (kind != "function_call" and (turn.texts or turn.calls)):
            messages.append(turn := AssistantTurn())
        _add_item(turn, item, kind)
    return [each.message() if isinstance(each, AssistantTurn) else each for each in messages]


def _other_message(item: Fields, kind: str, role: str) -> dict[str, Any]:
    """The message of an item that the policy did not write."""
    if kind == "function_call_output":
        texts = content_texts(item, "output", _PARTS)
        return tool_message(item.needed_text("call_id"), "\n".join(texts))
    if role not in ("user", "system", "developer"):
        raise wrong(item.at("role"), role, "must be user, assistant, system or developer")
    item.require("content")
    texts = content_texts(item, "content", _PARTS)
    return {"role": "user" if role == "user" else "system", "content": "\n".join(texts)}


def _add_item(turn: AssistantTurn, item: Fields, kind: str) -> None:
    if kind == "message":
        turn.texts.append("\n".join(content_texts(item, "content", _PARTS)))
    elif kind == "function_call":
        call_id, name = item.needed_text("call_id"), item.needed_name()
        turn.add_call(call_id, name, item.text("arguments"))
    elif kind == "reasoning":
        summary = content_texts(item, "summary", {"summary_text": "text"})
        turn.thoughts.extend(content_texts(item, "content", {"reasoning_text": "text"}) or summary)
    elif kind == "item_reference":
        raise unsupported(item.place, kind, _KEPT)
    else:
        raise unsupported(item.place, kind, "must be a message, a reasoning or a function call")


def _tool(fields: Fields) -> tuple[dict[str, Any], bool]:
    if (kind := fields.needed_text("type")) != "function":
        raise unsupported(fields.at("type"), kind, NO_FUNCTION)
    return function_tool(fields, "parameters")


def _head(reply: ModelReply) -> dict[str, Any]:
    """A response that has begun. Clients need the request's settings; those that none reads have
    their defaults."""
    form: dict[str, Any] = {"type": "text"}
    if reply.answer_schema is not None:
        form = {"type": "json_schema", "name": "answer", "schema": reply.answer_schema}
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "store": False,
        "text": {"format": form},
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _items(reply: ModelReply) -> list[dict[str, Any]]:
    """The items of the output."""
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        item = {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": content}
        items.append(item)
    if reply.has_text:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        part["logprobs"] = logprob_entries(reply.logprobs or ())
        item = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "content": [part]}
        items.append(item)
    for index, call in enumerate(reply.calls):
        item = {"id": f"fc_{reply.id}_{index}", "type": "function_call", "call_id": call.id}
        items.append(item | {"name": call.name, "arguments": call.arguments})
    for item in items:
        item["status"] = "completed"
    if items and reply.finish == "length":
        items[-1]["status"] = "incomplete"
    return items


def _events(reply: ModelReply) -> Iterator[dict[str, Any]]:
    """The events without their sequence numbers."""
    yield {"type": "response.created", "response": _head(reply)}
    yield {"type": "response.in_progress", "response": _head(reply)}
    body = reply_body(reply)
    for index, item in enumerate(body["output"]):
        is_call = item["type"] == "function_call"
        empty = {"arguments": ""} if is_call else {"content": []}
        added = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        place = {"item_id": item["id"], "output_index": index}
        for event in _call_events(item) if is_call else _part_events(item["content"][0]):
            yield event | place
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _call_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = "response.function_call_arguments"
    for piece in pieces(item["arguments"]):
        yield {"type": f"{kind}.delta", "delta": piece}
    yield {"type": f"{kind}.done", "name": item["name"], "arguments": item["arguments"]}


def _part_events(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a message's text, or of the text of its reasoning."""
    is_text = part["type"] == "output_text"
    kind = f"response.{part['type']}"
    empty = {"text": "", "logprobs": []} if is_text else {"text": ""}
    no_logprobs = {"logprobs": []} if is_text else {}
    place = {"content_index": 0}
    yield place | {"type": "response.content_part.added", "part": part | empty}
    for piece in pieces(part["text"]):
        yield place | {"type": f"{kind}.delta", "delta": piece} | no_logprobs
    logprobs = {"logprobs": part["logprobs"]} if is_text else {}
    yield place | {"type": f"{kind}.done", "text": part["text"]} | logprobs
    yield place | {"type": "response.content_part.done", "part": part}
