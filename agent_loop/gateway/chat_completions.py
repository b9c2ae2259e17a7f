"""OpenAI's chat completions: POST /v1/chat/completions.

Source: https://platform.openai.com/docs/api-reference/chat. `reasoning_content` is not OpenAI's:
servers of open models have it. An assistant message sends the policy's reasoning back in it.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Literal

from agent_loop.gateway.chat_form import (
    AnswerForm,
    Content,
    Function,
    MaxTokens,
    Messages,
    Name,
    OpenAIAsked,
    Tools,
    assistant_message,
    call_of,
    model_request,
    texts_of,
    tool_message,
)
from agent_loop.gateway.forms import Form, read, unsupported
from agent_loop.gateway.wire import (
    ModelReply,
    ModelRequest,
    TokenLogprob,
    data_frame,
    openai_error_body,
    pieces,
)

_LOGPROBS_OF_CHUNK = 32
"""Clients that read by lines allow 64 KiB for one: a frame with all tokens could be longer."""

error_body = openai_error_body


class _System(Form, tag_field="role", tag="system"):
    content: Content


class _Developer(_System, tag="developer"):
    pass


class _User(_System, tag="user"):
    pass


class _Result(Form, tag_field="role", tag="tool", kw_only=True):
    tool_call_id: str
    name: str | None = None
    content: Content | None = None


class _Called(Form, kw_only=True):
    name: Name
    arguments: str | None = None


class _Call(Form, kw_only=True):
    id: str
    type: Literal["function"] | None = None
    function: _Called

    skipped = ("index",)


class _Assistant(Form, tag_field="role", tag="assistant", kw_only=True):
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    skipped = ("annotations",)
    refused: ClassVar = {"function_call": "deprecated by OpenAI; send `tool_calls`"}


class _Tool(Form, kw_only=True):
    type: Literal["function"] | None = None
    function: Function


class _StreamOptions(Form):
    include_usage: bool | None = None


class _Asked(OpenAIAsked, kw_only=True):
    messages: Messages[_System | _Developer | _User | _Assistant | _Result]
    tools: Tools[_Tool] | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: AnswerForm | None = None
    max_completion_tokens: MaxTokens | None = None
    stream_options: _StreamOptions | None = None

    refused = OpenAIAsked.refused | {
        "functions": "deprecated by OpenAI; send `tools`",
        "function_call": "deprecated by OpenAI; send `tool_choice`",
    }


def parse(body: object) -> ModelRequest:
    """The request in a JSON body.

    Raises:
        WireError: the body breaks the protocol, or asks for something that is not served.
    """
    asked, ignored = read(body, _Asked)
    if asked.n not in (None, 1):
        raise unsupported("n", "a request gets one choice; send several requests")
    if asked.max_completion_tokens is not None:
        asked.max_tokens = asked.max_completion_tokens
    return model_request(
        asked,
        messages=[_message(each) for each in asked.messages],
        tools=[each.function for each in asked.tools or ()],
        parameters_at="function.parameters",
        ignored=ignored,
        choice=asked.tool_choice,
        answer=asked.response_format,
        answer_at="response_format",
        parallel_tool_calls=asked.parallel_tool_calls,
        logprobs=bool(asked.logprobs),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
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


def _message(form: _System | _Assistant | _Result) -> dict[str, Any]:
    texts = texts_of(form.content)
    if isinstance(form, _Result):
        message = tool_message(form.tool_call_id, "\n".join(texts))
        return message | ({"name": form.name} if form.name else {})
    if isinstance(form, _System):
        role = "user" if isinstance(form, _User) else "system"
        return {"role": role, "content": "\n".join(texts)}
    thoughts = filter(None, [form.reasoning_content or form.reasoning])  # two names of one text
    calls = [
        call_of(each.id, each.function.name, each.function.arguments)
        for each in form.tool_calls or ()
    ]
    return assistant_message([*texts, *filter(None, [form.refusal])], thoughts, calls)


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
    content = [
        {"token": each.text, "logprob": each.logprob, "bytes": list(each.raw), "top_logprobs": []}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _usage(reply: ModelReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
