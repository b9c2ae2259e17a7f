"""Natural Questions, open form: a question and its accepted short answers.

Reads records of the public dataset (google-research-datasets/nq_open: `question`, `answer`).
"""

from collections.abc import Mapping
from typing import Any

from samplers.rows import Row, UnusableRecord, row_id

SOURCE = "nq"
AGENT = "search_agent"


def to_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Turn one raw record into a row.

    Args:
        record: `question`, and `answer`: list of accepted answers.
        split: `train` or `validation`.
        index: position of the record in its file.

    Raises:
        UnusableRecord: no question or no answer.
    """
    question = str(record.get("question") or "").strip()
    given = record.get("answer")
    answers = [str(answer) for answer in ([given] if isinstance(given, str) else given or [])]
    if not question:
        raise UnusableRecord("question is empty")
    if not any(answer.strip() for answer in answers):
        raise UnusableRecord("answer is empty")
    return Row(
        data_source=SOURCE,
        agent_name=AGENT,
        question=question,
        ability="qa",
        ground_truth={"target": answers},
        split=split,
        index=index,
        row_id=row_id(SOURCE, record),
        extras={},
    )
