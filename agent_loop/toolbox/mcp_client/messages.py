"""Rules for the messages of an MCP server: their bounds, and the requests that a server sends us.

A client gets four kinds of messages. Responses go on to the SDK. Notifications (progress, logs,
changed lists) are dropped, because nothing here reads them. Requests of the server (sampling,
elicitation, roots) are refused; only `ping` is answered. Anything else is no MCP message.
"""

import re
from typing import Any

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of a server. A result of 1 MiB fits, with its text written twice (as text and as
structured content) and with escapes."""

# Codes of errors that this client makes for its own calls. JSON-RPC reserves negative numbers.
TOO_LARGE = 7001
"""The answer has more than `MAX_MESSAGE_BYTES`."""

BAD_ANSWER = 7002
"""The answer is no valid JSON-RPC response."""

NOT_SENT = 7003
"""No connection to the server: it has not executed the call."""

SESSION_LOST = 7004
"""The HTTP server does not know the session any more: it has not executed the call."""

HTTP_STATUS = 7005
"""An HTTP error; `data` holds `status` and `retry_after_s`."""

HTTP_FAILED = 7006
"""The HTTP connection broke before the answer was complete."""

_METHOD_NOT_FOUND = -32601
_ID = rb'"id"\s*:\s*(\d{1,15})'
_FIRST_ID = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?' + _ID)
_LAST_ID = re.compile(_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_VERSION_BEFORE = re.compile(rb'"jsonrpc"\s*:\s*"2\.0"\s*,\s*$')


def error_answer(request_id: Any, code: int, message: str, data: Any = None) -> dict[str, Any]:
    """A JSON-RPC error in answer to a request."""
    error = {"code": code, "message": message}
    return {
        "jsonrpc": "2.0",
        "id": request_id,
        "error": error if data is None else error | {"data": data},
    }


def too_large(request_id: Any) -> dict[str, Any]:
    return error_answer(
        request_id, TOO_LARGE, f"the answer has more than {MAX_MESSAGE_BYTES >> 20} MiB"
    )


def reply_to(request_id: Any, method: str) -> dict[str, Any]:
    """Our answer to a request of the server."""
    if method == "ping":
        return {"jsonrpc": "2.0", "id": request_id, "result": {}}
    return error_answer(request_id, _METHOD_NOT_FOUND, f"this client has no {method}")


def id_of_large(head: bytes, tail: bytes) -> int | None:
    """The id of a response whose beginning and end alone were kept; None if it cannot be seen.

    Servers write the id before the result or after it.
    """
    if (found := _FIRST_ID.match(head)) is not None:
        return int(found[1])
    if (found := _LAST_ID.search(tail)) is None:
        return None
    before = tail[: found.start()].rstrip()
    # `},"id":5}`: after the result. A text that ends like this has a backslash before the quote.
    is_after_result = before.endswith(b"},") or _VERSION_BEFORE.search(tail[: found.start()])
    return int(found[1]) if is_after_result else None
