"""An OpenAI-compatible endpoint on loopback, whose answers the caller gives one by one.

An environment that drives its agent itself asks this endpoint in place of a model. So the control
is turned round: `asked` waits for the environment's next request, and `reply` answers it. There is
one conversation: each request must continue the one before. Standard library and aiohttp only,
because it also runs in the interpreters of other environments.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from aiohttp import web

MAX_REQUEST_BYTES = 64 << 20


class PolicyEndpoint:
    """The endpoint of one episode."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """Bearer token of its requests."""

        self.url = ""
        """Base URL, with `/v1`; empty before `start`."""

        self.tools: list[dict[str, Any]] = []
        """Of the first request: JSON schemas of functions."""

        self._seen: list[dict[str, Any]] = []
        self._body: dict[str, Any] | None = None
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._problem = ""
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def asked(self, episode: "asyncio.Future[Any]") -> list[dict[str, str]] | None:
        """The messages of the next request that the model has not read; None if the episode ended
        without another request.

        Raises:
            ValueError: the request cannot be answered by one conversation of texts.
        """
        while self._body is None and not self._problem and not episode.done():
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait((news, episode), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        if self._problem:
            raise ValueError(self._problem)
        if self._body is None:
            return None
        messages = list(self._body["messages"])
        first = not self._seen
        new = messages if first else continuation(self._seen, messages)
        if first:
            self.tools = [dict(tool) for tool in self._body.get("tools") or ()]
        self._seen = messages
        return [{"role": each["role"], "content": text_of(each)} for each in new]

    def reply(self, action: Any) -> None:
        """Answer the request: a text, or a tool call `{name, arguments}`."""
        assert self._reply is not None, "a reply without a request"
        message = assistant_message(action)
        self._seen = [*self._seen, message]
        self._body = None
        if not self._reply.done():  # the environment may have given the request up
            self._reply.set_result(message)

    async def _complete(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            return _error(401, "wrong or no key")
        body = await request.json()
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return _error(400, "want a chat completion with messages")
        if body.get("stream"):
            return self._refused("the environment asks for a stream, and gets whole messages only")
        if self._body is not None:
            return self._refused(
                "the environment asks for two messages at once; a trajectory is one conversation"
            )
        self._reply = asyncio.get_running_loop().create_future()
        self._body = body
        self._news.set()
        message = await self._reply
        return web.json_response(
            {
                "id": f"chatcmpl-{uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": str(body.get("model")),
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
                    }
                ],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )

    def _refused(self, problem: str) -> web.Response:
        self._problem = problem
        self._news.set()
        return _error(400, problem)


def continuation(
    seen: Sequence[Mapping[str, Any]], messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What a request says after the messages that were seen before.

    Raises:
        ValueError: it is another conversation, or it says nothing more.
    """
    before, new = messages[: len(seen)], list(messages[len(seen) :])
    if list(map(_essence, before)) != list(map(_essence, seen)):
        raise ValueError(
            "the environment began another conversation, or changed what was said before; a "
            "trajectory is one conversation"
        )
    if not new or any(each.get("role") == "assistant" for each in new):
        raise ValueError("the environment asked again without an answer of its own")
    return new


def assistant_message(action: Any) -> dict[str, Any]:
    """The model's message with this text, or with this tool call."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    function = {"name": action["name"], "arguments": json.dumps(action["arguments"])}
    call = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message.

    Raises:
        ValueError: it has a picture, or something else that is no text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
        raise ValueError("the environment sends a picture or a file; only texts are supported")
    return "".join(part["text"] for part in content)


def _essence(message: Mapping[str, Any]) -> tuple[Any, str, list[Any]]:
    """What must not change in a message that was seen before."""
    calls = [each.get("id") for each in message.get("tool_calls") or ()]
    return message.get("role"), text_of(message).strip(), calls


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": "policy"}}, status=status)
