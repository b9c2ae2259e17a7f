"""TACO: programming problems judged by hidden stdin/stdout tests.

Reads records of the public dataset (BAAI/TACO, 17 columns). Only problems of the stdin/stdout kind
become rows: those with a function name in `input_output` would need another judge.
"""

# JSON values and literals of mixed types, narrowed where they are used.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
from collections.abc import Mapping
from typing import Any

from samplers.rows import Row, UnusableRecord, row_id

SOURCE = "taco"
AGENT = "code_execution_agent"

COLUMNS = (
    "question",
    "solutions",
    "starter_code",
    "input_output",
    "difficulty",
    "raw_tags",
    "name",
    "source",
    "tags",
    "skill_types",
    "url",
    "Expected Auxiliary Space",
    "time_limit",
    "date",
    "picture_num",
    "memory_limit",
    "Expected Time Complexity",
)


def to_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Turn one raw record into a row.

    Args:
        record: the 17 public columns; `input_output` is JSON text.
        split: `train` or `validation`.
        index: position of the record in its file.

    Raises:
        UnusableRecord: no question, no tests, tests of the function-call kind.
    """
    question = str(record.get("question") or "").strip()
    if not question:
        raise UnusableRecord("question is empty")
    try:
        tests = json.loads(record.get("input_output") or "{}")
    except ValueError as error:
        raise UnusableRecord("input_output is not JSON") from error
    if tests.get("fn_name"):
        raise UnusableRecord("input_output calls a function: only stdin/stdout tests are judged")
    inputs = [_lines(item) for item in tests.get("inputs") or []]
    outputs = [_lines(item) for item in tests.get("outputs") or []]
    if not inputs or len(inputs) != len(outputs):
        raise UnusableRecord("input_output needs as many outputs as inputs, and at least one")
    return Row(
        data_source=SOURCE,
        agent_name=AGENT,
        question=question,
        ability="code",
        ground_truth={"inputs": inputs, "outputs": outputs},
        split=split,
        index=index,
        row_id=row_id(SOURCE, record),
        extras={"example_input": inputs[0]},
    )


def _lines(item: object) -> str:
    """A test's text; a few records hold a list of lines in its place."""
    return "\n".join(map(str, item)) if isinstance(item, list) else str(item)
