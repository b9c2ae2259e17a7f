"""The rows of a session as a tree: each row below the row out of which it began."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def as_tree(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one session in the order of their tree, each with its `depth` in it, from 0.

    Rows of one parent are in the order of their first requests to the engine. A row whose parent is
    not there is at the first level. So is the first row of a cycle, which only a damaged file has.

    Args:
        rows: with `id`, `key`, `session`, `parent` and `request`.
    """
    if len(rows) == 1:
        return [{**rows[0], "depth": 0}]
    ordered = sorted(rows, key=lambda row: (row["request"] is None, row["request"] or 0))
    keys = {row["key"] for row in rows}
    children = defaultdict[str, list[dict[str, Any]]](list)
    for row in ordered:
        parent = f"{row['session']}_{row['parent']}"
        children[parent if parent in keys else ""].append(row)
    shown: dict[str, dict[str, Any]] = {}
    # After the tree comes every row once more: those in a cycle are in no tree.
    left = [(row, 0) for row in reversed([*children[""], *ordered])]
    while left:
        row, depth = left.pop()
        if row["id"] not in shown:
            shown[row["id"]] = {**row, "depth": depth}
            left += [(child, depth + 1) for child in reversed(children[row["key"]])]
    return list(shown.values())
