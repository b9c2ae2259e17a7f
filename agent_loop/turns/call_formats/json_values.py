"""JSON values inside a model's text: where one ends, and which type unquoted text has.

Stricter than `json`: NaN, infinite numbers and halves of surrogate pairs are refused, because no
tool server accepts them.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")


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
    return _decode(_document(text), at)


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, at))
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


def read_untyped(text: str, schema: object, words: Mapping[str, Any]) -> Any:
    """The value of a parameter that a model wrote without quotes.

    Args:
        text: as written.
        schema: JSON schema of the parameter; None if there is none.
        words: further texts for a value, as Python's `True`; used if the schema has their type.

    Returns:
        `text` itself if the schema allows strings only. Else the JSON value of `text` if it has an
        allowed type. Else `text` if strings are allowed. Without a type in the schema: the JSON
        value, or `text` if it is no JSON.

    Raises:
        ValueError: strings are not allowed and `text` is no JSON.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    if types and word in words and _has_type(words[word], types):
        return words[word]
    try:
        value, end = _decode(text, 0)
        if end != len(text.rstrip()):
            raise ValueError(f"{shown(text[end:].strip())} follows the value")
    except ValueError:
        if types is None or "string" in types:
            return text
        raise
    if types and "string" in types and not _has_type(value, types):
        return text
    return value


def _types(schema: object) -> set[str] | None:
    """JSON types that a schema allows; None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {each for each in declared if isinstance(each, str)} or None
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            found = [_types(branch) for branch in branches]
            return set[str]().union(*(each or () for each in found)) if all(found) else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {name for value in values for name in _TYPES if _has_type(value, {name})} or None
    return None


def _has_type(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES[name]) for name in types if name in _TYPES)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


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
