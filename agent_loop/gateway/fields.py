"""The fields of JSON objects that come from programs we do not know.

A field that has the wrong type raises a `WireError` which names the place, the value and the rule.
A field that nobody reads raises nothing: its name is collected for `ModelRequest.ignored`.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from agent_loop.gateway.wire import WireError
from agent_loop.turns.call_formats.json_values import shown

MAX_DEPTH = 64
"""Deepest nesting of a tool's schema and of a call's arguments. Chat templates walk through both
by recursion; Python's limit of 1000 frames would end a request there with an error of ours."""

MOST_TOKENS = 2**31 - 1
Made = TypeVar("Made")
_INDEX = re.compile(r"\[\d+\]")
_INT64 = 2**63

MOST_KNOWN, MOST_KNOWN_EACH = 64 << 20, 64 << 10
"""Bytes of MessagePack by which objects are remembered: of all, and of one."""

KNOWN_OVERHEAD = 1 << 10
"""Bytes that a remembered object takes besides those."""

_known: "dict[tuple[Any, bytes], tuple[Any, set[str]]]" = {}
_known_bytes = 0


class Fields:
    """The fields of one JSON object. Each field is read once; null means that it was not given."""

    __slots__ = ("_ignored", "_ignored_below", "_left", "_opened", "place")

    def __init__(
        self, value: object, place: str = "", opened: "list[Fields] | None" = None
    ) -> None:
        """
        Args:
            value: a JSON value; raises if it is no object.
            place: where it lies in the request: `messages[2].content[0]`; empty for the request.
            opened: all objects of the request that were opened so far; None for the request.
        """
        if not isinstance(value, dict):
            raise wrong(place, value, "must be a JSON object")
        self.place = place
        self._left = dict(value)
        self._ignored: set[str] = set()
        self._ignored_below: set[str] = set()
        """Whole names, of objects that are remembered."""

        self._opened = [] if opened is None else opened
        self._opened.append(self)

    def at(self, name: str) -> str:
        """Place of a field, for messages."""
        return f"{self.place}.{name}" if self.place else name

    def take(self, name: str) -> object:
        """The value of a field, of any type. Null and a missing field are the same."""
        return self._left.pop(name, None)

    def is_text(self, name: str) -> bool:
        """Whether a field holds text. The field stays unread."""
        return isinstance(self._left.get(name), str)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else _checked_text(value, self.at(name))

    def needed_text(self, name: str) -> str:
        return _checked_text(self.take(name), self.at(name))

    def needed_name(self) -> str:
        """The field `name`, which is not empty."""
        if not (name := self.needed_text("name")):
            raise wrong(self.at("name"), name, "must not be empty")
        return name

    def texts(self, name: str) -> list[str]:
        """A text, or a list of texts."""
        value = self.take(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return [_checked_text(each, self.at(name)) for each in listed]

    def flag(self, name: str) -> bool | None:
        return self._typed(name, (bool,), "must be true or false")

    def integer(self, name: str, least: int = -_INT64, most: int = _INT64 - 1) -> int | None:
        if self._left.get(name) is None:
            return self.take(name)  # type: ignore[return-value]
        rule = f"must be an integer from {least} to {most}"
        return self._between(name, (int,), least, most, rule)

    def number(self, name: str, least: float, most: float) -> float | None:
        if self._left.get(name) is None:
            return self.take(name)  # type: ignore[return-value]
        rule = f"must be a number from {least} to {most}"
        return self._between(name, (int, float), least, most, rule)

    def json_object(self, name: str) -> dict[str, Any] | None:
        """A JSON object whose fields are not ours to read, such as a tool's schema."""
        value = self._typed(name, (dict,), "must be a JSON object")
        try:
            check_json(value)
        except ValueError as error:
            raise wrong(self.at(name), value, str(error)) from None
        return value

    def object(self, name: str) -> "Fields | None":
        return None if self._left.get(name) is None else self.needed_object(name)

    def needed_object(self, name: str) -> "Fields":
        return Fields(self.take(name), self.at(name), self._opened)

    def objects(self, name: str) -> "list[Fields]":
        """The objects of a list."""
        return [Fields(each, place, self._opened) for each, place in self._elements(name)]

    def each(self, name: str, make: "Callable[[Fields], Made]") -> "list[Made]":
        """What `make` makes of each object of a list, remembered by its content: an agent sends
        its history and its tools again with each request. Nobody may change it."""
        return [self._made(each, place, make) for each, place in self._elements(name)]

    def needed_each(self, name: str, make: "Callable[[Fields], Made]") -> "list[Made]":
        """As `each`, of a list that is not empty."""
        return self._not_empty(name, self.each(name, make))

    def _elements(self, name: str) -> list[tuple[Any, str]]:
        """The elements of a list, with their places."""
        listed, place = self._typed(name, (list,), "must be a list"), self.at(name)
        return [(each, f"{place}[{i}]") for i, each in enumerate(listed or ())]

    def _made(self, value: Any, place: str, make: "Callable[[Fields], Made]") -> "Made":
        global _known_bytes
        try:
            key = (make, msgspec.msgpack.encode(value))  # JSON would write NaN as null
        except (ValueError, OverflowError, RecursionError):  # half of a pair, a huge integer
            return make(Fields(value, place, self._opened))
        if (known := _known.get(key)) is None:
            begun = len(self._opened)
            made = make(Fields(value, place, self._opened))
            known = made, _unread(self._opened[begun:])
            del self._opened[begun:]
            if (size := len(key[1]) + KNOWN_OVERHEAD) <= MOST_KNOWN_EACH:
                if _known_bytes + size > MOST_KNOWN:
                    _known.clear()
                    _known_bytes = 0
                _known[key] = known
                _known_bytes += size
        self._ignored_below |= known[1]
        return known[0]

    def needed_objects(self, name: str) -> "list[Fields]":
        """The objects of a list that is not empty."""
        return self._not_empty(name, self.objects(name))

    def _not_empty(self, name: str, found: list[Any]) -> list[Any]:
        if not found:
            raise wrong(self.at(name), [], "must not be empty")
        return found

    def require(self, name: str) -> None:
        """Raise if the field was not given. It stays unread."""
        if self._left.get(name) is None:
            raise wrong(self.at(name), None, "is required")

    def refuse(self, name: str, rule: str) -> None:
        """Raise if the field was given."""
        if (value := self.take(name)) is not None:
            raise unsupported(self.at(name), value, rule)

    def skip(self, *names: str) -> None:
        """Fields of our own replies, which clients send back and which ask for nothing."""
        for name in names:
            self._left.pop(name, None)

    def ignore(self, name: str) -> None:
        """A field that was read and has no effect."""
        self._ignored.add(name)

    def ignored(self) -> tuple[str, ...]:
        """`ModelRequest.ignored`; called for the request, after all its fields were read."""
        return tuple(sorted(_unread(self._opened) | self._ignored_below))

    def _typed(self, name: str, types: tuple[type, ...], rule: str) -> Any:
        value = self.take(name)
        if value is None or type(value) in types:  # true is an instance of int, too
            return value
        raise wrong(self.at(name), value, rule)

    def _between(
        self, name: str, types: tuple[type, ...], least: float, most: float, rule: str
    ) -> Any:
        value = self._typed(name, types, rule)
        if value is None or least <= value <= most:  # NaN is not
            return value
        raise wrong(self.at(name), value, rule)


def _unread(opened: "list[Fields]") -> set[str]:
    """Names of the fields of these objects that nobody read or that have no effect."""
    names: set[str] = set()
    for fields in opened:
        unread = {name for name, value in fields._left.items() if value is not None}
        if not unread and not fields._ignored:
            continue
        before = _INDEX.sub("", fields.place) + "." if fields.place else ""
        for name in unread | fields._ignored:
            is_plain = name.isprintable() and len(name) <= 40
            names.add(before + (name if is_plain else shown(name)))
    return names


def wrong(place: str, value: object, rule: str) -> WireError:
    """The error of a value that breaks a rule of the protocol."""
    return WireError(f"{place or 'body'}={_short(value)}: {rule}", param=place or None)


def unsupported(place: str, value: object, rule: str) -> WireError:
    """The error of a value that the protocol allows and this gateway does not."""
    message = f"{place}={_short(value)}: {rule}"
    return WireError(message, code="unsupported_value", param=place)


def check_json(value: object) -> None:
    """Raise a ValueError if `value` is nested too deeply, or if UTF-8 JSON text cannot hold it."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [each for each in level if isinstance(each, (dict, list))]
        if not nested:
            break
        level = [v for each in nested for v in (each.values() if isinstance(each, dict) else each)]
    else:
        raise ValueError(f"must not be nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair") from None
    except ValueError:  # also an integer with more digits than Python writes
        raise ValueError("must not hold a number that is no JSON number") from None


def _checked_text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, value, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # a tokenizer would raise the same, inside the rollout
        raise wrong(place, value, "must not hold half of a surrogate pair") from None
    return value


def _short(value: object) -> str:
    """A value in an error message, on one line and of bounded length."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value)
