"""The rows of all sources in one Arrow schema, so that files can be concatenated.

The columns are verl's. Values that differ between sources (`ground_truth`, `extras`) are JSON text,
because one Arrow type must hold all of them.
"""

# pyarrow has no types, and makes its compute functions at run time; what comes of it is narrowed
# where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from samplers.row_names import row_id as row_id  # sources of users import it from here

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

_SHOWN = 5  # files and rows that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of a source, and the data for its reward."""

    data_source: str
    agent_name: str
    question: str
    """The user message; with `messages`, the last user message."""

    ability: str
    ground_truth: Mapping[str, Any]
    """The values that the reward compares with; JSON values, in a shape of the source."""

    split: str
    index: int
    """Position of the raw record in its file, from 0."""

    row_id: str
    """Stable name: `<source>:<16 hex digits>`, see `row_id`."""

    extras: Mapping[str, Any]
    """Further data for the agent loop of this source; JSON values."""

    messages: Sequence[Mapping[str, str]] = ()
    """The prompt as messages with `role` and `content`; empty if `question` is the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    path: Path
    rows_by_source: dict[str, int]
    """data_source -> number of rows, in the order of first appearance."""


def write_rows(path: Path | str, rows: Sequence[Row]) -> None:
    """Write one parquet file in `SCHEMA`, in an existing folder; an error may leave a part."""
    pq.write_table(columns_of(rows), path)


def columns_of(rows: Sequence[Row]) -> Any:
    """A `pa.Table` of rows in `SCHEMA`. A column must stay below 2 GiB, or it cannot be read again.

    Raises:
        ValueError: a text is not Unicode, or `ground_truth` or `extras` is not JSON; with the id of
            the row.
    """
    try:
        return _table(rows)
    except UnicodeEncodeError as error:
        broken = next((row.row_id for row in rows if not _is_unicode(row)), "unknown")
        raise ValueError(
            f"cannot write the row with row_id={broken!r}: its text holds half a surrogate pair, "
            "which is not Unicode; correct the record"
        ) from error


def _table(rows: Sequence[Row]) -> Any:
    """Build whole columns, which is several times as fast as a dictionary per row."""
    messages = [row.messages or ({"role": "user", "content": row.question},) for row in rows]
    flat = [message for each in messages for message in each]
    ends = np.cumsum([0, *map(len, messages)], dtype=np.int32)
    prompts = _struct(
        SCHEMA.field("prompt").type.value_type,
        [message["role"] for message in flat],
        [message["content"] for message in flat],
    )
    return pa.table(
        [
            pa.array([row.data_source for row in rows], pa.string()),
            pa.array([row.agent_name for row in rows], pa.string()),
            pa.ListArray.from_arrays(pa.array(ends), prompts, type=SCHEMA.field("prompt").type),
            pa.array([row.ability for row in rows], pa.string()),
            _struct(
                SCHEMA.field("reward_model").type,
                ["rule"] * len(rows),
                [_json(row, "ground_truth", row.ground_truth) for row in rows],
            ),
            _struct(
                SCHEMA.field("extra_info").type,
                [row.split for row in rows],
                [row.index for row in rows],
                [row.row_id for row in rows],
                [_json(row, "extras", row.extras) for row in rows],
            ),
        ],
        schema=SCHEMA,
    )


def _struct(of: Any, *columns: Sequence[Any]) -> Any:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, of, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(of))


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _json(row: Row, name: str, value: Any) -> str:
    """JSON text in valid Unicode, for any value."""
    try:
        text = _JSON.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"cannot write the row with row_id={row.row_id!r}: {name} is not JSON ({error}); "
            "correct what its kind makes of the record"
        ) from error
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair; JSON has an escape for it
        return json.dumps(value)
    return text


def _is_unicode(row: Row) -> bool:
    try:
        _table([row])
    except UnicodeEncodeError:
        return False
    return True


def read_sources(files: Sequence[Path | str]) -> list[FileRows]:
    """Count the rows of each source in each parquet file, and check the columns.

    Raises:
        ValueError: a file is missing, is no parquet file, is empty, or has a wrong column; the
            message has a line for each fault.
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
    """A sentence each for rows without an id, and for ids of several rows, over all files.

    Args:
        files: files without a fault in `read_sources`.
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
        rows = [_row(place, files) for place in first[:_SHOWN]]
        problems.append(
            f"{len(shared)} values of extra_info.row_id are each on more than one row, on "
            f"{len(where)} together ({_files(where, files)}), first {shared[0].as_py()!r} "
            f"({_few(rows, len(first))}): the ledger names one prompt by each; leave the copies out"
        )
    return problems


def _row_ids(path: Path) -> Any:
    """The ids of one file as a chunked column; no other column is read."""
    with pq.ParquetFile(path) as file:
        return pc.struct_field(file.read(columns=["extra_info.row_id"])["extra_info"], "row_id")


def _places(positions: Any, lengths: Sequence[int]) -> NDArray[np.int64]:
    """(N, 2) file and row of N positions in the concatenation of all files."""
    at = np.asarray(positions, dtype=np.int64)
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    file = np.searchsorted(ends, at, side="right")
    return np.stack([file, at - (ends - lengths)[file]], axis=1)


def _files(places: NDArray[np.int64], files: Sequence[Path | str]) -> str:
    """The files of some places as text; the first few by name."""
    names = [str(files[file]) for file in np.unique(places[:, 0])]
    return _few(names[:_SHOWN], len(names))


def _row(place: NDArray[np.int64], files: Sequence[Path | str]) -> str:
    return f"{files[place[0]]} row {place[1]}"


def _few(names: Sequence[str], of: int) -> str:
    return ", ".join(names) + (f" and {of - len(names)} more" if of > len(names) else "")


def _inspect(path: Path) -> tuple[list[str], dict[str, int]]:
    """(faults, rows by source) of one file."""
    failed = f"cannot read rows from {path}"
    if not path.is_file():
        return [f"{failed}: no such file; {_REMEDY}, or correct the name"], {}
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        return [f"{failed}: not a parquet file ({error}); {_REMEDY}"], {}
    except OSError as error:
        why = " ".join(str(error).split())  # Arrow's has lines
        return [f"{failed}: {why}; make it readable, or {_REMEDY}"], {}
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
