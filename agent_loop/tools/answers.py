"""What a tool server's answer says, read with suspicion: JSON, its shape, `Retry-After`. Pure."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

RETRY_AFTER_CAP_S = 600.0
"""A `Retry-After` beyond it is taken for a mistake: it stops every process of the host."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""What a half character comes as: JSON in UTF-8 cannot hold it otherwise."""

_OUR_MISTAKE = re.compile(r"(?!exception)[^\n]{0,200}(not supported|unsupported)", re.IGNORECASE)
"""How a sandbox says that it will never take such a request. SandboxFusion's message on its own
faults begins with `exception` and quotes the program, which may say anything."""


def dumps(payload: Mapping[str, Any]) -> bytes:
    """A request's JSON."""
    try:
        return msgspec.json.encode(payload)
    except UnicodeEncodeError:  # half a character, which JSON can only hold escaped
        return json.dumps(payload).encode()


def loads(body: bytes, charset: str | None) -> Any:
    """A server's JSON; a half character in its strings becomes `?`, see `whole`.

    Args:
        body: the bytes of the answer.
        charset: as its header names it.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(body)
    except ValueError:
        pass  # NaN, a half character, another charset: rare, and slow to read
    text = text_of(body, charset)
    value = json.loads(text)
    if _HALF.search(text):
        value = json.loads(whole(json.dumps(value, ensure_ascii=False)))
    return value


def text_of(body: bytes, charset: str | None) -> str:
    """An answer's text, whatever its bytes are."""
    try:
        return body.decode(charset or "utf-8", errors="replace")
    except LookupError:  # a charset that nobody knows
        return body.decode(errors="replace")


def whole(text: str) -> str:
    """The text with a `?` for each half character, which no JSON line or msgpack can carry."""
    return text.encode(errors="replace").decode()


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a `Retry-After` header asks for, given as such or as a date; None without.

    A date counts from the answer's own `Date`, so that no two clocks are compared.
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
    """What is wrong with an answer: its server is broken, or another program; "" where nothing."""
    if not isinstance(body, dict):
        return f"the answer is no JSON object but {type(body).__name__}"
    is_well_formed = _WELL_FORMED.get(tool)
    if is_well_formed is not None and not is_well_formed(body):
        return f"the answer is not one of /{tool}: {str(body)[:200]}"
    return ""


def sandbox_fault(tool: str, body: dict[str, Any]) -> tuple[str, bool]:
    """The sandbox's own fault under HTTP 200, which is no verdict on the program.

    Returns:
        What it says, "" where there is none; and whether it refuses such requests for good.
    """
    if tool != "run_code" or body.get("status") != "SandboxError":
        return "", False
    message = str(body.get("message"))
    return f"SandboxError: {message}", _OUR_MISTAKE.match(message) is not None


def is_repeatable(body: dict[str, Any]) -> bool:
    """Whether the next equal call would surely end the same.

    A time-out also says who else was busy, and so may a kill; an error of the calculator may be its
    time-out.
    """
    run = body.get("run_result") or {}
    if "error" in body or run.get("status") == "TimeLimitExceeded":
        return False
    return run.get("return_code") not in (-9, 137)


def _is_run(body: dict[str, Any]) -> bool:
    """SandboxFusion's answer; a program that succeeded has an output."""
    run = body.get("run_result") or {}
    if not isinstance(body.get("status"), str) or not isinstance(run, dict):
        return False
    return body["status"] != "Success" or isinstance(run.get("stdout"), str)


def _is_search(body: dict[str, Any]) -> bool:
    """Search-R1's answer with scores: passages per query, one query at least."""
    found = body.get("result")
    if not isinstance(found, list) or not found:
        return False
    return all(isinstance(passages, list) and all(map(_is_passage, passages)) for passages in found)


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
"""Whether an answer has what the agent loops and rewards read of it."""
