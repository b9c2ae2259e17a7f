"""Parts of replies that several protocols share: events, pieces of text, errors."""

import json
from collections.abc import Iterator
from typing import Any

from agent_loop.gateway.wire import WireError

_PIECE = 64
"""Characters of a text in one event of a stream."""


def data_frame(data: dict[str, Any]) -> str:
    """A server-sent event without a name.

    The JSON is ASCII: some clients split the stream at U+2028 and U+0085 too, not only at line
    feeds, and would cut a frame in two.
    """
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def event_frame(data: dict[str, Any]) -> str:
    """A server-sent event with the name that `data` has as its type."""
    return f"event: {data['type']}\n{data_frame(data)}"


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces, for the deltas of a stream. An empty text has none."""
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def openai_error_body(error: WireError) -> dict[str, Any]:
    """The answer to a refused request, in the form of both of OpenAI's protocols."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }
