"""Calls a tool at a session's MCP address. Standard library only."""

import json
import os
import urllib.request


def call(mcp_url: str, name: str, **arguments: str) -> str:
    """The text of the tool's result."""
    params = {"name": name, "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    request = urllib.request.Request(
        mcp_url,
        data=json.dumps(message).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["result"]["content"][0]["text"]


def use(name: str, **arguments: str) -> str:
    """The same, for the session of this program."""
    return call(os.environ["MIXED_MCP_URL"], name, **arguments)
