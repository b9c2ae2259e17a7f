"""What stands in a record's cells: text, lists, JSON. For readers of any kind of data.

Each function takes a value as parquet, JSON or csv hands it over and gives it back as JSON has it,
or raises `BadRecord`. `field` is the column, or the path in it, for messages.
"""

import ast
import json
import math
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from samplers.kind import BadRecord

_SHORT = reprlib.Repr()
"""Shows a value in a message, cut where it is long."""
_SHORT.maxstring = _SHORT.maxother = 80

_LITERAL = 100_000  # characters of a Python literal that are still read
ROLES = ("system", "user", "assistant")


def bad(field: str, value: object, rule: str) -> BadRecord:
    """The error for a cell that breaks a rule; `rule` has the same words for all such cells."""
    return BadRecord(f"{field}={_SHORT.repr(value)}: {rule}", reason=f"{field}: {rule}")


def present(record: Mapping[str, Any], field: str) -> Any:
    """The value of a column that every record of the schema has."""
    if field not in record:
        raise missing(record, field)
    return record[field]


def missing(record: Mapping[str, Any], *fields: str) -> BadRecord:
    """The error for a record that has none of some columns."""
    reason = f"column {' or '.join(fields)} is missing"
    return BadRecord(f"{reason}: the record has {_SHORT.repr(list(record))}", reason=reason)


def text_of(field: str, value: object) -> str:
    """Text without white space around it; null is empty. It must be Unicode."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad(field, value, "must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad(field, value, "must be Unicode, without half surrogate pairs") from None
    return value.strip()


def question_of(field: str, value: object) -> str:
    """Text that is not empty, as `text_of`."""
    text = text_of(field, value)
    if not text:
        raise bad(field, value, "must not be empty")
    return text


def answers_of(field: str, value: object) -> list[str]:
    """One answer or several, as texts without white space around them; blank ones are left out.

    Numbers become what Python prints, truth values `true` and `false`.

    Args:
        value: text, number, truth value, or a list or array of those.
    """
    given = items_of(value)
    answers = [_answer(field, item) for item in ([value] if given is None else given)]
    answers = [answer for answer in answers if answer]
    if not answers:
        raise bad(field, value, "must hold an answer")
    return answers


def _answer(field: str, value: object) -> str:
    if hasattr(value, "tolist"):  # a number of numpy's
        value = cast(Any, value).tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Decimal) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise bad(field, value, "must be text, a number, or a list of those")
    return text_of(field, value)


def items_of(value: object) -> list[Any] | None:
    """The items of a list, tuple or numpy array; None for anything else."""
    if isinstance(value, list | tuple):
        return list(cast(Sequence[Any], value))
    if hasattr(value, "tolist"):
        listed = cast(Any, value).tolist()
        return cast(list[Any], listed) if isinstance(listed, list) else None
    return None


def is_blank(value: object) -> bool:
    """Null, white space or an empty list: what stands in a cell that nobody filled."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or items_of(value) == []


def literal_list(text: str) -> list[str] | None:
    """The texts of a list literal of Python or JSON, of which nothing is run; else None."""
    if not text.startswith("[") or len(text) > _LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            items = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(items, list):
        return None
    found = cast(list[Any], items)
    return found if all(isinstance(item, str) for item in found) else None


def messages_of(field: str, value: object) -> list[dict[str, str]]:
    """The messages of a prompt, from a list or its JSON text; one must be the user's.

    Args:
        value: messages with `role` and `content`: a text, or a list of `{"type": "text", ...}`.
    """
    if isinstance(value, str):
        value = json_of(field, value)
    given = items_of(value)
    if not given:
        raise bad(field, value, "must be a list of messages")
    messages: list[dict[str, str]] = []
    for number, message in enumerate(given):
        place = f"{field}[{number}]"
        if not isinstance(message, Mapping):
            raise bad(place, message, "must have role and content")
        entries = cast(Mapping[str, Any], message)
        role, content = entries.get("role"), entries.get("content")
        if role not in ROLES:
            raise bad(f"{place}.role", role, f"must be one of {', '.join(ROLES)}")
        more = [key for key in entries if key not in ("role", "content")]
        if more := [key for key in more if not is_blank(entries[key])]:
            raise bad(place, more, "must have no more than role and content")
        messages.append({"role": str(role), "content": _content(f"{place}.content", content)})
    if all(message["role"] != "user" for message in messages):
        raise bad(field, value, "must hold a message of the user")
    return messages


def _content(field: str, value: object) -> str:
    parts = items_of(value)
    if parts is None:
        return question_of(field, value)
    texts: list[str] = []
    for part in parts:
        entries = cast(Mapping[str, Any], part)
        if not isinstance(part, Mapping) or entries.get("type") != "text":
            raise bad(field, entries, "must be text: images and other media are not read")
        texts.append(text_of(field, entries.get("text")))
    return question_of(field, "\n".join(texts))


def last_question(messages: Sequence[Mapping[str, str]]) -> str:
    return next(m["content"] for m in reversed(messages) if m["role"] == "user")


def json_of(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(field, text, "must be JSON") from error


def json_value(field: str, value: Any) -> Any:
    """A value as JSON has it, without loss; `field` is empty where the value is a whole record.

    Dates become their ISO text, decimals a number where that is exact and else text, numpy's
    values lists and numbers. Bytes, NaN and keys that are no text are refused.
    """
    try:
        return _json_value(field, value)
    except RecursionError:
        raise bad(field or "the record", value, "must not be nested that deeply") from None


def _json_value(field: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise bad(field, value, "must be a finite number")
        return float(value)
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        if keys := [key for key in entries if not isinstance(key, str)]:
            raise bad(f"key of {field or 'the record'}", keys[0], "must be text")
        prefix = f"{field}." if field else ""
        return {key: _json_value(f"{prefix}{key}", entries[key]) for key in entries}
    if hasattr(value, "tolist"):
        return _json_value(field, value.tolist())
    if isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        return [_json_value(f"{field}[{number}]", item) for number, item in enumerate(items)]
    if isinstance(value, date | time):  # datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        as_number = int(value) if value == value.to_integral_value() else float(value)
        return as_number if Decimal(repr(as_number)) == value else str(value)
    if isinstance(value, UUID):
        return str(value)
    raise bad(field, value, f"must be JSON, not {type(value).__name__}")
