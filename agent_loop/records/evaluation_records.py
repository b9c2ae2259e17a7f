"""One line for each judged trajectory of a validation or an evaluation, and the file of lines.

A record has no times, so that the same weights, rows and seeds give the same bytes. It is made by
`agent_loop.records.session_record`; this module is light, because the views import it.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent_loop.records.run_folder import decoded, read_typed, write_lines
from config.disk import flush

logger = logging.getLogger(__name__)

JOB, RECORDS, SELECTED = "job.json", "records.jsonl", "selected.json"
"""Files in the folder of an evaluation: what was asked for, the records, the chosen rows."""

RECORD = "mixed_record"
"""Name under which the record of a validation, as JSON, travels among verl's `reward_extra_info`.
verl's metrics leave out values that are texts."""

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
    """Beginning of the question."""

    @property
    def key(self) -> Key:
        return self.source, self.row_id, self.sample

    @property
    def is_solved(self) -> bool:
        return self.acc >= 1


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

    Records are appended as trajectories end. `finish` writes all in order, so that the file does
    not depend on which trajectory ended first, nor on kills.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = {record.key: record for record in read_records(path)[0]}
        """Key -> the newest record."""

    def open(self) -> None:
        """Make the file ready: remove a last line that a kill cut short."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, records: Sequence[Record]) -> None:
        """Add records, and wait until they are on the disk."""
        lines = (json.dumps(line_of(record), ensure_ascii=False) for record in records)
        with self._path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            flush(file)
        self.records |= {record.key: record for record in records}

    def finish(self) -> None:
        """Write all records in order."""
        write_records(self._path, self.records.values())
