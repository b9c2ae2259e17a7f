"""Types of a tool call, its result and its errors. Imports nothing heavy.

`ToolRejected` is the model's mistake, or a request that the server will never accept; the model
reads the error as an observation. `ToolUnavailable` is a fault of the infrastructure; it ends the
trajectory.
"""

from dataclasses import dataclass
from typing import Any, Protocol

EXECUTED = "X-Executed"
"""Header of a server's error: `no` if the call was certainly not executed, `maybe` otherwise. An
error without the header means `maybe`."""

NOT_EXECUTED = {EXECUTED: "no"}

FINGERPRINT = "X-Tool-Fingerprint"
"""Header of a server's answer: a hash of what the answer depends on beside the call, for example
packages, corpus and limits. Equal fingerprints mean equal answers to repeatable calls."""

CACHEABLE = "X-Cacheable"
"""Header of a server's answer: `no` if the answer depends on the state of the server at that
moment, for example on its load; `yes` if it does not. Without the header the client decides by the
text."""

END_SESSION = "end_session"
"""The tool whose call ends a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One request to a tool."""

    tool: str
    """`run_code`, `retrieve` or `calculate`; also the path on the server."""

    payload: dict[str, Any]
    """JSON body of the request, in the server's protocol."""

    deterministic: bool | None = None
    """For `run_code`: True if an equal run would end the same, so that the result may be cached.
    None: the caller does not know, and `tool_config.deterministic_code` decides. Searches and
    calculations are always deterministic, unless this is False."""

    idempotent: bool = True
    """False: the call must not be executed twice. It is sent again only if it cannot have been
    executed (no connection, or an error with `X-Executed: no`), and its result is neither cached
    nor shared."""

    session: str = ""
    """Calls of one session go to the same server, because that server holds the session's state. If
    that server does not answer, they fail."""


MAX_RUN_S = 120.0
"""Longest time that a call may give a program on the tool server."""


def run_code_call(
    code: str, stdin: str, deterministic: bool | None = None, run_timeout_s: float | None = None
) -> ToolCall:
    """A call that runs a Python program; without `run_timeout_s` the server's default holds."""
    payload: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin}
    if run_timeout_s is not None:
        payload["run_timeout"] = run_timeout_s
    return ToolCall(tool="run_code", payload=payload, deterministic=deterministic)


def cell_call(code: str, stdin: str, session: str, *, began: bool = False) -> ToolCall:
    """A call that runs Python in a session's interpreter; the first call starts the interpreter.

    If `began`, an earlier cell was answered: our server then runs nothing if it has lost the
    interpreter.
    """
    payload: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin}
    payload |= {"session": session} | ({"session_began": True} if began else {})
    return ToolCall(
        tool="run_code", payload=payload, deterministic=False, idempotent=False, session=session
    )


def end_session_call(session: str) -> ToolCall:
    """A call that ends a session's interpreter."""
    return ToolCall(tool=END_SESSION, payload={"session": session}, session=session)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer of a tool, and how long it took."""

    body: dict[str, Any]
    """JSON body of the answer."""

    latency_s: float = 0.0
    """From the first attempt to the answer, with retries, without `limiter_wait_s`; 0 on a cache
    hit."""

    limiter_wait_s: float = 0.0
    """Time spent waiting for the limiter and a slot."""

    attempts: int = 1
    """HTTP requests made; 0 on a cache hit."""

    cached: bool = False
    """True when the result came from a cache, or from an equal call that was under way."""

    tool: str = ""
    """The tool that was called, as in `ToolCall`."""

    origin: str = ""
    """What answered: the server's fingerprint of the tool, or a hash of the server's URL."""

    cacheable: bool | None = None
    """The server's `X-Cacheable`: whether an equal call to the same origin would end the same."""


class ToolError(Exception):
    """A tool call that brought no result; `tool` is empty where the tool is not known."""

    tool: str  # no default on the class, because Ray's copy of an error would show it instead

    def __init__(self, message: str = "", *, tool: str = "") -> None:
        super().__init__(message)
        self.tool = tool


class ToolRejected(ToolError):
    """The server understood the call and refuses it (4xx but 429): never retried."""


class ToolUnavailable(ToolError):
    """No answer, 429 or 5xx after all retries, or the deadline passed."""


class ToolTimeout(ToolUnavailable):
    """The call's own deadline passed; a caller with a later deadline may ask again."""


class ToolBackend(Protocol):
    """The part of a tool client that agent loops and rewards use."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        Raises:
            ToolRejected: the server refuses this call.
            ToolUnavailable: no answer after retries within the deadline.
        """
        ...
