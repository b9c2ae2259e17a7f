r"""MATH: competition problems whose solution ends in `\boxed{answer}`.

Reads records of the public dataset (Hendrycks et al. 2021: `problem`, `level`, `type`, `solution`)
and of its offspring that add columns (MATH-500: `answer`, `subject`).
"""

import re
from collections.abc import Mapping
from typing import Any

from samplers.kind import Kind, UnusableRecord
from samplers.rows.boxed import boxed_answer
from samplers.rows.schema import Row, row_id
from samplers.rows.sources.cells import answers_of, bad, is_blank, present, question_of, text_of

SOURCE = "math"
AGENT = "math_agent"

_LEVEL = re.compile(r"(?:Level\s*)?(\d+)")


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
) -> Row:
    r"""Turn one raw record into a row.

    The answer is that of the solution's last box; a column `answer` counts only where there is no
    box.
    """
    question = question_of("problem", present(record, "problem"))
    given = record.get("answer")
    solution = present(record, "solution") if given is None else record.get("solution")
    answer = boxed_answer(text_of("solution", solution))
    if answer is None and not is_blank(given):
        answer = answers_of("answer", given)[0]
    if answer is None:
        raise UnusableRecord(r"solution has no \boxed{} answer")
    topic = text_of("type", record.get("type")) or text_of("subject", record.get("subject"))
    extras = {"level": _level(record.get("level")), "type": topic or None}
    return Row(
        data_source=source,
        agent_name=agent,
        question=question,
        ability="math",
        ground_truth={"answer": answer},
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras={name: value for name, value in extras.items() if value is not None},
    )


def _level(value: object) -> int | None:
    """`Level 5` and 5 are 5; `Level ?`, which the dataset has too, is none."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        raise bad("level", value, "must be text or a whole number")
    found = _LEVEL.fullmatch(value.strip())
    return int(found[1]) if found else None


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help=r"MATH: problem, level, type, solution with a \boxed{} answer",
)
