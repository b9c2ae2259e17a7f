"""Makes the record of a session: in a validation inside a run, and in an evaluation. No verl."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent_loop.records.evaluation_records import Record
from agent_loop.rewards.judging import COMMON_PARTS, question_of

QUESTION_LENGTH = 160
"""Characters of a question that a record keeps, for people."""


def record_of(outputs: Sequence[Any], row: Mapping[str, Any], step: int) -> Record:
    """The record of a session.

    Args:
        outputs: verl's outputs of all sequences of the session; the last one answers.
        row: columns of the dataset, and `session_id`.
        step: as in `Record`.
    """
    facts = [output.extra_fields["mixed"] for output in outputs]
    parts = facts[-1]["reward_parts"]
    turns = [turn for each in facts for turn in each["turns"]]
    return Record(
        step=step,
        source=row["data_source"],
        row_id=row["extra_info"]["row_id"],
        sample=row["session_id"],
        reward=float(parts["score"]),
        acc=float(parts["acc"]),
        lost=facts[-1]["fault"] is not None,
        stop_reason=str(facts[-1]["stop_reason"]),
        prompt_tokens=len(outputs[0].prompt_ids),
        response_tokens=sum(len(output.response_ids) for output in outputs),
        sampled_tokens=sum(turn["tokens"] for turn in turns),
        turns=len(turns),
        tool_calls=sum(len(each["calls"]) for each in facts),
        rows=len(outputs),
        parts={name: float(x) for name, x in parts.items() if name not in COMMON_PARTS},
        fault=_writable(facts[-1]["fault"]),
        tokens=digest_of([(output.prompt_ids, output.response_ids) for output in outputs]),
        question=" ".join(question_of(row.get("raw_prompt") or ()).split())[-QUESTION_LENGTH:],
    )


def _writable(text: str | None) -> str | None:
    """A text without characters that UTF-8 lacks, which a tool may have written."""
    return None if text is None else text.encode(errors="replace").decode()


def digest_of(sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Digest of the token ids of prompt and response of each sequence."""
    ids = [[[*map(int, prompt)], [*map(int, response)]] for prompt, response in sequences]
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=12).hexdigest()
