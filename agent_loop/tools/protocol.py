"""What a tool call and its result are, and how a tool can fail. Imports nothing heavy.

`ToolRejected` is the model's own mistake or a request the server will never accept: it becomes an
observation. `ToolUnavailable` is a fault of the infrastructure: it ends the trajectory.
"""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One request to a tool."""

    tool: str
    """`run_code`, `retrieve` or `calculate`: also the path on the server."""

    payload: dict[str, Any]
    """JSON body as the server's protocol wants it."""


def run_code_call(code: str, stdin: str) -> ToolCall:
    """A Python program to run."""
    return ToolCall(tool="run_code", payload={"code": code, "language": "python", "stdin": stdin})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back, and what it cost."""

    body: dict[str, Any]
    """JSON body of the answer."""

    latency_s: float = 0.0
    """From the first attempt's start to the answer, retries included; 0 on a cache hit."""

    limiter_wait_s: float = 0.0
    """Time spent waiting for the limiter and a slot."""

    attempts: int = 1
    """HTTP requests made; 0 on a cache hit."""

    cached: bool = False
    """True when the result came from this process's cache."""


class ToolError(Exception):
    """A tool call that brought no result.

    Args:
        message: what went wrong.
        tool: the tool that was called; empty where it is not known.
        server: base URL of its server; likewise.
    """

    # No defaults on the class: Ray's copy of an error would find those first.
    tool: str
    server: str

    def __init__(self, message: str = "", *, tool: str = "", server: str = "") -> None:
        super().__init__(message)
        self.tool, self.server = tool, server


class ToolRejected(ToolError):
    """The server understood the call and refuses it (4xx but 429): never retried."""


class ToolUnavailable(ToolError):
    """No answer, 429 or 5xx after all retries, or the deadline passed."""


class ToolTimeout(ToolUnavailable):
    """A call's own deadline ended it; a caller with a later one may ask again."""


class ToolBackend(Protocol):
    """What the agent loops and rewards need of a tool client."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        Raises:
            ToolRejected: the server refuses this call.
            ToolUnavailable: no answer after retries within the deadline.
        """
        ...
