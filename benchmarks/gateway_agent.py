"""The agent of the benchmark of agent loops that runs behind the gateway: it calls a tool until the
policy answers without a call. Its HTTP client is as light as one can be, because what is measured
is the gateway; aiohttp's client takes as much again as the gateway's server."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec


async def solve(address: Any, row: dict[str, Any]) -> str:
    from benchmarks.agent_loop import SCHEMA, run_code

    url = urlsplit(f"{address.openai}/chat/completions")
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    messages: list[dict[str, Any]] = list(row["prompt"])
    try:
        while True:
            body = msgspec.json.encode({"model": "m", "messages": messages, "tools": [SCHEMA]})
            head = f"POST {url.path} HTTP/1.1\r\nhost: {url.netloc}\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
            said = msgspec.json.decode(await reader.readexactly(size))
            message = said["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"]
            messages.append(message)
            for call in message["tool_calls"]:
                text = await run_code("")
                result = {"role": "tool", "tool_call_id": call["id"], "content": text}
                messages.append(result)
    finally:
        writer.close()
