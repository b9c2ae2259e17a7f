"""What a result of an MCP server means: the text that the model reads, or a fault."""

import json
from typing import TYPE_CHECKING, Any

from agent_loop.calls.routes import RequestFailed
from agent_loop.toolbox.mcp_client.messages import (
    HTTP_STATUS,
    MAX_MESSAGE_BYTES,
    NOT_SENT,
    SESSION_LOST,
    TOO_LARGE,
)
from agent_loop.toolbox.mcp_client.target import ServerTarget
from agent_loop.toolbox.results import text_body
from tool_server.wire.protocol import ToolError, ToolRejected, ToolUnavailable
from tool_server.wire.responses import replace_surrogates

if TYPE_CHECKING:
    from mcp import MCPError
    from mcp_types import CallToolResult

MAX_ERROR = 500
"""Characters of a server's error message that are kept."""

_INVALID_PARAMS = -32602
_HEADER_MISMATCH = -32020
SESSION_ENDED = frozenset({SESSION_LOST, _HEADER_MISMATCH})
"""Errors after which a new session is needed. The call was not executed."""


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


def _too_large(tool: str, name: str, limit: str) -> ToolUnavailable:
    return ToolUnavailable(
        f"the result of tool={tool!r} of {name} has more than {limit}, which is the most that is "
        "read; limit the output at the server, or leave the tool out with `only`",
        tool=tool,
    )


def failure_of(
    error: "MCPError", tool: str, target: ServerTarget, ending: str
) -> RequestFailed | ToolError:
    """The failure of a call that ended in a JSON-RPC error.

    Args:
        ending: what is known of the server's end, if it ended.
    """
    code, name = error.code, target.name
    message = target.hidden(replace_surrogates(error.message))[:MAX_ERROR]
    if code == _INVALID_PARAMS:
        return ToolRejected(f"{tool}: {message}", tool=tool)
    if code == TOO_LARGE:
        return _too_large(tool, name, f"{MAX_MESSAGE_BYTES >> 20} MiB ({message})")
    if "event exceeded" in message:  # the SDK has no code for it
        return _too_large(tool, name, f"{MAX_MESSAGE_BYTES >> 20} MiB")
    if code in SESSION_ENDED:
        return RequestFailed(message, was_executed=False, blames_server=False)
    if code == NOT_SENT:
        return RequestFailed(message, was_executed=False)
    if code == HTTP_STATUS:
        return _http_failure(error, message, tool, target)
    if ending:
        return RequestFailed(f"{name} ended during the call ({ending})")
    # The server has answered, so it works.
    return RequestFailed(f"{message} (error {code})", blames_server=code > 0)


def _http_failure(
    error: "MCPError", message: str, tool: str, target: ServerTarget
) -> RequestFailed | ToolError:
    data = error.data if isinstance(error.data, dict) else {}
    status, retry_after_s = data.get("status", 0), data.get("retry_after_s")
    if status in (408, 429) or status >= 500:
        return RequestFailed(
            message,
            retry_after_s,
            is_overload=status in (429, 503),
            blames_server=status != 429,
        )
    return ToolUnavailable(
        f"{target.name} refuses tool={tool!r}: {message}; "
        f"{remedy_for(status, target.token_variable)}",
        tool=tool,
    )


def remedy_for(status: int, token_variable: str) -> str:
    """What to do about an HTTP status."""
    if status in (401, 403):
        if token_variable:
            return f"is the token in {token_variable} right?"
        return "it wants a token: name its environment variable with `token`"
    return "is this the URL of an MCP server?"
