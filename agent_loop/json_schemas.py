"""JSON schemas of users and MCP servers, and the check of a model's values within a CPU limit.

Nothing is fetched. The library jsonschema checks. It is stopped between two keywords or errors, so
the keywords whose own work grows faster than the value are written here: regular expressions and
`uniqueItems`.
"""

import json
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import regex
from jsonschema import SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, extend, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

OFFLINE: Any = Registry()
"""For validators. Without it, jsonschema would fetch a `$ref` to another document from its URL."""

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""


def check_schema(schema: dict[str, Any], name: str) -> None:
    """Refuse what is no JSON schema, or is not complete.

    Args:
        name: of the schema, in messages.

    Raises:
        ValueError: the schema breaks its standard, or has a `$ref` to what is not in it.
    """
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"{name}: no JSON schema ({error.message:.200}); correct it") from error
    except RecursionError as error:
        raise ValueError(f"{name}: nested too deeply to be checked; write it flatter") from error
    if (lost := _lost_reference(schema)) is not None:
        raise ValueError(
            f"{name}: $ref={lost!r} is not in the schema, and nothing is fetched; write it out"
        )


def resolver_of(schema: Mapping[str, Any]) -> Any:
    """What looks up the references of a schema; its `lookup` raises `Unresolvable`."""
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    base = resource.id() or ""
    return OFFLINE.with_resource(base, resource).resolver(base)


def _lost_reference(schema: Mapping[str, Any]) -> str | None:
    """A `$ref` that the schema itself does not answer; None if there is none."""
    resolver = resolver_of(schema)
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, Mapping):
            left += [value for key, value in part.items() if key not in _DATA]
            if isinstance(reference := part.get("$ref"), str):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    return reference
    return None


class CheckTooLong(Exception):
    """The check of a value takes more CPU time than it may."""


_MOST_UNEVALUATED = 1000
"""Most entries of a value of which `unevaluatedItems` and `unevaluatedProperties` are checked,
because the library takes quadratic time."""

_check = threading.local()
"""`until`: CPU time of the thread at which the check that it runs ends."""


def validator_of(schema: Mapping[str, Any]) -> Any:
    """The validator of a schema, for `broken_rule`.

    A regular expression that `regex` cannot read is not checked. Nor are `unevaluatedItems` and
    `unevaluatedProperties` in a schema with `patternProperties`, because the library would search
    these without a limit.
    """
    library = validator_for(schema)
    checks = {
        **library.VALIDATORS,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    most = 0 if '"patternProperties"' in json.dumps(schema) else _MOST_UNEVALUATED
    for name in ("unevaluatedItems", "unevaluatedProperties"):
        if name in checks:
            checks[name] = partial(_unevaluated, most, checks[name])
    in_time = {name: partial(_in_time, check) for name, check in checks.items()}
    return extend(library, in_time)(schema, registry=OFFLINE)


def broken_rule(validator: Any, value: Any, limit_s: float) -> ValidationError | None:
    """The rule of its schema that a value breaks; None if it breaks none.

    Args:
        validator: of `validator_of`.
        limit_s: CPU time of this thread, so the load of the machine does not count.

    Raises:
        CheckTooLong: the time is over.
        RecursionError, OverflowError, ValueError: the library cannot check the value.
    """
    _check.until = time.thread_time() + limit_s
    return best_match(validator.iter_errors(value))


def _left_s() -> float:
    if (left_s := _check.until - time.thread_time()) <= 0:
        raise CheckTooLong
    return left_s


# --- keywords: (validator, the keyword's value, the value to check, its schema) -> errors ---------


def _in_time(check: Any, *arguments: Any) -> Iterator[ValidationError]:
    _left_s()
    for error in check(*arguments) or ():
        _left_s()
        yield error


def _matches(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_left_s()) is not None
    except TimeoutError as error:
        raise CheckTooLong from error
    except regex.error:
        return True


def _pattern(_: Any, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(text, str) and not _matches(pattern, text):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any
) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(value, dict) else ():
        for name in value:
            if _matches(pattern, name):
                yield from validator.descend(value[name], part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, rule: Any, value: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if patterns := schema.get("patternProperties") if isinstance(value, dict) else None:
        value = {n: v for n, v in value.items() if not any(_matches(p, n) for p in patterns)}
        schema = {key: part for key, part in schema.items() if key != "patternProperties"}
    yield from Draft202012Validator.VALIDATORS["additionalProperties"](
        validator, rule, value, schema
    )


def _unevaluated(
    most: int, check: Any, validator: Any, rule: Any, value: Any, schema: Any
) -> Iterator[ValidationError] | None:
    is_long = isinstance(value, list | dict) and len(value) > most
    return None if is_long else check(validator, rule, value, schema)


def _unique_items(_: Any, is_wanted: bool, items: Any, schema: Any) -> Iterator[ValidationError]:
    if is_wanted and isinstance(items, list) and len({*map(_key, items)}) < len(items):
        yield ValidationError(f"{items!r} has non-unique elements")


def _key(value: Any) -> Hashable:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not.

    Numbers become texts, because anybody can write thousands of integers with the same hash.
    """
    if isinstance(value, list | dict):
        _left_s()
    if isinstance(value, list):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return frozenset((name, _key(each)) for name, each in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int, str(int(value) if value == int(value) else value)
    return (bool, value) if isinstance(value, bool) else value
