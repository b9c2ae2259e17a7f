"""A server of the three protocols whose replies are written in the requests.

The last message of a request is JSON text: fields of a `ModelReply`, or `error`, the arguments of a
`WireError`. `echo` makes the request as it was parsed the reply's text.
"""

import json
from dataclasses import asdict
from typing import Any

from aiohttp import web

from agent_loop.gateway import anthropic_messages, chat_completions, responses
from agent_loop.gateway.wire import (
    Finish,
    ModelReply,
    ModelRequest,
    ReplyCall,
    TokenLogprob,
    WireError,
)

PROTOCOLS: dict[str, Any] = {
    "/v1/chat/completions": chat_completions,
    "/v1/messages": anthropic_messages,
    "/v1/responses": responses,
}


def scripted_reply(request: ModelRequest) -> ModelReply:
    """The reply that the last message asks for."""
    script: dict[str, Any] = json.loads(request.messages[-1]["content"])
    if "error" in script:
        raise WireError(**script["error"])
    if "echo" in script:
        script = {"content": json.dumps(asdict(request))}
    calls = tuple(
        ReplyCall(id=f"call_{n}", name=name, arguments=json.dumps(arguments))
        for n, (name, arguments) in enumerate(script.get("calls", ()))
    )
    by_calls: Finish = "tool_calls" if calls else "stop"
    tokens = [(each, each.encode(), -0.5) for each in script.get("content", "").split()]
    return ModelReply(
        id="1",
        created=1,
        model=request.model,
        content=script.get("content", ""),
        reasoning=script.get("reasoning", ""),
        calls=calls,
        finish=script.get("finish", by_calls),
        stop_text=script.get("stop_text"),
        prompt_tokens=len(request.messages),
        completion_tokens=7,
        logprobs=tuple(TokenLogprob(text=t, raw=r, logprob=p) for t, r, p in tokens)
        if request.logprobs
        else None,
    )


async def _answer(request: web.Request) -> web.Response:
    protocol = PROTOCOLS[request.path]
    try:
        parsed = protocol.parse(await request.json())
        reply = scripted_reply(parsed)
    except WireError as error:
        # Stock clients repeat a request after an error of some kinds; a check needs one answer.
        headers = {"x-should-retry": "false"}
        body = protocol.error_body(error)
        return web.json_response(body, status=error.status, headers=headers)
    if not parsed.stream:
        return web.json_response(protocol.reply_body(reply))
    text = "".join(protocol.reply_events(reply, parsed.include_usage))
    return web.Response(text=text, content_type="text/event-stream")


async def _count(request: web.Request) -> web.Response:
    parsed = anthropic_messages.parse_count(await request.json())
    return web.json_response({"input_tokens": len(parsed.messages)})


def scripted_gateway() -> web.AppRunner:
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post(path, _answer) for path in PROTOCOLS])
    app.add_routes([web.post("/v1/messages/count_tokens", _count)])
    return web.AppRunner(app)
