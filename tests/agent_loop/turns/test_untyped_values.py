"""Values without quotes: the tool's schema says whether `5` is a number or a text."""

import json
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agent_loop.turns.call_formats import FORMATS, ParsedCall
from agent_loop.turns.call_formats.untyped import read_untyped, schemas_of
from tests.fakes.call_writers import WRITERS

S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741
NULL = {"type": "null"}
WORDS = {"True": True, "False": False, "None": None}


def read(text: str, schema: Any, words: Any = WORDS, defs: Any = None) -> Any:
    """`text` as the parameter `p` whose schema is `schema`."""
    root = {"properties": {} if schema is None else {"p": schema}, "$defs": defs or {}}
    return read_untyped(text, schemas_of({"tool": root}, "tool", "p"), words)


VALUES: list[tuple[str, Any, Any]] = [
    *[("5", S, "5"), (" 5\n", S, " 5\n"), ("null", S, "null"), ('"a"', S, '"a"'), ("", S, "")],
    *[
        ("5", I, 5),
        (" 5 ", I, 5),
        ("5.5", I, 5.5),
        ('"5"', I, "5"),
        ("1e3", {"type": "number"}, 1e3),
    ],
    *[("true", {"type": "boolean"}, True), ("True", {"type": "boolean"}, True)],
    *[("[1]", {"type": "array"}, [1]), ('{"a": 1}', {"type": "object"}, {"a": 1})],
    *[
        ("5", {"anyOf": [S, I]}, 5),
        ("5.5", {"anyOf": [S, I]}, "5.5"),
        ("x", {"anyOf": [S, I]}, "x"),
    ],
    *[
        ("null", {"oneOf": [S, {"type": "null"}]}, None),
        ("5", {"oneOf": [S, {"type": "null"}]}, "5"),
    ],
    *[
        ("None", {"type": ["string", "null"]}, None),
        ("true", {"type": ["integer", "string"]}, "true"),
    ],
    *[("5", None, 5), ("x y", None, "x y"), ("True", None, "True"), ("NaN", None, "NaN")],
    *[
        ("5", {}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"const": 5}, 5),
        ("5", {"anyOf": 3}, 5),
    ],
    *[("5 6", None, "5 6"), ("1e999", None, "1e999"), ("5", {"anyOf": [S, {"$ref": "#"}]}, 5)],
]


@pytest.mark.parametrize(("text", "schema", "value"), VALUES)
def test_the_schema_says_which_type_a_text_without_quotes_has(text, schema, value):
    words = {"True": True, "False": False, "None": None}
    got = read(text, schema, words)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("text", ["x", "", "5x", "NaN", "[1", "9" * 5000, "True"])
def test_a_text_that_is_no_json_is_a_mistake_if_the_schema_wants_no_text(text):
    with pytest.raises(ValueError, match=r"Expecting|follows|allowed|limit"):
        read(text, I, {"True": True})


DEFS = {
    "Kind": {"type": "string", "enum": ["1", "gift"]},
    "Number": {"enum": [1, 2]},
    "Mixed": {"enum": ["1", 2, None]},
    "Alias": {"$ref": "#/$defs/Kind"},
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    "Json": {"anyOf": [S, {"type": "array", "items": {"$ref": "#/$defs/Json"}}]},
    "Self": {"anyOf": [S, {"$ref": "#/$defs/Self"}]},
    "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}]},
}


def of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


REFERENCES: list[tuple[str, Any, Any]] = [
    *[("1", of("Kind"), "1"), ("1", of("Alias"), "1"), ("1", of("Number"), 1)],
    *[("7", of("Kind"), "7"), ("7", of("Number"), 7)],  # wrong, and of the right type
    ("1", {**of("Kind"), "description": "beside a reference", "default": "gift"}, "1"),
    *[("1", {"allOf": [of("Kind")]}, "1"), ("true", {"allOf": [S, {"minLength": 1}]}, "true")],
    *[("1", {"anyOf": [of("Kind"), NULL]}, "1"), ("null", {"anyOf": [of("Kind"), NULL]}, None)],
    *[("1", {"oneOf": [NULL, of("Kind")]}, "1"), ("1", {"anyOf": [of("Kind"), I]}, 1)],
    *[("1", of("Mixed"), "1"), ("2", of("Mixed"), 2), ("null", of("Mixed"), None)],
    *[("null", {"enum": ["null", "x"]}, "null"), ("1", {"const": "1"}, "1")],
    *[("null", {"type": ["string", "null"], "enum": ["1", None]}, None)],
    *[("1.0", {"anyOf": [{"type": "number"}, S]}, 1.0), ("1.0", {"anyOf": [I, S]}, "1.0")],
    ("5", of("Self"), "5"),
    *[("[1]", of("Json"), [1]), ("5", of("Json"), "5"), ('{"next": {}}', of("Node"), {"next": {}})],
    *[('"x"', {"anyOf": [S, NULL]}, '"x"'), ('"x"', {"anyOf": [S, I]}, '"x"')],
    *[("1", {"$ref": "#/definitions/Nothing"}, 1), ("x", {"$ref": "http://h/x.json"}, "x")],
    *[("1", {"$ref": 3}, 1), ("1", {"$ref": "#/$defs/Kind/enum/x"}, 1), ("1", True, 1)],
]


@pytest.mark.parametrize(("text", "schema", "value"), REFERENCES)
def test_references_and_combinations_say_the_type(text, schema, value):
    got = read(text, schema, defs=DEFS)
    assert (got, type(got)) == (value, type(value))


def test_a_schema_that_refers_only_to_itself_ends():
    with pytest.raises(ValueError, match="Expecting value"):
        read("x", of("Loop"), defs=DEFS)


@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"p": S}}}},
        {"allOf": [{"properties": {"q": I}}, {"properties": {"p": S}}]},
        {"definitions": {"T": S}, "properties": {"p": {"$ref": "#/definitions/T"}}},
        {"$id": "http://h/a.json", "$defs": {"T": S}, "properties": {"p": {"$ref": "#/$defs/T"}}},
        {"properties": {"q": I}, "additionalProperties": S},
        {"properties": {"p": {"$ref": "#t"}}, "$defs": {"T": {"$anchor": "t", **S}}},
    ],
)
def test_the_schema_of_a_parameter_is_found_where_the_tool_s_schema_puts_it(root):
    assert read_untyped("5", schemas_of({"tool": root}, "tool", "p"), {}) == "5"


@pytest.mark.parametrize(
    "root", [{"$id": 3}, {"$schema": 3}, {"properties": 3}, {"$ref": "#/%"}, True, {"allOf": 3}]
)
def test_a_schema_that_is_none_says_nothing(root):
    assert read_untyped("5", schemas_of({"tool": root}, "tool", "p"), {}) == 5


class Color(Enum):
    RED = "1"
    BLUE = "true"


class Size(IntEnum):
    SMALL = 1


class Item(BaseModel):
    color: Color


class Order(BaseModel):
    color: Color
    maybe: Color | None = None
    size: Size
    item: Item
    items: list[Item]
    by_name: dict[str, Item]
    code: Annotated[str, Field(pattern="^[0-9]+$")] | None
    literal: Literal["1", "2"]
    number: int | float


ORDER: dict[str, Any] = {
    "color": "true",
    "maybe": "1",
    "size": 1,
    "item": {"color": "1"},
    "items": [{"color": "true"}],
    "by_name": {"1": {"color": "1"}},
    "code": "42",
    "literal": "2",
    "number": 2.5,
}


@pytest.mark.parametrize("name", ["deepseek_v4", "glm", "minimax", "qwen3_coder", "seed"])
def test_arguments_are_read_as_a_pydantic_model_means_them(name):
    text = WRITERS[name].message([("order", ORDER)])
    (call,) = FORMATS[name].parse(text, {"order": Order.model_json_schema()}).calls
    assert isinstance(call, ParsedCall) and call.arguments == ORDER


_LEAVES = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "array"]).map(
        lambda name: {"type": name}
    ),
    st.lists(st.sampled_from(["1", "x", "null", 1, 2.5, True, None]), min_size=1).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["1", 1, None]).map(lambda value: {"const": value}),
    st.sampled_from(["a", "b"]).map(of),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"allOf": parts}),
    ),
    max_leaves=6,
)


@given(
    schema=_SCHEMAS,
    defs=st.fixed_dictionaries(
        {"a": _LEAVES.filter(lambda each: "$ref" not in each), "b": _LEAVES}
    ),
    text=st.sampled_from(["1", "x", "null", "2.5", "true", "[1]", "[", ""]),
)
def test_a_value_that_jsonschema_takes_is_read_as_that_value(schema, defs, text):
    assume("$ref" not in defs["a"] and defs["b"] != of("b"))
    validator = jsonschema.Draft202012Validator({**schema, "$defs": defs})
    try:
        values = [json.loads(text), text]
    except ValueError:
        values = [text]
    right = [value for value in values if validator.is_valid(value)]
    if right:
        got = read(text, schema, {}, defs)
        assert (got, type(got)) == (right[0], type(right[0]))
