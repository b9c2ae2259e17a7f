"""The rows that every source is turned into: one Arrow schema, so that files concatenate.

Decides the columns, the stable row id and what a file must hold; reading a dataset's own records is
left to `samplers.sources`. verl's columns, see DESIGN "Rows": what differs between sources
(`ground_truth`, `extras`) travels as JSON text, because one Arrow type must hold all of them.
"""

# pyarrow has no types, and makes its compute functions at run time; what comes of it is narrowed
# where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

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

_SHOWN = 5
"""Files and rows that a message spells out."""


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


def row_id_problems(files: Sequence[Path | str]) -> list[str]:
    """What keeps `extra_info.row_id` from naming one row each, over all files together.

    Args:
        files: files that `read_sources` finds nothing wrong with.

    Returns:
        A sentence for the rows without an id, and one for the ids that several rows share.
    """
    columns: list[Any] = [_row_ids(Path(file)) for file in files]
    lengths = [len(column) for column in columns]
    chunks = [chunk for column in columns for chunk in column.chunks]
    ids: Any = pa.chunked_array(chunks, type=pa.string())  # (rows of all files,)

    problems: list[str] = []
    if ids.null_count:
        where = _places(pc.indices_nonzero(pc.is_null(ids)), lengths)
        problems.append(
            f"{ids.null_count} rows have no extra_info.row_id ({_files(where, files)}), first "
            f"{_row(where[0], files)}: the ledger names every prompt by it; {_REMEDY}"
        )
    counted: Any = ids.drop_null().value_counts()  # in the order in which the ids first appear
    shared = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    if len(shared):
        where = _places(pc.indices_nonzero(pc.is_in(ids, value_set=shared)), lengths)
        first = _places(pc.indices_nonzero(pc.equal(ids, shared[0])), lengths)
        problems.append(
            f"{len(shared)} values of extra_info.row_id are each on more than one row, on "
            f"{len(where)} together ({_files(where, files)}), first {shared[0].as_py()!r} "
            f"({_rows(first, files)}): the ledger names one prompt by each; leave the "
            "copies out"
        )
    return problems


def _row_ids(path: Path) -> Any:
    """The ids of one file, a chunked column of strings; nothing else is read."""
    with pq.ParquetFile(path) as file:
        return pc.struct_field(file.read(columns=["extra_info.row_id"])["extra_info"], "row_id")


def _places(positions: Any, lengths: Sequence[int]) -> NDArray[np.int64]:
    """(N, 2) file and row in it, of N positions in all files' rows end to end."""
    at = np.asarray(positions, dtype=np.int64)
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    file = np.searchsorted(ends, at, side="right")
    return np.stack([file, at - (ends - lengths)[file]], axis=1)


def _files(places: NDArray[np.int64], files: Sequence[Path | str]) -> str:
    """The files of some places, the first few by name."""
    names = [str(files[file]) for file in np.unique(places[:, 0])]
    return _few(names[:_SHOWN], len(names))


def _rows(places: NDArray[np.int64], files: Sequence[Path | str]) -> str:
    """Some places, the first few by name."""
    return _few([_row(place, files) for place in places[:_SHOWN]], len(places))


def _row(place: NDArray[np.int64], files: Sequence[Path | str]) -> str:
    return f"{files[place[0]]} row {place[1]}"


def _few(names: Sequence[str], of: int) -> str:
    return ", ".join(names) + (f" and {of - len(names)} more" if of > len(names) else "")


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
    failed = f"cannot read rows from {path}"
    if not path.is_file():
        return [f"{failed}: no such file; {_REMEDY}, or correct the name"], {}
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        return [f"{failed}: not a parquet file ({error}); {_REMEDY}"], {}
    except OSError as error:
        return [f"{failed}: {error}; make it readable, or {_REMEDY}"], {}
    problems = [
        f"{failed}: column {field.name!r} is "
        f"{schema.field(field.name).type if field.name in schema.names else 'missing'}, "
        f"the rule is {field.type}; {_REMEDY}"
        for field in SCHEMA
        if field.name not in schema.names or schema.field(field.name).type != field.type
    ]
    if problems:
        return problems, {}
    try:
        column = pq.read_table(path, columns=["data_source"])["data_source"]
    except (pa.ArrowInvalid, OSError) as error:
        return [f"{failed}: damaged ({error}); {_REMEDY}"], {}
    counts: dict[str, int] = {
        str(entry["values"]): entry["counts"]  # in the order in which the sources first appear
        for entry in column.drop_null().value_counts().to_pylist()
    }
    if not len(column):
        return [f"{failed}: it holds 0 rows, at least 1 is needed; {_REMEDY}"], {}
    if column.null_count:
        return [
            f"{failed}: {column.null_count} rows have data_source=null, every row needs its "
            f"source; {_REMEDY}"
        ], {}
    return [], counts
