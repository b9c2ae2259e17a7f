"""Types of a tool call, its result and its faults. Imports nothing heavy.

`ToolRejected` is the model's mistake: the model reads the message as an observation.
`ToolUnavailable` is a fault of the infrastructure: the trajectory is not trained. Any other
exception is an error in our code or the user's.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from config.compat import StrEnum

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

    deterministic: bool = True
    """Whether an equal call would have the same answer, so that the result may be cached."""

    idempotent: bool = True
    """False: the call must not be executed twice. It is sent again only if it was certainly not
    executed (no connection, or an error with `X-Executed: no`), and its result is neither cached
    nor shared."""

    session: str = ""
    """Calls of one session go to the same server, because that server holds the session's state. If
    that server is away, they wait for it."""


MAX_RUN_S = 120.0
"""Longest time that a call may give a program on the tool server."""


def run_code_call(
    code: str, stdin: str, deterministic: bool = True, run_timeout_s: float | None = None
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
    return ToolCall(tool="run_code", payload=payload, idempotent=False, session=session)


def end_session_call(session: str) -> ToolCall:
    """A call that ends a session's interpreter."""
    return ToolCall(tool=END_SESSION, payload={"session": session}, session=session)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer of a tool, and how long it took."""

    body: dict[str, Any]
    """JSON body of the answer."""

    latency_s: float = 0.0
    """From the first attempt to the answer, with retries, without the two waits below; 0 on a cache
    hit."""

    limiter_wait_s: float = 0.0
    """Time spent waiting for the limiter and a slot."""

    server_wait_s: float = 0.0
    """Time spent waiting for a server that was away or overloaded."""

    attempts: int = 1
    """Requests that the tool may have executed; 0 on a cache hit."""

    cached: bool = False
    """True when the result came from a cache, or from an equal call that was under way."""

    tool: str = ""
    """The tool that was called, as in `ToolCall`."""

    origin: str = ""
    """What answered: the server's fingerprint of the tool, or a hash of the server's URL."""

    cacheable: bool | None = None
    """The server's `X-Cacheable`: whether an equal call to the same origin would end the same."""


class Again(StrEnum):
    """Whether a call that failed may be tried again. A call that may have been executed is tried
    again only if it may run twice (`ToolCall.idempotent`)."""

    NEVER = "never"
    """The next attempt would fail too, for example because the token is wrong."""

    COUNTED = "counted"
    """The tool answered that it failed: `max_retries` times."""

    UNTIL_DEADLINE = "until_deadline"
    """The tool did not answer, because it is away or overloaded: as long as the call has time."""


class Fault(Exception):
    """A call that brought no result. The class says whose fault it is.

    Args:
        message: what failed, where, and what to do.
        tool: name of the tool; "" where it is not known.
        again: whether the call may be tried again.
        executed: whether the call may have been executed. If not, it can always be sent again.
        retry_after_s: pause that the server asks for.
        is_overload: the server has too many requests; all callers slow down.
        is_away: nobody answers at the server's address; all callers wait for it together.
    """

    def __init__(
        self,
        message: str = "",
        *,
        tool: str = "",
        again: Again = Again.NEVER,
        executed: bool = True,
        retry_after_s: float | None = None,
        is_overload: bool = False,
        is_away: bool = False,
    ) -> None:
        # half a character (a lone surrogate) cannot be written to JSON or to a log
        super().__init__(message.encode(errors="replace").decode())
        # no defaults on the class, because Ray's copy of an error would show them instead
        self.tool, self.again, self.executed = tool, again, executed
        self.retry_after_s, self.is_overload, self.is_away = retry_after_s, is_overload, is_away
        self.server_wait_s = 0.0
        """As `ToolResult.server_wait_s`."""


class ToolRejected(Fault):
    """The model's mistake: a call that the tool understood and refuses."""


class ToolUnavailable(Fault):
    """A fault of the infrastructure: no answer to the call."""


class ToolTimeout(ToolUnavailable):
    """The call's own deadline passed; a caller with a later deadline may ask again."""


class ToolBackend(Protocol):
    """The part of a tool client that agent loops and rewards use."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        Raises:
            ToolRejected: the server refuses this call.
            ToolUnavailable: no answer within the deadline, or the tool failed in all attempts.
        """
        ...
