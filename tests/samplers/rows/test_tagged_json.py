"""Tagged JSON gives back every value that scorers tell apart."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.rows.tagged_json import tagged, untagged

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["__tuple__", "__items__", "a"]), inner)
    ),
)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(VALUES)
def test_a_value_comes_back_through_json_with_its_types(value: Any) -> None:
    assert same(untagged(json.loads(json.dumps(tagged(value)))), value)


def test_what_numpy_holds_becomes_numbers_and_lists() -> None:
    held = {"a": np.float64(0.5), "b": np.int64(3), "c": np.arange(3)}

    assert tagged(held) == {"a": 0.5, "b": 3, "c": [0, 1, 2]}


def test_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold a complex"):
        tagged({"z": 1j})
