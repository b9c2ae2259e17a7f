"""Tables of the report, and the text of their cells."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_mixed.views.report.text import number, plain

LONGEST_VALUE = 2000
"""Characters of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a head. A pair of numbers is shown as first → last."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    folded: str = ""
    """Summary under which the table is folded away; empty shows the table."""


def cell(value: object) -> str:
    """The text of a cell. Not escaped."""
    if isinstance(value, tuple):
        return " → ".join(cell(part) for part in value)
    if isinstance(value, float):
        return number(value)
    return plain(value, LONGEST_VALUE)
