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

import aiohttp
import msgspec

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import RequestFailed, Route, local_route
from agent_loop.calls.servers import Server
from agent_loop.calls.transport import MAX_ERROR_BYTES, redirect_target, unreadable
from agent_loop.rewards.judge_options import KEY_VARIABLE, TOOL, JudgeOptions, judge_key
from tool_server.wire.bounded_read import read_bounded
from tool_server.wire.protocol import ToolBackend, ToolCall, ToolError, ToolResult, ToolUnavailable
from tool_server.wire.responses import (
    dumps,
    max_answer_bytes,
    replace_surrogates,
    retry_after_s,
    text_of,
)


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
    options = reward.options
    base_url = options.url
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
    for server in route.servers.all:  # known before the first answer, for a shared cache
        server.origins[TOOL] = server.url_origin
    return tools.limits(route, options)


async def _post(tools: ToolClient, reward: Judge, call: ToolCall, server: Server) -> ToolResult:
    """Ask the judge once; an answer may be cached if its verdict can be read.

    Raises:
        RequestFailed: the judge is overloaded, broken or not reached.
        ToolUnavailable: the judge refuses the request or the key.
    """
    key = judge_key(os.environ)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = max_answer_bytes(TOOL)
    try:
        async with tools.session.post(
            f"{server.url}/chat/completions",
            data=dumps(call.payload["body"]),
            headers=headers,
            allow_redirects=False,
        ) as response:
            if response.status >= 300:
                raw = await read_bounded(response, MAX_ERROR_BYTES)
                raise _refusal(server, response, raw, call.payload["body"]["model"], key)
            if fault := unreadable(response):
                raise _fault(f"cannot read the answer of {server.url}: {fault}")
            raw = await read_bounded(response, limit)
            if len(raw) > limit:
                raise _fault(f"the answer of {server.url} has more than {limit >> 20} MiB")
            body = _body(raw)
    except aiohttp.ClientConnectorError as error:  # nothing was sent
        raise RequestFailed(f"{type(error).__name__}: {error}", was_executed=False) from error
    except (aiohttp.ClientError, ConnectionError, ValueError, RecursionError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    is_readable = reward.read(body, call.payload["code"]) is not None
    return ToolResult(body=body, tool=TOOL, origin=server.url_origin, cacheable=is_readable)


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


def _fault(message: str) -> ToolUnavailable:
    return ToolUnavailable(f"judge: {message}", tool=TOOL)


def _refusal(
    server: Server, response: aiohttp.ClientResponse, raw: bytes, model: str, key: str
) -> RequestFailed | ToolError:
    status, url = response.status, server.url
    if status in (401, 403):  # without its words, which may repeat the key
        return _fault(f"{url} answers HTTP {status}: is {KEY_VARIABLE} the key of this server?")
    if status < 400:
        return _fault(
            f"{url} redirects to {redirect_target(response)} (HTTP {status}), and redirects are "
            "not followed; set base_url to the final address"
        )
    words = replace_surrogates(text_of(raw, response.charset))
    words = (words.replace(key, "***") if key else words)[:300]
    if status in (408, 429) or status >= 500:
        return RequestFailed(
            f"HTTP {status} {words}",
            retry_after_s(response.headers),
            is_overload=status in (429, 503),
            blames_server=status != 429,
        )
    server.close_breaker()
    return _fault(
        f"{url} refuses the request for model={model!r} (HTTP {status}): {words}; correct "
        "reward_options, for example model, max_tokens, max_chars or body"
    )
