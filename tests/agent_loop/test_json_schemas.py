"""The check of a model's values by a schema, within a limit of CPU time."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import Draft7Validator, Draft202012Validator

from agent_loop.json_schemas import CheckTooLong, broken_rule, check_schema, validator_of

SMALL = st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from([0.0, 1.0, "", "a", "ab"])
VALUES = st.recursive(
    SMALL,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)

SCHEMAS: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"items": {"uniqueItems": True}},
    {"patternProperties": {"^a": {"type": "string"}, "b": {"uniqueItems": True}}},
    {"patternProperties": {"a": {}}, "additionalProperties": False},
    {"patternProperties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"properties": {"b": {}}, "additionalProperties": False},
    {"pattern": "^a"},
    {"prefixItems": [{}], "unevaluatedItems": {"type": "integer"}},
    {"anyOf": [{"properties": {"a": {"type": "integer"}}}], "unevaluatedProperties": False},
]


@given(st.sampled_from(SCHEMAS), VALUES)
def test_a_value_is_right_if_the_library_says_so(schema: dict[str, Any], value: Any):
    is_right = Draft202012Validator(schema).is_valid(value)
    assert (broken_rule(validator_of(schema), value, 60.0) is None) == is_right


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


TREE = {"$ref": "#/$defs/tree"}
LISTS = [{"type": "array", "items": TREE}, {"type": "array", "items": TREE, "maxItems": 2}]
LONG = 60 * "a" + "!"
SLOW = "^(a|aa)+$"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**TREE, "$defs": {"tree": {"anyOf": LISTS}}}, nested(30)),
        ({**TREE, "$defs": {"tree": {"oneOf": LISTS}}}, nested(30)),
        ({**TREE, "$defs": {"tree": {"not": {"allOf": [TREE, {"not": TREE}]}}}}, 1),
        ({"pattern": SLOW}, LONG),
        ({"propertyNames": {"pattern": SLOW}}, {LONG: 1}),
        ({"patternProperties": {SLOW: {}}}, {LONG: 1}),
        ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, {LONG: 1}),
        ({"anyOf": [{"items": {"maximum": n}} for n in range(1000)]}, 3000 * [1000]),
        (
            {"dependentRequired": {str(n): [*map(str, range(500))] for n in range(400, 700)}},
            {str(n): 1 for n in range(400, 700)},
        ),
        ({"uniqueItems": True}, [{"a": [{"b": [n]}]} for n in range(100_000)]),
    ],
)
def test_a_check_that_takes_long_ends_at_its_limit(schema: dict[str, Any], value: Any):
    began = time.thread_time()
    with pytest.raises((CheckTooLong, RecursionError)):
        broken_rule(validator_of(schema), value, 0.05)
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"uniqueItems": True}, [{"a": n} for n in range(5000)]),
        ({"uniqueItems": True}, [[n, str(n)] for n in range(5000)]),
        ({"uniqueItems": True}, [[n * (2**61 - 1)] for n in range(8000)]),  # of one hash
        ({"contains": {"type": "integer"}, "unevaluatedItems": False}, [*range(5000)]),
        ({"additionalProperties": True, "unevaluatedProperties": False}, dict.fromkeys("abc", 1)),
    ],
)
def test_keywords_whose_check_could_be_quadratic_are_not(schema: dict[str, Any], value: Any):
    began = time.thread_time()
    assert broken_rule(validator_of(schema), value, 60.0) is None
    assert time.thread_time() - began < 2.0  # the library: 30 s for the first


def test_what_cannot_be_checked_in_time_is_left_to_the_tool():
    names = {"patternProperties": {"[": {}}, "additionalProperties": False}
    assert broken_rule(validator_of(names), {"a": "b"}, 60.0) is None
    assert broken_rule(validator_of({"pattern": "["}), "a", 60.0) is None
    both = {"patternProperties": {SLOW: {}}, "unevaluatedProperties": False}
    assert broken_rule(validator_of(both), {"b": 1}, 60.0) is None
    assert broken_rule(validator_of({"unevaluatedItems": False}), [1] * 1001, 60.0) is None


def test_a_draft_keeps_its_keywords():
    schema = {"$schema": Draft7Validator.META_SCHEMA["$schema"], "items": [{}, {"type": "null"}]}
    assert broken_rule(validator_of(schema), [1, None], 60.0) is None
    error = broken_rule(validator_of(schema), [1, 2], 60.0)
    assert error is not None and json.dumps([*error.absolute_path]) == "[1]"


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name():
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="tool='t': nested too deeply"):
        check_schema(schema, "tool='t'")
