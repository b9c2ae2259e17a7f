"""Questions with answers of any origin: AgentFly's JSON arrays, and jsonl or csv like them.

A record is an object with `question` and `answer`; `messages` go before the question where there
are any. All other entries are kept for tools and rewards, under their own names. The answer of a
worked solution, as in GSM8K, is what follows its last `####`. Hidden tests (`inputs` and `outputs`,
or both in `input_output`, as TACO has them) go into the ground truth for the reward `code`.

Source: AgentFly, docs/start/data_preparation.md; GSM8K, Cobbe et al. 2021.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from samplers.kind import Kind, Option
from samplers.rows.schema import Row, row_id
from samplers.rows.sources.cells import (
    answers_of,
    is_blank,
    items_of,
    json_value,
    last_question,
    messages_of,
    present,
    question_of,
)

SOURCE = "json"
AGENT = "react_agent"
"""It can use every tool, as AgentFly's own default can."""


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
    question_field: str = "question",
    answer_field: str = "answer",
    messages_field: str = "messages",
) -> Row:
    """Turn one raw record into a row.

    The ground truth has `target`, all accepted answers, and `answer`, the first of them.

    Args:
        record: `answer` is a text, number, truth value or list of those; `messages` a list of
            `{role, content}`, or its JSON text.
        question_field, answer_field, messages_field: what the record calls them. Without an
            `answer_field` (empty) the ground truth is empty, for a reward that reads the extras.
    """
    messages: list[dict[str, str]] = []
    if not is_blank(record.get(messages_field)):
        messages = messages_of(messages_field, record[messages_field])
        question = last_question(messages)
    else:
        question = question_of(question_field, present(record, question_field))
    truth = _tests(record)
    used = {messages_field, answer_field, None if messages else question_field}
    if answer_field and (answer_field in record or not truth):
        given = answers_of(answer_field, present(record, answer_field))
        answers = [_final(each) for each in given]
        truth |= {"answer": answers[0], "target": answers}
        if answers != given:
            used.discard(answer_field)  # a tool or a reward may want the worked solution
    return Row(
        data_source=source,
        agent_name=agent,
        question=question,
        messages=messages if len(messages) > 1 else (),
        ability="qa",
        ground_truth=truth,
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras=json_value("", {key: record[key] for key in record if key not in used}),
    )


def _final(answer: str) -> str:
    """The answer of a worked solution: what follows the last `####`, on the last line."""
    found = re.search(r"(?<!#)####(?!#)([^\n#]*)\Z", answer)
    return found[1].strip() if found and found[1].strip() else answer


def _tests(record: Mapping[str, Any]) -> dict[str, Any]:
    """Hidden tests of a programming problem; empty if the record has none."""
    given = record.get("input_output")
    value = record if given is None else _parsed(given)
    if not isinstance(value, Mapping) or not {"inputs", "outputs"} <= value.keys():
        return {}
    tests = cast(Mapping[str, Any], value)
    found = {name: items_of(tests[name]) for name in ("inputs", "outputs")}
    if None in found.values():
        return {}
    return found | ({"fn_name": tests["fn_name"]} if tests.get("fn_name") else {})


def _parsed(value: Any) -> Any:
    """A cell that may hold JSON text; a text that is no JSON as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _column(name: str, default: str, what: str) -> Option:
    return Option(name=name, type=str, default=default, help=f"column of {what}")


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help="AgentFly's {question, answer, ...}: a JSON array, jsonl or csv",
    options=(
        _column("question_field", "question", "the question"),
        _column("answer_field", "answer", "the answer; empty: the records have none"),
        _column("messages_field", "messages", "the messages, where there are any"),
    ),
)
