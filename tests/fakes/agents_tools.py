"""An agent for the gateway, as plain as one can be: it calls the tools of its session's MCP address
until the policy answers without a call."""

import json
from typing import Any

import aiohttp


async def solve(address: Any, row: dict[str, Any]) -> str:
    async with aiohttp.ClientSession() as http:

        async def post(url: str, body: dict[str, Any]) -> Any:
            async with http.post(url, json=body) as answer:
                return await answer.json()

        async def mcp(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await post(address.mcp, body))["result"]

        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["inputSchema"],
                },
            }
            for tool in (await mcp("tools/list"))["tools"]
        ]
        messages = list(row["prompt"])
        while True:
            body = {"model": "policy", "messages": messages, "tools": tools}
            said = await post(f"{address.openai}/chat/completions", body)
            message = said["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"]
            messages.append(message)
            for call in message["tool_calls"]:
                function = call["function"]
                done = await mcp(
                    "tools/call", name=function["name"], arguments=json.loads(function["arguments"])
                )
                text = done["content"][0]["text"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
