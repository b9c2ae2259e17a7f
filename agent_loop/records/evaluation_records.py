"""One line for each judged trajectory of a validation or an evaluation, and the file of lines. No
verl.

A record has no times, so that the same weights, rows and seeds give the same bytes.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agent_loop.records.run_folder import decoded, read_typed, write_lines
from agent_loop.records.trajectory_record import COMMON_PARTS, TrajectoryRecord
from agent_loop.row import Row
from config.disk import flush

logger = logging.getLogger(__name__)

JOB, RECORDS, SELECTED = "job.json", "records.jsonl", "selected.json"
"""Files in the folder of an evaluation: what was asked for, the records, the chosen rows."""

RECORD = "mixed_record"
"""Name under which the record of a validation, as JSON, travels among verl's `reward_extra_info`.
verl's metrics leave out values that are texts."""

QUESTION_LENGTH = 160
"""Characters of a question that a record keeps, for people."""

Key = tuple[str, str, int]
"""Source, row_id and sample of a record. A file has each key once."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one trajectory of a validation reached, and what it used."""

    step: int
    """Training step of the weights; 0 for weights that no run trained."""

    source: str
    row_id: str
    sample: int
    """Number of the trajectory among those of its row, from 0."""

    reward: float
    acc: float
    """1 or more: the trajectory solved its prompt."""

    lost: bool
    """Whether a fault or a deadline ended it. Its reward does not count."""

    stop_reason: str
    prompt_tokens: int
    response_tokens: int
    """Tokens of all rows of the session, those of tools included."""

    sampled_tokens: int
    """Tokens of the model."""

    turns: int
    tool_calls: int
    rows: int = 1
    parts: dict[str, float] = {}
    """Parts of the reward that only some rewards have."""

    fault: str | None = None
    tokens: str = ""
    """Digest of all token ids of prompt and response. Equal digests: equal tokens."""

    question: str = ""
    """End of the question."""

    @property
    def key(self) -> Key:
        return self.source, self.row_id, self.sample

    @property
    def is_solved(self) -> bool:
        return self.acc >= 1


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
    ids = [[[*map(int, o.prompt_ids)], [*map(int, o.response_ids)]] for o in outputs]
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
        # a tool may have written characters that UTF-8 lacks
        fault=None if last.fault is None else last.fault.encode(errors="replace").decode(),
        tokens=hashlib.blake2b(json.dumps(ids).encode(), digest_size=12).hexdigest(),
        question=" ".join(row.question.split())[-QUESTION_LENGTH:],
    )


def line_of(record: Record) -> dict[str, Any]:
    """A record as a line of a file."""
    return msgspec.structs.asdict(record)


def read_record(line: bytes) -> Record:
    """The record of a line; keys of a newer release are left out.

    Raises:
        ValueError: the line is no record.
    """
    return decoded(line, Record)


def in_order(records: Iterable[Record]) -> list[Record]:
    """Records by source, row and sample: the order of a complete file."""
    return sorted(records, key=lambda record: record.key)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a whole file of records, in order; readers see the old file or the new one."""
    write_lines(path, map(line_of, in_order(records)))


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, none without a file; and its problems, as `read_typed`, which are also
    logged. A kill cuts the last line of an evaluation short.

    Raises:
        OSError: the file cannot be read.
    """
    records, problems = read_typed(path, read_record) if path.exists() else ([], [])
    for problem in problems:
        logger.warning("%s/%s", path.parent, problem)
    return records, problems


class RecordsFile:
    """The file of an evaluation that goes on where an earlier one was killed.

    Records are appended as trajectories end. `rewrite` writes all in order: before the first, to
    remove a line that a kill cut short, and after the last, so that the file does not depend on
    which trajectory ended first, nor on kills.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = {record.key: record for record in read_records(path)[0]}
        """Key -> the newest record."""

    def rewrite(self) -> None:
        """Write all records in order."""
        write_records(self._path, self.records.values())

    def append(self, records: Sequence[Record]) -> None:
        """Add records, and wait until they are on the disk."""
        lines = (json.dumps(line_of(record), ensure_ascii=False) for record in records)
        with self._path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            flush(file)
        self.records |= {record.key: record for record in records}
