"""Natural Questions, open form: a question and its accepted short answers.

Reads three public schemas: google-research-datasets/nq_open (`question`, `answer`), FlashRAG's
(`question`, `golden_answers`, `id`), and rows made for verl as Search-R1 has them (`prompt`,
`reward_model.ground_truth.target`).
"""

from collections.abc import Mapping
from typing import Any, cast

from samplers.kind import Kind
from samplers.rows.schema import Row, row_id
from samplers.rows.sources.cells import (
    answers_of,
    bad,
    json_of,
    json_value,
    last_question,
    literal_list,
    messages_of,
    missing,
    question_of,
    text_of,
)

SOURCE = "nq"
AGENT = "search_agent"


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
) -> Row:
    """Turn one raw record into a row.

    Args:
        record: `question`, else `prompt`, a list of messages; and `answer`, `golden_answers` or
            `reward_model`, whichever comes first: a text, a list, or the text of a list.
    """
    messages: list[dict[str, str]] = []
    if record.get("question") is None and record.get("prompt") is not None:
        messages = messages_of("prompt", record["prompt"])
        question = last_question(messages)
    else:
        question = question_of("question", _column(record, "question", "prompt")[1])
    extras = {"id": json_value("id", record["id"])} if record.get("id") is not None else {}
    return Row(
        data_source=source,
        agent_name=agent,
        question=question,
        messages=messages if len(messages) > 1 else (),
        ability="qa",
        ground_truth={"target": _answers(record)},
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras=extras,
    )


def _column(record: Mapping[str, Any], *names: str) -> tuple[str, Any]:
    """The first of some columns that holds something, else the first that is there."""
    there = [name for name in names if name in record]
    if not there:
        raise missing(record, *names)
    name = next((name for name in there if record[name] is not None), there[0])
    return name, record[name]


def _answers(record: Mapping[str, Any]) -> list[str]:
    field, value = _column(record, "answer", "golden_answers", "reward_model")
    if field == "reward_model":
        field, value = f"{field}.ground_truth", _entry(field, value, "ground_truth")
        field, value = f"{field}.target", _entry(field, value, "target")
    if isinstance(value, str):  # csv has lists as Python or JSON writes them
        listed = literal_list(text_of(field, value))
        value = value if listed is None else listed
    return answers_of(field, value)


def _entry(field: str, value: object, key: str) -> Any:
    """One entry of an object, or of the JSON text of one."""
    if isinstance(value, str):
        value = json_of(field, value)
    if not isinstance(value, Mapping):
        raise bad(field, value, f"must be an object with {key}")
    return cast(Mapping[str, Any], value).get(key)


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help="Natural Questions: nq_open, FlashRAG (golden_answers), or verl rows with a target",
)
