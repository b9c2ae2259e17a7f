"""Tables and groups of lines that fit a terminal: the least important parts are left out first.

Rich's own Table shortens all columns where they do not fit, and leaves none out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

_GAP = "  "

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    importance: int
    draw: Callable[[int], Sequence[Text]]
    """(width) -> a cell for each row, of at most so many characters."""

    least: int
    """Characters that the column needs."""

    most: int
    """Characters that the column takes if there is room."""

    align: Side


def column(title: str, importance: int, cells: Sequence[Text], align: Side = "right") -> Column:
    """A column of a fixed width; `cells` has a cell for each row, at least one."""
    width = max(cell_len(title), *(cell.cell_len for cell in cells))
    return Column(
        title=title,
        importance=importance,
        draw=lambda width: cells,
        least=width,
        most=width,
        align=align,
    )


def table(columns: Sequence[Column], width: int) -> list[Text]:
    """A line of titles and a line for each row, `width` characters long at most.

    The first column is always shown. While the others do not fit, the least important is left out.
    """
    shown = [*columns]
    while (room := width - _least_width(shown)) < 0 and len(shown) > 1:
        shown.remove(min(shown[1:], key=lambda each: each.importance))
    drawn: list[list[Text]] = []
    for each in shown:
        wide = min(each.most, each.least + max(0, room))
        room -= wide - each.least
        drawn.append([Text(each.title), *(cell.copy() for cell in each.draw(wide))])
        for cell in drawn[-1]:
            cell.align(each.align, wide)
    lines = [Text(_GAP).join(row) for row in zip(*drawn, strict=True)]
    lines[0].style = "dim"
    for line in lines:
        line.rstrip()
    return lines


def _least_width(columns: Sequence[Column]) -> int:
    return sum(each.least for each in columns) + len(_GAP) * (len(columns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """Lines that stand together."""

    lines: list[Text]
    importance: int
    least: int = 1
    """The pane is left out as a whole if fewer of its lines fit."""


def fitting(panes: Sequence[Pane], height: int) -> list[Text]:
    """The lines of all panes, cut to `height` lines.

    First each pane is cut to its `least` lines, the least important pane first. If the lines still
    do not fit, whole panes are left out in the same order.
    """
    counts = [len(pane.lines) for pane in panes]
    order = sorted(range(len(panes)), key=lambda number: panes[number].importance)
    for is_left_out in (False, True):
        for number in order:
            least = 0 if is_left_out else min(panes[number].least, counts[number])
            excess = sum(counts) - height
            if excess > 0:
                counts[number] = 0 if is_left_out else max(least, counts[number] - excess)
    lines: list[Text] = []
    for pane, count in zip(panes, counts, strict=True):
        lines += cut(pane.lines, count)
    return lines


def cut(lines: list[Text], most: int) -> list[Text]:
    """At most `most` lines; if lines are left out, the last line says how many."""
    if len(lines) <= most or most < 2:
        return lines[:most]
    return [*lines[: most - 1], Text(f"and {len(lines) - most + 1} more", style="dim")]
