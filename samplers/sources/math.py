r"""MATH: competition problems whose solution ends in `\boxed{answer}`.

Reads records of the public dataset (Hendrycks et al. 2021: `problem`, `level`, `type`, `solution`).
"""

from collections.abc import Mapping
from typing import Any

from samplers.rows import Row, UnusableRecord, row_id

SOURCE = "math"
AGENT = "math_agent"


def to_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Turn one raw record into a row.

    Args:
        record: `problem`, `level`, `type`, `solution`.
        split: `train` or `validation`.
        index: position of the record in its file.

    Raises:
        UnusableRecord: no problem, or no boxed answer in the solution.
    """
    problem = str(record.get("problem") or "").strip()
    if not problem:
        raise UnusableRecord("problem is empty")
    answer = boxed_answer(str(record.get("solution") or ""))
    if answer is None:
        raise UnusableRecord(r"solution has no \boxed{} answer")
    return Row(
        data_source=SOURCE,
        agent_name=AGENT,
        question=problem,
        ability="math",
        ground_truth={"answer": answer},
        split=split,
        index=index,
        row_id=row_id(SOURCE, record),
        extras={},
    )


def boxed_answer(solution: str) -> str | None:
    r"""Content of the last `\boxed{}` or `\fbox{}`, braces balanced; None without one.

    `\boxed 7` without braces holds what follows up to the next `$` or white space.
    """
    at = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if at < 0:
        return None
    rest = solution[at:].split("box", 1)[1].removeprefix("ed").lstrip()
    if not rest.startswith("{"):
        words = rest.split("$", 1)[0].split()
        return words[0] if words else None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip() or None
    return None
