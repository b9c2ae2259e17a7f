"""The client of the `mcp` package: lists the session's tools and calls one, over streamable HTTP.

As in the quickstart of its documentation. Both handshakes are tried: the client's own choice, and
that of earlier releases.
"""

import asyncio
import os

from mcp import Client


async def main() -> None:
    seen = []
    for mode in ("auto", "legacy"):
        async with Client(os.environ["MIXED_MCP_URL"], mode=mode) as client:
            listed = await client.list_tools()
            done = await client.call_tool("calculate", {"expression": "6 * 7"})
            wrong = await client.call_tool("calculate", {"sum": "6 * 7"})
            assert wrong.is_error and "expression" in wrong.content[0].text
            seen.append(([tool.name for tool in listed.tools], done.content[0].text))
    print(seen)


asyncio.run(main())
