"""Requests of programs that we do not know, as typed objects.

The types of a protocol are `Form`s. A value of a wrong type raises a `WireError` that names its
place and the rule. A field that no form has is named in `ModelRequest.ignored`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from agent_loop.gateway.wire import WireError
from agent_loop.turns.call_formats.json_values import shown

MAX_DEPTH = 64
"""Deepest nesting of a tool's schema and of a call's arguments. Chat templates walk through both
by recursion; Python's limit of 1000 frames would end a request there with an error of ours."""

MOST_KNOWN, MOST_KNOWN_BYTES = 4096, 4 << 10
"""Objects of a kind that are remembered, and the largest size of each: at most 16 MiB."""

_MISTAKE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
"""A message of msgspec, with its place."""

_MISSING = re.compile(r"Object missing required field `(.*)`")
F = TypeVar("F", bound="Form")
T = TypeVar("T")


class Form(msgspec.Struct, kw_only=True):
    """A JSON object of a request. Null and a missing field are the same."""

    skipped: ClassVar[tuple[str, ...]] = ()
    """Fields of our own replies, which clients send back and which ask for nothing."""

    ignored: ClassVar[tuple[str, ...]] = ()
    """Names for an object that as a whole has no effect."""

    neutral: ClassVar[dict[str, float]] = {}
    """Values of other fields that ask for nothing, besides null."""

    refused: ClassVar[dict[str, str]] = {}
    """Fields that are refused, and what to do instead."""


def read(body: object, kind: type[F]) -> tuple[F, set[str]]:
    """A request, and the names of its fields that have no effect.

    Raises:
        WireError: it is no such request.
    """
    try:
        form = _converted(body, kind)
        return form, set(_unread(body, form))
    except WireError as error:
        raise below("", error) from None


class Each(Generic[T]):
    """Reads the objects of a list, and remembers them by their content, because an agent sends its
    history and its tools again with each request. Nobody may change what is made of one.

    Args:
        kind: their type, or types.
        make: what to make of each.
    """

    def __init__(self, kind: Any, make: Callable[[Any], T]) -> None:
        self._kind, self._make = kind, make
        self._known: dict[bytes, tuple[T, set[str]]] = {}

    def read(self, name: str, values: Iterable[Any] | None, ignored: set[str]) -> list[T]:
        """What is made of the objects of a field. The names of theirs that have no effect are added
        to `ignored`."""
        made = list[T]()
        for number, value in enumerate(values or ()):
            try:
                key = msgspec.msgpack.encode(value)
            except (OverflowError, ValueError):  # an integer that is too long for it
                key = b""
            if (known := self._known.get(key)) is None:
                try:
                    form = _converted(value, self._kind)
                    known = self._make(form), {f"{name}.{each}" for each in _unread(value, form)}
                except WireError as error:
                    raise below(f"{name}[{number}]", error) from None
                if 0 < len(key) <= MOST_KNOWN_BYTES:
                    if len(self._known) >= MOST_KNOWN:
                        self._known.clear()
                    self._known[key] = known
            made.append(known[0])
            if known[1]:
                ignored |= known[1]
        return made


def wrong(place: str, rule: str, code: str = "invalid_value") -> WireError:
    """The error of a value that breaks a rule. A place within an object begins with a dot."""
    return WireError(f"{place}: {rule}", code=code, param=place)


def unsupported(place: str, rule: str) -> WireError:
    """The error of a value that the protocol allows and this gateway does not."""
    return wrong(place, rule, "unsupported_value")


def below(place: str, error: WireError) -> WireError:
    """An error of an object that lies at this place."""
    where, message = (f"{place}{text}".lstrip(".") for text in (error.param, error.message))
    return WireError(message if where else f"body{message}", code=error.code, param=where or None)


def check_depth(value: object, place: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
    raise wrong(place, f"must not be nested deeper than {MAX_DEPTH} levels")


def _converted(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        match = _MISTAKE.fullmatch(str(error))
        assert match is not None
        rule, place = match.groups("")
        if missing := _MISSING.fullmatch(rule):
            rule, place = "is required", f"{place}.{missing[1]}"
        if rule.startswith("Invalid") and place.endswith(".type"):
            served = "the policy reads and writes text, JSON objects and calls of function tools"
            raise unsupported(place, f"{rule[:100]}, which is not served: {served}") from None
        raise wrong(place[:100], rule[:100]) from None


def _unread(value: Any, form: Form, place: str = "") -> Iterator[str]:
    """Names of fields without an effect: nested ones have dots and no indexes."""
    config, before = form.__struct_config__, re.sub(r"\[\d+\]", "", place).lstrip(".")
    names = dict(zip(form.__struct_encode_fields__, form.__struct_fields__, strict=True))
    yield from (f"{before}.{name}".lstrip(".") for name in form.ignored)
    for name in value.keys() - names.keys() - {config.tag_field, *form.skipped}:
        if value[name] in (None, form.neutral.get(name)):
            continue
        if (rule := form.refused.get(name)) is not None:
            raise unsupported(f"{place}.{name}", rule)
        is_plain = name.isprintable() and len(name) <= 40
        yield f"{before}.{name if is_plain else shown(name)}".lstrip(".")
    for name, own in names.items():
        inner = getattr(form, own)
        if isinstance(inner, Form):
            yield from _unread(value[name], inner, f"{place}.{name}")
        elif isinstance(inner, list):
            for number, each in enumerate(inner):
                if isinstance(each, Form):
                    yield from _unread(value[name][number], each, f"{place}.{name}[{number}]")
