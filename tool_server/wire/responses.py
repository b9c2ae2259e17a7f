"""The tool client's reading of an HTTP answer: its JSON, its fields, its `Retry-After`. Pure.

Answers are decoded into the types below. A field that no type names is skipped without building its
value, so a large hostile answer costs little time and memory.
"""

import base64
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from typing_extensions import Required, TypedDict

from tool_server.wire.protocol import (
    Again,
    Fault,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolUnavailable,
)

MAX_ANSWER_BYTES = {"run_code": 16 << 20, "retrieve": 4 << 20}
"""Largest body of an answer, per tool. JSON writes a byte of a program's output as at most 6 bytes
(`\\u0000`), so `run_code` has room for a full stdout and a full stderr of our sandbox (1 MiB each).
Decoding an answer of this size takes at most about 70 ms, because the event loop waits for it."""

MAX_OTHER_ANSWER_BYTES = 1 << 20
"""The same for other tools."""

MOST_PASSAGES = 1000
"""Passages of a query, for the same reason: 60,000 empty ones take 130 ms."""

MAX_FAULT = 2000
"""Characters of a sandbox's message that are kept: the model, logs and records get them."""

RETRY_AFTER_CAP_S = 600.0
"""Longest pause that is obeyed. A longer `Retry-After` is taken for a mistake, because it would
stop every process of the host."""

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A lone surrogate (half of a character in UTF-16). UTF-8 cannot hold one, so JSON escapes it."""

_NEVER_SUPPORTED = re.compile(
    r"(?!exception)[^\n]{0,200}(not supported|unsupported)", re.IGNORECASE
)
"""Message of a sandbox that will never accept this request. SandboxFusion reports its own faults in
a message that begins with `exception`; that message quotes the program, so its words prove
nothing."""


Read = TypeVar("Read")


def dumps(value: Any) -> bytes:
    """A value as JSON; bytes in it are written in base64."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a lone surrogate, which JSON holds only in escaped form
        return json.dumps(value, default=lambda raw: base64.b64encode(raw).decode()).encode()


def read_json(read: Callable[[str | bytes | bytearray], Read], raw: bytes | bytearray) -> Read:
    """What `read` makes of JSON, with `?` for each lone surrogate: models and clients that cut a
    text at any character write them.

    Raises:
        ValueError: `read` raised it.
        RecursionError: the JSON is nested too deeply.
    """
    try:
        return read(raw)
    except ValueError:
        if _ESCAPED_SURROGATE.search(raw) is None:
            raise
    # This reader is slower. It accepts NaN and Infinity, which `read` refuses.
    return read(replace_surrogates(json.dumps(json.loads(raw), ensure_ascii=False)))


class _Command(TypedDict, total=False):
    status: str
    return_code: int | None
    stdout: str | None
    stderr: str | None
    execution_time: float | None
    cpu_time: float | None


class _SessionInfo(TypedDict, total=False):
    id: str
    new: bool
    ended_by_program: bool


class _Run(TypedDict, total=False):
    """SandboxFusion's answer of `POST /run_code`, and `session` of our server."""

    status: Required[str]
    message: str | None
    compile_result: _Command | None
    run_result: _Command | None
    files: dict[str, str] | None
    session: _SessionInfo


class _Document(TypedDict, total=False):
    contents: Required[str]
    id: str | int | None
    title: str | None


class _Hit(TypedDict, total=False):
    document: Required[_Document]
    score: float


class _Search(TypedDict):
    """Search-R1's answer of `POST /retrieve` with scores: a list of passages for each query."""

    result: list[msgspec.Raw]


class _Calculation(TypedDict, total=False):
    result: str | int | float
    error: str


_OBJECT = msgspec.json.Decoder(dict[str, Any])
_RUN = msgspec.json.Decoder(_Run)
_SEARCH = msgspec.json.Decoder(_Search)
_HITS = msgspec.json.Decoder(list[msgspec.Raw])
_HIT = msgspec.json.Decoder(_Hit)
_CALCULATION = msgspec.json.Decoder(_Calculation)


def max_answer_bytes(tool: str) -> int:
    """Largest body of an answer of this tool."""
    return MAX_ANSWER_BYTES.get(tool, MAX_OTHER_ANSWER_BYTES)


def decode(call: ToolCall, raw: bytes) -> dict[str, Any]:
    """The body of a tool's answer, as the tool's type. A lone surrogate in a string becomes `?`.

    Fields that neither the agent loops nor the rewards read are dropped.

    Raises:
        ToolRejected, ToolUnavailable: the sandbox says that it failed.
        ValueError: the body is not JSON, or not an answer of this tool.
        RecursionError: the JSON is nested too deeply.
    """
    try:
        return read_json(partial(_decode, call), raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"the answer is not one of /{call.tool}: {error}") from error


def _decode(call: ToolCall, raw: str | bytes | bytearray) -> dict[str, Any]:
    match call.tool:
        case "run_code":
            run = _RUN.decode(raw)
            if run["status"] == "SandboxError":
                raise _sandbox_fault(str(run.get("message"))[:MAX_FAULT])
            if run["status"] == "Success" and (run.get("run_result") or {}).get("stdout") is None:
                raise msgspec.ValidationError("a program that succeeded has no output")
            return {**run}
        case "retrieve":
            lists = _SEARCH.decode(raw)["result"]
            asked = len(call.payload.get("queries", lists))
            if not lists or len(lists) != asked:
                raise msgspec.ValidationError(f"{len(lists)} lists of passages, {asked} queries")
            found = [_HITS.decode(hits) for hits in lists]
            if (most := max(map(len, found))) > MOST_PASSAGES:
                raise msgspec.ValidationError(f"{most} passages, at most {MOST_PASSAGES} are read")
            return {"result": [[_HIT.decode(hit) for hit in hits] for hits in found]}
        case "calculate":
            answer = _CALCULATION.decode(raw)
            if len(answer) != 1:
                raise msgspec.ValidationError("it has not one of `result` and `error`")
            return {**answer}
    return _OBJECT.decode(raw)


def replace_surrogates(text: str) -> str:
    """The text with `?` for each lone surrogate, because UTF-8 cannot hold one."""
    return text.encode(errors="replace").decode()


def sendable(value: Any) -> Any:
    """A JSON value with `?` for each lone surrogate."""
    return json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Pause that a `Retry-After` header asks for, in seconds; None without the header.

    The header holds seconds or a date. A date is compared with the `Date` of the same response, so
    that a difference between the two clocks does not matter.
    """
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        until = _timestamp(value)
        if until is None:
            return None
        now = _timestamp(headers.get("Date", ""))
        seconds = until - (time.time() if now is None else now)
    return None if math.isnan(seconds) else min(RETRY_AFTER_CAP_S, max(0.0, seconds))


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def _sandbox_fault(message: str) -> Fault:
    """A fault of the sandbox itself, which it reports with HTTP 200."""
    words = f"SandboxError: {message}"
    if _NEVER_SUPPORTED.match(message):
        return ToolRejected(words, tool="run_code")
    # the program may have caused it
    return ToolUnavailable(words, tool="run_code", again=Again.COUNTED)


def may_be_cached(result: ToolResult) -> bool:
    """Whether an equal call may get this result, by the server's mark or else by its text."""
    return is_repeatable(result.body) if result.cacheable is None else result.cacheable


def is_repeatable(body: Mapping[str, Any]) -> bool:
    """Whether an equal call to the same server would end the same, so that it may be cached.

    Not repeatable is what the server's load or state may have caused: an end by a limit or by a
    signal, a module that is missing, and errors of the system such as "Resource temporarily
    unavailable". The text of a program's output is searched too, because a program may catch an
    exception and print it. An error of the calculator may be a time-out.
    """
    if "error" in body:
        return False
    for command in (body.get("compile_result"), body.get("run_result")):
        if not command:
            continue
        code = command.get("return_code") or 0
        if command.get("status", "Finished") != "Finished" or not 0 <= code <= 128:
            return False
        for stream in ("stdout", "stderr"):
            text = command.get(stream) or ""
            if any(words in text for words in _STATE_OF_SERVER):
                return False
    return True


_STATE_OF_SERVER = (
    "ImportError",
    "ModuleNotFoundError",
    "No module named",
    "cannot import name",
    "BlockingIOError",
    "Resource temporarily unavailable",
    "can't start new thread",
    "MemoryError",
    "Cannot allocate memory",
    "Too many open files",
    "No space left on device",
)
"""Words of errors that depend on the packages, the limits or the load of a server."""
