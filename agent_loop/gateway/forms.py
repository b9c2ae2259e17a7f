"""Requests of programs that we do not know, as typed objects.

The types of a protocol are `Form`s. A value of a wrong type raises a `WireError` that names its
place and the rule. A field that no form has is named in `ModelRequest.ignored`.
"""

import re
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

import msgspec

from agent_loop.gateway.wire import WireError
from agent_loop.turns.call_formats.json_values import shown

MAX_DEPTH = 64
"""Deepest nesting of a tool's schema and of a call's arguments. Chat templates walk through both
by recursion; Python's limit of 1000 frames would end a request there with an error of ours."""

_MISTAKE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
"""A message of msgspec, with its place."""

_MISSING = re.compile(r"Object missing required field `(.*)`")
F = TypeVar("F", bound="Form")


class Form(msgspec.Struct, kw_only=True):
    """A JSON object of a request. Null and a missing field are the same."""

    skipped: ClassVar[tuple[str, ...]] = ()
    """Fields of our own replies, which clients send back and which ask for nothing."""

    neutral: ClassVar[dict[str, float]] = {}
    """Values of other fields that ask for nothing, besides null."""

    refused: ClassVar[dict[str, str]] = {}
    """Fields that are refused, and what to do instead."""


def read(body: Any, kind: type[F]) -> tuple[F, set[str]]:
    """A request, and the names of its fields that have no effect.

    Raises:
        WireError: it is no such request.
    """
    try:
        form = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    ignored = set[str]()
    _note_unread(body, form, "", "", ignored)
    return form, ignored


def wrong(place: str, rule: str, code: str = "invalid_value") -> WireError:
    """The error of a value that breaks a rule. The body itself has no name."""
    return WireError(f"{place or 'body'}: {rule}", code=code, param=place or None)


def unsupported(place: str, rule: str) -> WireError:
    """The error of a value that the protocol allows and this gateway does not."""
    return wrong(place, rule, "unsupported_value")


def check_depth(value: object, place: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
    raise wrong(place, f"must not be nested deeper than {MAX_DEPTH} levels")


def _refusal(mistake: str) -> WireError:
    """The error for a message of msgspec."""
    match = _MISTAKE.fullmatch(mistake)
    assert match is not None
    rule, place = match.groups("")
    if missing := _MISSING.fullmatch(rule):
        rule, place = "is required", f"{place}.{missing[1]}"
    place = place.lstrip(".")
    if rule.startswith("Invalid") and place.endswith(".type"):
        served = "the policy reads and writes text, JSON objects and calls of function tools"
        return unsupported(place, f"{rule[:100]}, which is not served: {served}")
    return wrong(place[:100], rule[:100])


def _note_unread(value: Any, form: Form, at: str, above: str, names: set[str]) -> None:
    """Note the names of fields without an effect: nested ones have dots and no indexes.

    Args:
        at: what stands before a field's name in its place.
        above: the same without indexes.
    """
    known, with_forms = _fields(type(form))
    for name in () if value.keys() <= known else value.keys() - known:
        if value[name] in (None, form.neutral.get(name)):
            continue
        if (rule := form.refused.get(name)) is not None:
            raise unsupported(f"{at}{name}", rule)
        is_plain = name.isprintable() and len(name) <= 40
        names.add(f"{above}{name if is_plain else shown(name)}")
    for name, own in with_forms:
        inner = getattr(form, own)
        if isinstance(inner, Form):
            _note_unread(value[name], inner, f"{at}{name}.", f"{above}{name}.", names)
        elif isinstance(inner, list):
            for number, each in enumerate(inner):
                if isinstance(each, Form):
                    place = f"{at}{name}[{number}]."
                    _note_unread(value[name][number], each, place, f"{above}{name}.", names)


@cache
def _fields(kind: type[Form]) -> tuple[frozenset[str | None], list[tuple[str, str]]]:
    """Names that a form knows; and name and attribute of its fields that may hold forms."""
    known = {*kind.__struct_encode_fields__, kind.__struct_config__.tag_field, *kind.skipped}
    fields = msgspec.structs.fields(kind)
    return frozenset(known), [(f.encode_name, f.name) for f in fields if _may_hold_form(f.type)]


def _may_hold_form(kind: Any) -> bool:
    is_form = isinstance(kind, type) and issubclass(kind, Form)
    return is_form or any(map(_may_hold_form, get_args(kind)))
