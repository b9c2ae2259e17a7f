"""OpenAI's responses: POST /v1/responses.

Source: https://platform.openai.com/docs/api-reference/responses. The gateway keeps no conversation:
each request holds its whole input.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import field

from agent_loop.gateway.chat_form import (
    Content,
    Function,
    MaxTokens,
    Messages,
    Name,
    OpenAIAsked,
    Output,
    Part,
    Tools,
    assistant_message,
    call_of,
    model_request,
    texts_of,
    tool_message,
)
from agent_loop.gateway.forms import Form, read
from agent_loop.gateway.wire import ModelReply, ModelRequest, event_frame, openai_error_body, pieces

_KEPT = "the gateway keeps no conversations; send the whole input"

error_body = openai_error_body


class _Item(Form):
    skipped = ("id", "status")


class _Message(_Item, tag_field="type", tag="message"):
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class _Result(_Item, tag_field="type", tag="function_call_output", kw_only=True):
    call_id: str
    output: Content | None = None


class _Call(_Item, tag_field="type", tag="function_call", kw_only=True):
    call_id: str
    name: Name
    arguments: str | None = None


class _Reasoning(_Item, tag_field="type", tag="reasoning", kw_only=True):
    summary: list[Part] | None = None
    content: list[Part] | None = None


class _Tool(Function, kw_only=True):
    type: Literal["function"]


class _Asked(OpenAIAsked, kw_only=True):
    input: str | Messages[_Message | _Result | _Call | _Reasoning]
    tools: Tools[_Tool] | None = None
    instructions: str | None = None
    text: Output | None = None
    max_tokens: MaxTokens | None = field(name="max_output_tokens", default=None)

    refused = OpenAIAsked.refused | dict.fromkeys(
        ("previous_response_id", "conversation", "prompt"), _KEPT
    )


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    asked, ignored = read(_with_types(body), _Asked)
    messages = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += _messages(asked.input)
    return model_request(
        asked,
        messages=messages,
        tools=asked.tools or (),
        parameters_at="parameters",
        ignored=ignored,
        choice=asked.tool_choice,
        answer=asked.text and asked.text.format,
        answer_at="text.format",
        parallel_tool_calls=asked.parallel_tool_calls,
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


def _with_types(body: Any) -> Any:
    """The body, whose items have their types: a message may leave it out."""
    if not isinstance(body, dict) or not isinstance(body.get("input"), list):
        return body
    typed = [
        {**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item
        for item in body["input"]
    ]
    return {**body, "input": typed}


def _messages(items: list[_Message | _Result | _Call | _Reasoning]) -> list[dict[str, Any]]:
    """The input as messages.

    The items of one turn of the policy become one assistant message. A turn is an optional
    reasoning item, then an optional message, then calls.
    """
    messages, turn = list[dict[str, Any]](), None
    for item in items:
        if isinstance(item, _Result):
            messages.append(tool_message(item.call_id, "\n".join(texts_of(item.output))))
            turn = None
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            messages.append({"role": role, "content": "\n".join(texts_of(item.content))})
            turn = None
        else:
            if turn is None or (not isinstance(item, _Call) and (turn[0] or turn[2])):
                messages.append({})  # its place
                turn = list[str](), list[str](), list[dict[str, Any]]()
            texts, thoughts, calls = turn
            if isinstance(item, _Call):
                calls.append(call_of(item.call_id, item.name, item.arguments))
            elif isinstance(item, _Message):
                texts.append("\n".join(texts_of(item.content)))
            else:
                thoughts += texts_of(item.content) or texts_of(item.summary)
            messages[-1] = assistant_message(texts, thoughts, calls)
    return messages


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
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
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
    kind, place = f"response.{part['type']}", {"content_index": 0}
    logprobs = {"logprobs": []} if part["type"] == "output_text" else {}
    yield place | {"type": "response.content_part.added", "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield place | {"type": f"{kind}.delta", "delta": piece} | logprobs
    yield place | {"type": f"{kind}.done", "text": part["text"]} | logprobs
    yield place | {"type": "response.content_part.done", "part": part}
