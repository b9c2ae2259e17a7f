"""The one renderer of plain-text tables."""

import pytest

from config.text_table import text_table

ROWS = [["name", "n", "note"], ["long name", "12", ""], ["", "3", "x"]]


def test_columns_line_up_and_lines_end_without_spaces() -> None:
    assert text_table(ROWS) == [
        "name       n   note",
        "long name  12",
        "           3   x",
    ]


def test_numbers_are_aligned_right_but_for_the_first_column() -> None:
    assert text_table(ROWS, numbers=True) == [
        "name        n  note",
        "long name  12",
        "            3     x",
    ]


def test_columns_have_a_least_width() -> None:
    assert text_table([["a", "b"]], least=(3, 2), numbers=True) == ["a     b"]


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        text_table([["a", "b"], ["c"]])
