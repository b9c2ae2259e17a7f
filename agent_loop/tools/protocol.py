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

    deterministic: bool | None = None
    """Of `run_code`: whether the program's next run would end the same, so that its result may be
    kept. None: the caller does not know, and `tool_config.deterministic_code` decides. Searches and
    calculations always are."""

    idempotent: bool = True
    """False: it must not be executed twice. It is sent again only where it surely was not executed
    (nobody listened, or 429 or 503 was the answer), and its result is neither kept nor shared."""

    session: str = ""
    """Calls of one session all go to the same server, which keeps its state."""


def run_code_call(
    code: str, stdin: str, deterministic: bool | None = None, run_timeout_s: float | None = None
) -> ToolCall:
    """A Python program to run.

    Args:
        code: the program.
        stdin: its input.
        deterministic: see `ToolCall`.
        run_timeout_s: how long it may run; None leaves it to the server.
    """
    payload: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin}
    if run_timeout_s is not None:
        payload["run_timeout"] = run_timeout_s
    return ToolCall(tool="run_code", payload=payload, deterministic=deterministic)


def cell_call(code: str, stdin: str, session: str) -> ToolCall:
    """Python to run in a session's interpreter, which begins with its first cell."""
    payload = {"code": code, "language": "python", "stdin": stdin, "session": session}
    return ToolCall(
        tool="run_code", payload=payload, deterministic=False, idempotent=False, session=session
    )


def end_session_call(session: str) -> ToolCall:
    """The end of a session's interpreter."""
    return ToolCall(tool="end_session", payload={"session": session}, session=session)


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
    """True when the result came from a cache, or from an equal call that was under way."""

    tool: str = ""
    """The tool that was called, as in `ToolCall`."""


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
