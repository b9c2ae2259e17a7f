"""JSON values inside a model's text: where one ends.

Stricter than `json`: NaN, infinite numbers and halves of surrogate pairs are refused, because no
tool server accepts them.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agent_loop.turns.call_formats.message import (
    MOST_CALLS,
    Attempt,
    CallMistake,
    ParsedCall,
    too_many,
)

_SPACE = re.compile(r"[ \t\r\n]*")
_ID = re.compile(r"[A-Za-z0-9]{9}")


class Unreadable(Exception):
    """A call cannot be read. `skip_broken` makes a `CallMistake` of it."""

    def __init__(self, problem: str, at: int, name: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at
        """Index from which the end of the broken call is searched."""
        self.name = name


def skip_space(text: str, at: int) -> int:
    """Index of the next character that is not JSON's white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def shown(text: str) -> str:
    """The beginning of `text` in quotes, on one line: for a message to the model."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at` or after white space, and the index after it.

    Raises:
        ValueError: there is none; its text says why, in a few words.
    """
    try:
        value, end = _DECODER.raw_decode(_document(text), skip_space(text, at))
        if isinstance(value, (str, list, dict, float)):
            # Raises for half a surrogate pair, as "\ud83d", and for 1e999, which is infinite.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from error
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # an integer that is too long, or an infinite number
        raise ValueError(re.split("[:;]", str(error))[0]) from error
    return value, end


def read_arguments(text: str, at: int, name: str) -> tuple[dict[str, Any], int]:
    """As `read_json`, for the arguments of the tool `name`, which are an object.

    Raises:
        Unreadable: there is none.
    """
    try:
        value, end = read_json(text, at)
    except ValueError as error:
        raise Unreadable(f"the arguments of {shown(name)} are no JSON: {error}", at, name) from None
    if not isinstance(value, dict):
        raise Unreadable(f"the arguments of {shown(name)} are no JSON object", at, name)
    return value, end


def read_call(
    value: Any, at: int, keys: Sequence[str] = ("arguments",)
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that is a JSON object, as `{"name": ..., "arguments": {...}}`.

    Args:
        value: the object, which begins at `at`.
        keys: the arguments are under one of them.

    Raises:
        Unreadable: it is no call, or has arguments under another key, where they would be lost.
    """
    if not isinstance(value, dict):
        raise Unreadable(f'the call is no JSON object with "name" and "{keys[0]}"', at)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable('the call has no "name" that is a text', at)
    given = [key for key in keys if key in value]
    if len(given) > 1:
        raise Unreadable(f"the call of {shown(name)} has both {' and '.join(given)}", at, name)
    if not given and value.keys() - {"name", "id", "type"}:
        raise Unreadable(f'the call of {shown(name)} has no "{keys[0]}"', at, name)
    arguments = value[given[0]] if given else {}
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {shown(name)} are no JSON object", at, name)
    return name, arguments


def calls_of(
    values: Sequence[Any], text: str, keys: Sequence[str] = ("arguments",)
) -> list[Attempt]:
    """The calls that are JSON objects, written together as `text`."""
    found: list[Attempt] = []
    for value in values[:MOST_CALLS]:
        try:
            name, arguments = read_call(value, 0, keys)
        except Unreadable as error:
            found.append(CallMistake(problem=error.problem, text=text, name=error.name))
        else:
            call_id = sound_id(value.get("id"))
            found.append(ParsedCall(name=name, arguments=arguments, text=text, call_id=call_id))
    if len(values) > MOST_CALLS:
        found.append(too_many(text))
    return found


def sound_id(value: Any) -> str | None:
    """The id that a model gave its call, if it is one that Mistral's templates take."""
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


def read_calls(text: str, at: int) -> tuple[list[Attempt], int]:
    """The calls of the JSON list that begins at `at`, and the index after it.

    Raises:
        Unreadable: it is no JSON, or empty.
    """
    try:
        values, end = read_json(text, at)
    except ValueError as error:
        raise Unreadable(f"the list of calls is no JSON: {error}", at) from None
    if not values:
        raise Unreadable("the list of calls is empty", at)
    return calls_of(values, text[at:end]), end


class _Document(str):
    """A text whose lines are not counted.

    A `JSONDecodeError` counts the lines before the error, from the start of the text. A text with
    many broken calls would take quadratic time.
    """

    __slots__ = ()

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


@lru_cache(maxsize=1)
def _document(text: str) -> _Document:
    """Copied once for a message, and not for each of its calls."""
    return _Document(text)


def _no_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is not allowed", "", 0)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
