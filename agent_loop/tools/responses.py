"""Checks of a tool server's HTTP response: its JSON, its fields, its `Retry-After` header. Pure."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

RETRY_AFTER_CAP_S = 600.0
"""Longest pause that is obeyed. A longer `Retry-After` is taken for a mistake, because it would
stop every process of the host."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A lone surrogate (half of a character in UTF-16). UTF-8 cannot hold one, so JSON escapes it."""

_NEVER_SUPPORTED = re.compile(
    r"(?!exception)[^\n]{0,200}(not supported|unsupported)", re.IGNORECASE
)
"""Message of a sandbox that will never accept this request. SandboxFusion reports its own faults in
a message that begins with `exception`; that message quotes the program, so its words prove
nothing."""


def dumps(payload: Mapping[str, Any]) -> bytes:
    """The JSON body of a request."""
    try:
        return msgspec.json.encode(payload)
    except UnicodeEncodeError:  # a lone surrogate, which JSON holds only in escaped form
        return json.dumps(payload).encode()


def loads(body: bytes, charset: str | None) -> Any:
    """The JSON of a response; a lone surrogate in a string becomes `?`.

    Raises:
        ValueError: the body is not JSON.
        RecursionError: the JSON is nested too deeply.
    """
    try:
        return msgspec.json.decode(body)
    except ValueError:
        pass  # NaN, a lone surrogate or another charset: rare, so the slow reader below is enough
    text = text_of(body, charset)
    value = json.loads(text)
    if _ESCAPED_SURROGATE.search(text):
        value = json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))
    return value


def text_of(body: bytes, charset: str | None) -> str:
    """The text of a response; bytes that do not decode are replaced."""
    try:
        return body.decode(charset or "utf-8", errors="replace")
    except LookupError:  # Python does not know the charset
        return body.decode(errors="replace")


def replace_surrogates(text: str) -> str:
    """The text with `?` for each lone surrogate, because JSON lines and msgpack cannot hold one."""
    return text.encode(errors="replace").decode()


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


def fault_of(tool: str, body: Any) -> str:
    """What is wrong with a response (a broken server, or not a tool server); "" if it is good."""
    if not isinstance(body, dict):
        return f"the answer is not a JSON object but {type(body).__name__}"
    is_well_formed = _WELL_FORMED.get(tool)
    if is_well_formed is not None and not is_well_formed(body):
        return f"the answer is not one of /{tool}: {str(body)[:200]}"
    return ""


def sandbox_fault(tool: str, body: dict[str, Any]) -> tuple[str, bool]:
    """A fault of the sandbox itself, which it reports with HTTP 200.

    Returns:
        The fault, "" if there is none; and whether the sandbox will never accept this request.
    """
    if tool != "run_code" or body.get("status") != "SandboxError":
        return "", False
    message = str(body.get("message"))
    return f"SandboxError: {message}", _NEVER_SUPPORTED.match(message) is not None


def is_repeatable(body: dict[str, Any]) -> bool:
    """Whether an equal call would end the same, so that the result may be cached.

    A time-out or a kill may be caused by the load of the server. An error of the calculator may be
    a time-out.
    """
    run = body.get("run_result") or {}
    if "error" in body or run.get("status") == "TimeLimitExceeded":
        return False
    return run.get("return_code") not in (-9, 137)


def _is_run(body: dict[str, Any]) -> bool:
    """Whether this is SandboxFusion's answer; a program that succeeded has an output."""
    run = body.get("run_result") or {}
    if not isinstance(body.get("status"), str) or not isinstance(run, dict):
        return False
    return body["status"] != "Success" or isinstance(run.get("stdout"), str)


def _is_search(body: dict[str, Any]) -> bool:
    """Whether this is Search-R1's answer with scores: a list of passages for each query."""
    result = body.get("result")
    if not isinstance(result, list) or not result:
        return False
    return all(isinstance(hits, list) and all(map(_is_passage, hits)) for hits in result)


def _is_passage(item: Any) -> bool:
    document = item.get("document") if isinstance(item, dict) else None
    return isinstance(document, dict) and "contents" in document


def _is_calculation(body: dict[str, Any]) -> bool:
    return "result" in body or "error" in body


_WELL_FORMED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "run_code": _is_run,
    "retrieve": _is_search,
    "calculate": _is_calculation,
}
"""Tool -> whether a response has the fields that agent loops and rewards read."""
