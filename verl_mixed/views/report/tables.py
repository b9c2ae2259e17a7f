"""Tables of the report as HTML. Every cell is escaped."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_mixed.views.report.charts import number, words

LONGEST_VALUE = 2000
"""Characters of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a head; a pair of numbers is shown as first → last."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    folded: str = ""
    """Summary under which it is folded away; empty shows it."""


def html(table: Table) -> str:
    """The table."""
    titles = "".join(f"<th>{words(name)}</th>" for name in table.head)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in table.rows
    )
    text = f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'
    if table.folded:
        return f"<details><summary>{words(table.folded)}</summary>{text}</details>"
    return text


def cell(value: object) -> str:
    """A value as text of a page."""
    if isinstance(value, tuple):
        return " → ".join(cell(part) for part in value)
    if isinstance(value, float):
        return number(value)
    return words(value, LONGEST_VALUE)
