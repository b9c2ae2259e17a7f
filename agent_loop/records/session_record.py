"""Makes the record of a session: in a validation inside a run, and in an evaluation. No verl."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from agent_loop.records.evaluation_records import Record
from agent_loop.records.trajectory_record import COMMON_PARTS, TrajectoryRecord
from agent_loop.row import Row

QUESTION_LENGTH = 160
"""Characters of a question that a record keeps, for people."""


class Output(Protocol):
    """A sequence of a session: `agent_loop.turn_agent_loop.JudgedOutput`."""

    prompt_ids: list[int]
    response_ids: list[int]

    @property
    def record(self) -> TrajectoryRecord: ...


def record_of(outputs: Sequence[Output], row: Row, step: int) -> Record:
    """The record of a session.

    Args:
        outputs: all sequences of the session; the last one answers.
        step: as in `Record`.
    """
    records = [output.record for output in outputs]
    parts, last = records[-1].reward_parts, records[-1]
    turns = [turn for record in records for turn in record.turns]
    return Record(
        step=step,
        source=row.source,
        row_id=row.row_id,
        sample=int(row.session),
        reward=float(parts["score"]),
        acc=float(parts["acc"]),
        lost=last.is_lost,
        stop_reason=last.stop_reason,
        prompt_tokens=len(outputs[0].prompt_ids),
        response_tokens=sum(len(output.response_ids) for output in outputs),
        sampled_tokens=sum(turn.tokens for turn in turns),
        turns=len(turns),
        tool_calls=sum(len(record.calls) for record in records),
        rows=len(outputs),
        parts={name: float(x) for name, x in parts.items() if name not in COMMON_PARTS},
        fault=_writable(last.fault),
        tokens=digest_of([(output.prompt_ids, output.response_ids) for output in outputs]),
        question=" ".join(row.question.split())[-QUESTION_LENGTH:],
    )


def _writable(text: str | None) -> str | None:
    """A text without characters that UTF-8 lacks, which a tool may have written."""
    return None if text is None else text.encode(errors="replace").decode()


def digest_of(sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Digest of the token ids of prompt and response of each sequence."""
    ids = [[[*map(int, prompt)], [*map(int, response)]] for prompt, response in sequences]
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=12).hexdigest()
