"""JSON values inside a model's text: where one ends.

Stricter than `json`: NaN, infinite numbers and halves of surrogate pairs are refused, because no
tool server accepts them.
"""

import json
import re
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
