"""The rows of a session as a tree, also of a damaged file."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mixed.views.viewer.tree import as_tree


def row(index: int, parent: int | None, request: int | None) -> dict[str, Any]:
    key = {"id": f"1.{index}", "key": f"u_0_{index}", "session": "u_0"}
    return key | {"parent": parent, "request": request}


@pytest.mark.parametrize(
    ("rows", "tree"),
    [
        ([(None, 1)], [(0, 0)]),
        ([(None, 1), (0, 2), (1, 3)], [(0, 0), (1, 1), (2, 2)]),
        ([(1, 2), (None, 1)], [(1, 0), (0, 1)]),
        ([(None, 3), (None, 1), (1, 9), (1, 5)], [(1, 0), (3, 1), (2, 1), (0, 0)]),
        ([(None, None), (None, None), (None, 1)], [(2, 0), (0, 0), (1, 0)]),
        ([(None, 1), (7, 2)], [(0, 0), (1, 0)]),  # there is no row 7
        ([(0, 1), (0, 2)], [(0, 0), (1, 1)]),  # its own parent
        ([(2, 1), (0, 2), (1, 3), (None, 4)], [(3, 0), (0, 0), (1, 1), (2, 2)]),  # a cycle
    ],
)
def test_a_row_is_below_its_parent_in_the_order_of_requests(rows: list[Any], tree: list[Any]):
    shown = as_tree([row(index, *each) for index, each in enumerate(rows)])
    assert [(int(each["id"][2:]), each["depth"]) for each in shown] == tree


def test_a_tree_may_be_as_deep_as_a_session_is_long():
    shown = as_tree([row(index, index - 1, index) for index in range(5000)])
    assert [each["depth"] for each in shown] == list(range(5000))


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.integers(0, 5), st.none() | st.integers(0, 9)),
        max_size=9,
    )
)
def test_every_row_is_shown_once_whatever_the_parents(rows: list[Any]):
    given_rows = [row(*each) | {"id": f"1.{line}"} for line, each in enumerate(rows)]
    shown = as_tree(given_rows)
    assert sorted(each["id"] for each in shown) == [each["id"] for each in given_rows]
    for before, each in zip([{"depth": -1}, *shown], shown, strict=False):
        assert each["depth"] <= before["depth"] + 1
