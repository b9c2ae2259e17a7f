"""Tables and panes that fit a terminal: what there is no room for goes by importance. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table; its texts are printable."""

    title: str
    cells: Sequence[str]
    importance: int
    """The least important goes first."""

    is_text: bool = False
    """To the left; numbers stand to the right."""

    styles: Sequence[str] = ()
    """One a cell, or none."""

    @property
    def width(self) -> int:
        """Cells that it needs."""
        return max(cell_len(text) for text in (self.title, *self.cells))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filler:
    """A column that takes what the others leave."""

    title: str
    draw: Callable[[int, int], str]
    """(row, width) -> at most so many cells."""

    importance: int
    least: int
    most: int
    style: str


def table(columns: Sequence[Column | Filler], width: int) -> list[Text]:
    """A head and a line a row.

    Args:
        columns: in order; the first stays whatever the width, and has a cell a row.
        width: of the terminal.
    """
    first, *others = columns
    kept = sorted(others, key=lambda column: -column.importance)
    while kept and _room([first, *kept], width) < 0:
        kept.pop()
    shown = [column for column in columns if column is first or column in kept]
    room = _room(shown, width)
    assert isinstance(first, Column)
    lines = []
    for row in range(-1, len(first.cells)):
        line = Text(style="dim" if row < 0 else "")
        for column in shown:
            line.append(_GAP if line else "")
            if isinstance(column, Filler):
                wide = min(column.most, column.least + max(0, room))
                text, style = column.draw(row, wide), column.style
            else:
                wide, text = column.width, column.cells[row]
                style = column.styles[row] if column.styles else ""
            if row < 0:
                text, style = column.title, ""
            pad = " " * (wide - cell_len(text))
            is_left = isinstance(column, Filler) or column.is_text
            line.append(text + pad if is_left else pad + text, style=style)
        line.rstrip()
        lines.append(line)
    return lines


def _room(columns: Sequence[Column | Filler], width: int) -> int:
    """Cells that are left; below 0 where the columns do not fit."""
    own = sum(c.least if isinstance(c, Filler) else c.width for c in columns)
    return width - own - len(_GAP) * (len(columns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """Lines that stand together."""

    lines: list[Text]
    importance: int
    least: int = 1
    """Fewer say nothing: then it goes as a whole."""


def fitting(panes: Sequence[Pane], height: int) -> list[Text]:
    """The lines of all panes, but for those that there is no room for.

    Every pane is first cut to its least, from the least important; then they go, in that order.
    """
    counts = [len(pane.lines) for pane in panes]
    order = sorted(range(len(panes)), key=lambda number: panes[number].importance)
    for goes in (False, True):
        for number in order:
            least = 0 if goes else min(panes[number].least, counts[number])
            excess = sum(counts) - height
            if excess > 0:
                counts[number] = 0 if goes else max(least, counts[number] - excess)
    lines: list[Text] = []
    for pane, count in zip(panes, counts, strict=True):
        lines += cut(pane.lines, count)
    return lines


def cut(lines: list[Text], most: int) -> list[Text]:
    """The first lines; where some are missing and there is room to say so, the last one does."""
    if len(lines) <= most or most < 2:
        return lines[:most]
    return [*lines[: most - 1], Text(f"and {len(lines) - most + 1} more", style="dim")]
