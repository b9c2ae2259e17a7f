"""What a result of an MCP server means: the text that the model reads, or a fault."""

import json
from typing import TYPE_CHECKING, Any

from agent_loop.toolbox.mcp_client.target import ServerTarget
from agent_loop.toolbox.results import text_body
from tool_server.wire.http import Peer, fault_of
from tool_server.wire.protocol import Again, Fault, ToolRejected, ToolUnavailable
from tool_server.wire.responses import replace_surrogates

if TYPE_CHECKING:
    from mcp import MCPError
    from mcp_types import CallToolResult

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of a server. A result of 1 MiB fits, with its text written twice (as text and as
structured content) and with escapes."""

MAX_ERROR = 500
"""Characters of a server's error message that are kept."""

_INVALID_PARAMS = -32602
HEADER_MISMATCH = -32020
"""The server does not take the session's headers any more: it has not executed the call."""

# Codes of errors that the transports make for their own calls. JSON-RPC reserves negative numbers.
TOO_LARGE = 7001
TOO_LARGE_TEXT = f"the answer has more than {MAX_MESSAGE_BYTES >> 20} MiB"

BAD_ANSWER = 7002
"""The answer is no JSON-RPC response."""

NOT_SENT = 7003
"""No connection to the server: it has not executed the call."""

SESSION_LOST = 7004
"""The HTTP server does not know the session any more: it has not executed the call."""

HTTP_STATUS = 7005
"""An HTTP error; `data` holds `status` and `retry_after_s`."""

HTTP_FAILED = 7006
"""The HTTP connection broke before the answer was complete."""


def error_answer(request_id: int | None, code: int, message: str, data: Any = None) -> bytes:
    """A JSON-RPC error in answer to a request."""
    error = {"code": code, "message": message, "data": data}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode()


def body_of(result: "CallToolResult", tool: str, name: str) -> dict[str, Any]:
    """The body of a result: its text, and whether it reports a mistake of the model.

    Args:
        name: of the server, in messages.

    Raises:
        ToolUnavailable: the result has more than text, or is too large.
    """
    texts: list[str] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource_link":
            texts.append(f"{block.title or block.name}: {block.uri}")
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)  # type: ignore[union-attr]
        else:
            kind = "a binary resource" if block.type == "resource" else f"an {block.type}"
            raise ToolUnavailable(
                f"tool={tool!r} of {name} returned {kind}: the model reads text only; leave the "
                "tool out with `only`",
                tool=tool,
            )
    text = "\n".join(texts)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return text_body(text, tool, is_error=bool(result.is_error))


def failure_of(error: "MCPError", tool: str, target: ServerTarget, ending: str) -> Fault:
    """The failure of a call that ended in a JSON-RPC error.

    Args:
        ending: what is known of the server's end, if it ended.
    """
    code, name = error.code, target.name
    message = target.hidden(replace_surrogates(error.message))[:MAX_ERROR]
    if code == _INVALID_PARAMS:
        return ToolRejected(f"{tool}: {message}", tool=tool)
    if code == TOO_LARGE or "event exceeded" in message:  # the SDK has no code for it
        return ToolUnavailable(
            f"the result of tool={tool!r} of {name} has more than {MAX_MESSAGE_BYTES >> 20} MiB, "
            f"which is the most that is read ({message}); limit the output at the server, or leave "
            "the tool out with `only`",
            tool=tool,
        )
    if code in (SESSION_LOST, HEADER_MISMATCH):
        return ToolUnavailable(message, tool=tool, again=Again.UNTIL_DEADLINE, executed=False)
    if code in (NOT_SENT, HTTP_FAILED):
        return ToolUnavailable(
            message,
            tool=tool,
            again=Again.UNTIL_DEADLINE,
            executed=code != NOT_SENT,
            is_away=True,
        )
    if code == HTTP_STATUS:
        return _http_failure(error, message, tool, target)
    failure = f"{name} ended during the call ({ending})" if ending else f"{message} (error {code})"
    return ToolUnavailable(failure, tool=tool, again=Again.COUNTED)


def _http_failure(error: "MCPError", message: str, tool: str, target: ServerTarget) -> Fault:
    data = error.data if isinstance(error.data, dict) else {}
    status = int(data.get("status", 0))
    remedy = remedy_for(status, target.token_variable)
    peer = Peer(
        name=f"{target.name} for tool={tool!r}",
        tool=tool,
        address_key="`mcp`",
        remedy=remedy,
        refused=remedy,
    )
    words = message.removeprefix(f"HTTP {status}").strip()
    return fault_of(status, words, peer, pause_s=data.get("retry_after_s"))


def remedy_for(status: int, token_variable: str) -> str:
    """What to do about an HTTP status."""
    if status in (401, 403):
        if token_variable:
            return f"is the token in {token_variable} right?"
        return "it wants a token: name its environment variable with `token`"
    return "is this the URL of an MCP server?"
