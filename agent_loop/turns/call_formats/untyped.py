"""The value of a parameter that a model wrote without quotes, by the JSON schema of its tool.

`<parameter=kind>1</parameter>` is the text "1" or the number 1. The schema says which, through its
references and combinations. Only types, `enum` and `const` are looked at: whether the value breaks
another rule is checked later, and the model then reads the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_loop.json_schemas import resolver_of
from agent_loop.turns.call_formats.json_values import read_json, shown
from agent_loop.turns.call_formats.message import Schemas

Place = tuple[Any, Any]
"""A schema, and what looks up its references: `json_schemas.resolver_of` of the whole schema."""

TEXT: Sequence[Place] = (({"type": "string"}, None),)
JSON: Sequence[Place] = (({"type": "any JSON"}, None),)
"""A value that is no text, and one that is JSON."""


def schemas_of(schemas: Schemas, tool: str, parameter: str) -> list[Place]:
    """The schemas of a parameter; several if the tool's schema combines some, none if it has none.

    A parameter that is not named has the schema of `additionalProperties`.
    """
    root = schemas.get(tool, {})
    named, others, seen = list[Place](), list[Place](), set[int]()
    left = [(root, _resolver(root))]
    while left:
        schema, resolver = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            named.append((properties[parameter], resolver))
        elif "additionalProperties" in schema:
            others.append((schema["additionalProperties"], resolver))
        left += [place for group in _parts(schema, resolver) for place in group]
    return named or others


def read_untyped(text: str, places: Sequence[Place], words: Mapping[str, Any]) -> Any:
    """The value that a model wrote as `text`.

    The value is the JSON value of the text if the schema allows it, else the text itself if the
    schema allows it. A text that may be one is never taken out of its quotes. If the schema allows
    neither, the same is asked of their types only. Without a schema: the JSON value, or the text if
    it is no JSON.

    Args:
        text: as written.
        places: see `schemas_of`.
        words: further texts for a value, as Python's `True`; used if the schema has their type.

    Raises:
        ValueError: strings are not allowed and `text` is no JSON.
    """

    def fits(value: Any, is_like: Callable[[Any, Any], bool]) -> bool:
        return not places or any(_allows(value, *place, is_like, {}) for place in places)

    is_typed = not fits(_NO_TYPE, _same_type)
    may_be_text = fits(text, _same_type)
    found: list[Any] = []
    word = text.strip()
    try:
        if is_typed and word in words and fits(words[word], _same_type):
            found.append(words[word])
        else:
            found.append(_whole_json(text))
    except ValueError:
        if not may_be_text:
            raise
    if may_be_text:
        found = [each for each in found if not (is_typed and isinstance(each, str))] + [text]
    for is_like in (_equal, _same_type):
        for value in found:
            if fits(value, is_like):
                return value
    return found[0]


def _whole_json(text: str) -> Any:
    value, end = read_json(text, 0)
    if end != len(text.rstrip()):
        raise ValueError(f"{shown(text[end:].strip())} follows the value")
    return value


def _allows(
    value: Any,
    schema: object,
    resolver: Any,
    is_like: Callable[[Any, Any], bool],
    seen: dict[int, bool],
) -> bool:
    """Whether the types and the values that a schema names allow a value.

    Args:
        is_like: compares the value with one of `enum` or `const`.
        seen: schemas that were asked, so that the time is linear and a schema that refers to
            itself ends.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    if id(schema) not in seen:
        seen[id(schema)] = False
        types, values = schema.get("type"), schema.get("enum")
        names = [types] if isinstance(types, str) else types
        if isinstance(names, list) and not any(_has_type(value, name) for name in names):
            return False
        if isinstance(values, list) and not any(is_like(value, each) for each in values):
            return False
        if "const" in schema and not is_like(value, schema["const"]):
            return False
        seen[id(schema)] = all(
            any(_allows(value, *place, is_like, seen) for place in group)
            for group in _parts(schema, resolver)
        )
    return seen[id(schema)]


def _parts(schema: Mapping[str, Any], resolver: Any) -> list[list[Place]]:
    """The schemas inside a schema that judge the same value: one of each group must allow it."""
    groups: list[list[Place]] = []
    for key in ("$ref", "$dynamicRef"):
        if isinstance(reference := schema.get(key), str):
            try:
                target = resolver.lookup(reference)
            except Exception:  # an agent behind the gateway may send any schema
                continue
            groups.append([(target.contents, target.resolver)])
    if isinstance(parts := schema.get("allOf"), list):
        groups += [[(part, resolver)] for part in parts]
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            groups.append([(part, resolver) for part in parts])
    return groups


def _resolver(root: Mapping[str, Any]) -> Any:
    try:
        return resolver_of(root)
    except Exception:  # as above
        return None


_NO_TYPE = object()
"""Only a schema that names no type and no value allows it."""


def _has_type(value: Any, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(name, str) and isinstance(value, _TYPES.get(name, ()))


def _same_type(value: Any, other: Any) -> bool:
    return any(_has_type(value, name) and _has_type(other, name) for name in _TYPES)


def _equal(value: Any, other: Any) -> bool:
    return value == other and _same_type(value, other)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
