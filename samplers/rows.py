"""The rows that every source is turned into: one Arrow schema, so that files concatenate.

Decides the columns, the stable row id and what a file must hold; reading a dataset's own records is
left to `samplers.sources`. verl's columns, see DESIGN "Rows": what differs between sources
(`ground_truth`, `extras`) travels as JSON text, because one Arrow type must hold all of them.
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", pa.string()),
                    ("index", pa.int64()),
                    ("row_id", pa.string()),
                    ("extras", pa.string()),
                ]
            ),
        ),
    ]
)

_REMEDY = "write it with `verl-mixed prepare`"


class UnusableRecord(ValueError):
    """A raw record that cannot become a row; the message says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of a source, and what its reward needs."""

    data_source: str
    agent_name: str
    question: str
    """The one user message."""

    ability: str
    ground_truth: Mapping[str, Any]
    """What the reward compares with; JSON values, another shape for each source."""

    split: str
    index: int
    """Position of the raw record in its file, from 0."""

    row_id: str
    """Stable name: `<source>:<16 hex digits>`, see `row_id`."""

    extras: Mapping[str, Any]
    """What the agent loop of this source needs besides the prompt; JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """What one parquet file holds."""

    path: Path
    rows_by_source: dict[str, int]
    """data_source -> rows, in the order in which the sources first appear."""


def row_id(source: str, record: Mapping[str, Any]) -> str:
    """Name a raw record by its content, so that the name outlives shuffling and file names.

    Args:
        source: the source that the record belongs to.
        record: the raw record; the order of its keys does not matter.
    """
    text = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
    return f"{source}:{hashlib.sha1(text.encode()).hexdigest()[:16]}"


def write_rows(path: Path | str, rows: Iterable[Row]) -> int:
    """Write one parquet file in `SCHEMA`; the file is there whole or not at all.

    Returns:
        Rows written.
    """
    path = Path(path)
    table = pa.Table.from_pylist([_columns(row) for row in rows], schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        pq.write_table(table, temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return table.num_rows


def read_sources(files: Sequence[Path | str]) -> list[FileRows]:
    """Count the rows of each source in each file, and check that the columns are ours.

    Args:
        files: parquet files, in the order in which they are concatenated.

    Returns:
        One entry per file, in the same order.

    Raises:
        ValueError: a file is missing, is no parquet, is empty or lacks a column or type; all such
            mistakes in one message, a line each.
    """
    found: list[FileRows] = []
    problems = [] if files else ["no file named: a run needs at least one; set TRAIN_FILES"]
    for path in map(Path, files):
        problem, counts = _inspect(path)
        problems.extend(problem)
        found.append(FileRows(path=path, rows_by_source=counts))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _columns(row: Row) -> dict[str, Any]:
    """One row as `SCHEMA` nests it."""
    return {
        "data_source": row.data_source,
        "agent_name": row.agent_name,
        "prompt": [{"role": "user", "content": row.question}],
        "ability": row.ability,
        "reward_model": {
            "style": "rule",
            "ground_truth": json.dumps(row.ground_truth, ensure_ascii=False),
        },
        "extra_info": {
            "split": row.split,
            "index": row.index,
            "row_id": row.row_id,
            "extras": json.dumps(row.extras, ensure_ascii=False),
        },
    }


def _inspect(path: Path) -> tuple[list[str], dict[str, int]]:
    """(problems, rows by source) of one file."""
    if not path.is_file():
        return [f"cannot read rows from {path}: no such file; {_REMEDY}, or correct the name"], {}
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        return [f"cannot read rows from {path}: not a parquet file ({error}); {_REMEDY}"], {}
    problems = [
        f"cannot read rows from {path}: column {field.name!r} is "
        f"{schema.field(field.name).type if field.name in schema.names else 'missing'}, "
        f"the rule is {field.type}; {_REMEDY}"
        for field in SCHEMA
        if field.name not in schema.names or schema.field(field.name).type != field.type
    ]
    if problems:
        return problems, {}
    counts = Counter(pq.read_table(path, columns=["data_source"])["data_source"].to_pylist())
    if not counts:
        return [
            f"cannot read rows from {path}: it holds 0 rows, at least 1 is needed; {_REMEDY}"
        ], {}
    if None in counts:
        return [
            f"cannot read rows from {path}: {counts[None]} rows have data_source=null, every row "
            f"needs its source; {_REMEDY}"
        ], {}
    return [], dict(counts)
