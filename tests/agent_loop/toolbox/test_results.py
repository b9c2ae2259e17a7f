"""The text of what a function returned: JSON, or a fault that says why it is none."""

import datetime
import json
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agent_loop.toolbox.results import text_of
from tool_server.wire.protocol import Again, ToolUnavailable

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(JSON.filter(lambda value: value is not None and not isinstance(value, str)))
def test_json_s_own_types_are_written_as_json_writes_them(value: Any):
    assert text_of(value, "t") == json.dumps(value, ensure_ascii=False)


@dataclass
class Point:
    x: float
    y: Any = None


class Order(BaseModel):
    number: str = "A1"


class Unit(Enum):
    BOX = "box"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("a\0b", "a\0b"),
        (b"caf\xc3\xa9", "café"),
        ((1, (2,)), "[1, [2]]"),
        ({1}, "[1]"),
        ({1: {"a": b"b"}, None: 2}, '{"1": {"a": "b"}, "null": 2}'),
        (Point(1.5, Point(0.0)), '{"x": 1.5, "y": {"x": 0.0, "y": null}}'),
        ([Order()], '[{"number": "A1"}]'),
        (Unit.BOX, "box"),
        (Decimal("1.50"), "1.50"),
        (Path("/a/b"), "/a/b"),
        ([datetime.date(2026, 1, 2)], '["2026-01-02"]'),
        (np.int64(3), "3"),
        ({"a": np.eye(2, dtype=int), "b": np.float32(0.5)}, '{"a": [[1, 0], [0, 1]], "b": 0.5}'),
        (float("nan"), "NaN"),
        ([Point(float("-inf")), np.float64("nan")], '[{"x": "-Infinity", "y": null}, "NaN"]'),
    ],
)  # fmt: skip
def test_other_values_are_written_in_json_s_types(value: Any, text: str):
    assert text_of(value, "t") == text


def circle() -> Any:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xff", "bytes that is no JSON ('utf-8' codec"),
        (circle(), "dict that is no JSON (Circular reference"),
        (Point(0.0, circle()), "Point that is no JSON (Circular reference"),
        (nested(2000), "list that is no JSON (max"),
        ([10**5000], "list that is no JSON (Exceeds the limit (4300 digits)"),
        ({(1, 2): 3}, "dict that is no JSON (keys must be str"),
        ((n for n in range(3)), "generator that is no JSON (generator is no list"),
        ({"a": [object()]}, "dict that is no JSON (object is no type of JSON"),
        (len, "builtin_function_or_method that is no JSON"),
    ],
)
def test_a_value_that_is_no_json_is_a_fault_with_tool_type_and_remedy(value: Any, words: str):
    with pytest.raises(ToolUnavailable) as raised:
        text_of(value, "look_up")
    message = str(raised.value)
    assert message.startswith(f"tool='look_up' returned a value of type {words}")
    assert message.endswith("; return a text, or numbers, texts, lists and dicts")
    assert raised.value.tool == "look_up" and raised.value.again is Again.NEVER


def test_a_class_that_cannot_be_written_is_a_fault_whatever_it_raises():
    class Broken:
        def tolist(self) -> list[int]:
            raise KeyError("gone")

    with pytest.raises(ToolUnavailable, match="type Broken that is no JSON"):
        text_of(Broken(), "look_up")
