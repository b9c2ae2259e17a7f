"""OpenAI's chat completions: POST /v1/chat/completions.

Source: https://platform.openai.com/docs/api-reference/chat. `reasoning_content` is not OpenAI's:
servers of open models have it. An assistant message sends the policy's reasoning back in it.
"""

from collections.abc import Iterator
from itertools import islice
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
from agent_loop.gateway.replies import data_frame, logprob_entries, openai_error_body, pieces
from agent_loop.gateway.wire import ModelReply, ModelRequest, TokenLogprob

_PARTS = {"text": "text", "refusal": "refusal"}
_DEPRECATED = {"functions": "send `tools`", "function_call": "send `tool_choice`"}
_LOGPROBS_OF_CHUNK = 32
"""Clients that read by lines allow 64 KiB for one: a frame with all tokens could be longer."""

error_body = openai_error_body


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    fields = Fields(body)
    if (count := fields.integer("n")) not in (None, 1):
        raise unsupported("n", count, "a request gets one choice; send several requests")
    check_top_logprobs(fields)
    for name, advice in _DEPRECATED.items():
        fields.refuse(name, f"deprecated by OpenAI; {advice}")
    stream_options = fields.object("stream_options")
    most = [fields.integer(n, 1, MOST_TOKENS) for n in ("max_completion_tokens", "max_tokens")]
    return model_request(
        fields,
        messages=fields.needed_each("messages", _message),
        tools=fields.each("tools", _tool),
        choice=openai_tool_choice(fields),
        answer_schema=answer_schema(fields.object("response_format")),
        parallel_tool_calls=fields.flag("parallel_tool_calls") is not False,
        max_tokens=most[0] or most[1],
        stop="stop",
        logprobs=bool(fields.flag("logprobs")),
        include_usage=bool(stream_options and stream_options.flag("include_usage")),
    )


def reply_body(reply: ModelReply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content if reply.has_text else None,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(each.id, each.name, each.arguments) for each in reply.calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if reply.logprobs is None else _logprobs(reply.logprobs),
        "finish_reason": reply.finish,
    }
    return _head(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def reply_events(reply: ModelReply, include_usage: bool) -> Iterator[str]:
    """The reply as server-sent events, each a whole frame."""
    head = _head(reply, "chat.completion.chunk") | ({"usage": None} if include_usage else {})
    for delta in _deltas(reply):
        yield data_frame(head | {"choices": [_chunk(delta)]})
    # The tokens of reasoning and of calls are among them: they belong to no delta of text.
    tokens = iter(reply.logprobs or ())
    while some := tuple(islice(tokens, _LOGPROBS_OF_CHUNK)):
        yield data_frame(head | {"choices": [_chunk({}) | {"logprobs": _logprobs(some)}]})
    yield data_frame(head | {"choices": [_chunk({}) | {"finish_reason": reply.finish}]})
    if include_usage:
        yield data_frame(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.needed_text("role")
    if role in ("system", "developer", "user"):
        fields.require("content")
        texts = content_texts(fields, "content", _PARTS)
        role = "system" if role == "developer" else role
        return {"role": role, "content": "\n".join(texts)}
    if role == "tool":
        call_id, name = fields.needed_text("tool_call_id"), fields.text("name")
        message = tool_message(call_id, "\n".join(content_texts(fields, "content", _PARTS)))
        return message | ({"name": name} if name else {})
    if role == "function":
        raise unsupported(fields.at("role"), role, "deprecated by OpenAI; send role 'tool'")
    if role != "assistant":
        rule = "must be system, developer, user, assistant or tool"
        raise wrong(fields.at("role"), role, rule)
    return _assistant_message(fields)


def _assistant_message(fields: Fields) -> dict[str, Any]:
    fields.refuse("function_call", "deprecated by OpenAI; send `tool_calls`")
    fields.skip("annotations")
    turn = AssistantTurn(texts=content_texts(fields, "content", _PARTS))
    turn.texts.extend(filter(None, [fields.text("refusal")]))
    thoughts = [fields.text("reasoning_content"), fields.text("reasoning")]
    turn.thoughts.extend([each for each in thoughts if each][:1])  # two names of one text
    for call in fields.objects("tool_calls"):
        function = _function(call)
        arguments = function.text("arguments")
        turn.add_call(call.needed_text("id"), function.needed_name(), arguments)
    return turn.message()


def _tool(fields: Fields) -> tuple[dict[str, Any], bool]:
    return function_tool(_function(fields), "parameters")


def _function(fields: Fields) -> Fields:
    """The function of a tool or of a call."""
    if (kind := fields.text("type") or "function") != "function":
        raise unsupported(fields.at("type"), kind, NO_FUNCTION)
    fields.skip("index")
    return fields.needed_object("function")


def _deltas(reply: ModelReply) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "" if reply.has_text else None}
    for piece in pieces(reply.reasoning):
        yield {"reasoning_content": piece}
    for piece in pieces(reply.content):
        yield {"content": piece}
    for index, call in enumerate(reply.calls):
        yield {"tool_calls": [{"index": index} | _call(call.id, call.name, "")]}
        for piece in pieces(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _head(reply: ModelReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
    }


def _chunk(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"content": logprob_entries(logprobs), "refusal": None}


def _usage(reply: ModelReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
