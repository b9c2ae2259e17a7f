"""Requests to a judge, by OpenAI's `POST /chat/completions`, on a route of the tool client.

So they pass limiter, slots, deadline, retries and cache. No request that fails is a verdict: a
refusal of the request (4xx) is a fault of the setup, for example a model that the server does not
have, because the policy does not write requests.
"""

import os
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route, local_route
from agent_loop.calls.servers import Server
from agent_loop.rewards.judge_options import KEY_VARIABLE, TOOL, JudgeOptions, judge_key
from tool_server.wire.http import Peer, post, unreadable
from tool_server.wire.protocol import ToolBackend, ToolCall, ToolResult
from tool_server.wire.responses import dumps, max_answer_bytes


class Judge(Protocol):
    """What a request needs of the reward."""

    @property
    def options(self) -> JudgeOptions: ...
    def read(self, body: Mapping[str, Any], code: str) -> object | None:
        """The verdict of an answer; None if it cannot be read."""
        ...


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Completion(msgspec.Struct):
    """The fields of a `ChatCompletion` that are read."""

    choices: list[_Choice]
    usage: _Usage | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def client_of(tools: ToolBackend, reward: Judge) -> ToolClient:
    """The client whose calls go to the judge."""
    assert isinstance(tools, ToolClient), "agent loops give rewards the tool client"
    return tools.on(tools.resource(reward, partial(_route, tools, reward)))


def _route(tools: ToolClient, reward: Judge) -> Route:
    options, base_url = reward.options, reward.options.url
    route = local_route(
        base_url,
        partial(_post, tools, reward),
        key=f"judge:{sha256(base_url.encode()).hexdigest()[:32]}",
        timeout_s=tools.route.timeout_s,
        clock=tools.clock,
        max_retries=tools.route.max_retries,
        caches=True,
        advice=f"is the judge up? ask {base_url}/models; its limits are in reward_options",
    )
    return tools.limits(route, options)


async def _post(tools: ToolClient, reward: Judge, call: ToolCall, server: Server) -> ToolResult:
    """Ask the judge once; an answer may be cached if its verdict can be read.

    Raises:
        ToolUnavailable: the judge refuses the request, or gives no answer.
    """
    body = call.payload["body"]
    peer = Peer(
        name=f"judge model={body['model']!r} at {server.url}",
        tool=TOOL,
        address_key="base_url",
        remedy=f"has this server the model, and is {KEY_VARIABLE} its key?",
        secret=judge_key(os.environ),
        refused="correct reward_options, for example model, max_tokens, max_chars or body",
    )
    raw, _ = await post(
        tools.session,
        f"{server.url}/chat/completions",
        dumps(body),
        peer,
        limit=max_answer_bytes(TOOL),
    )
    try:
        answer = _body(raw)
    except (ValueError, RecursionError) as error:
        raise unreadable(error, peer) from error
    is_readable = reward.read(answer, call.payload["code"]) is not None
    return ToolResult(body=answer, tool=TOOL, cacheable=is_readable)


def _body(raw: bytes) -> dict[str, Any]:
    """The message of the first choice, why it ended, and the tokens.

    Raises:
        ValueError: this is no `ChatCompletion`.
    """
    answer = _COMPLETION.decode(raw)
    if not answer.choices:
        raise ValueError("the answer has no choices")
    choice, usage = answer.choices[0], answer.usage or _Usage()
    return {
        "text": choice.message.content or "",
        "finish_reason": choice.finish_reason or "",
        "prompt_tokens": usage.prompt_tokens or 0,
        "completion_tokens": usage.completion_tokens or 0,
    }
