"""The agent of the benchmark of agent loops that runs behind the gateway: it calls a tool until the
policy answers without a call. Its HTTP client is as light as one can be."""

from typing import Any

import aiohttp

_clients: list[aiohttp.ClientSession] = []
"""One for all sessions of an event loop."""


async def solve(address: Any, row: dict[str, Any]) -> str:
    from benchmarks.agent_loop import SCHEMA, run_code

    if not _clients or _clients[0].closed:
        _clients[:] = [aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))]
    messages: list[dict[str, Any]] = list(row["prompt"])
    while True:
        body = {"model": "policy", "messages": messages, "tools": [SCHEMA]}
        async with _clients[0].post(f"{address.openai}/chat/completions", json=body) as answer:
            message = (await answer.json())["choices"][0]["message"]
        if not message.get("tool_calls"):
            return message["content"]
        messages.append(message)
        for call in message["tool_calls"]:
            result = {"role": "tool", "tool_call_id": call["id"], "content": await run_code("")}
            messages.append(result)
