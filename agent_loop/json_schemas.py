"""JSON schemas that a user or an MCP server writes: their check, without fetching anything."""

from collections.abc import Mapping
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import validator_for
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
    if (lost := _lost_reference(schema)) is not None:
        raise ValueError(
            f"{name}: $ref={lost!r} is not in the schema, and nothing is fetched; write it out"
        )


def _lost_reference(schema: Mapping[str, Any]) -> str | None:
    """A `$ref` that the schema itself does not answer; None if there is none."""
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    base = resource.id() or ""
    resolver = OFFLINE.with_resource(base, resource).resolver(base)
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
