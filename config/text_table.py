"""Tables of plain text. Standard library only, because hosts without packages print them too."""

from collections.abc import Sequence


def text_table(
    rows: Sequence[Sequence[str]], *, numbers: bool = False, least: tuple[int, int] = (0, 0)
) -> list[str]:
    """A line for each row; the columns line up and are two spaces apart.

    Args:
        rows: with equally many cells each; the titles are a row too.
        numbers: align all columns but the first right.
        least: characters of the first column, and of each other column, at least.
    """
    widths = [
        max(least[column > 0], *map(len, cells))
        for column, cells in enumerate(zip(*rows, strict=True))
    ]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
