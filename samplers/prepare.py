"""From a dataset's own files to parquet rows: read, convert, count what was left out.

Decides nothing about single records (that is `samplers.sources`). Imports no torch.
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from samplers.rows import Row, UnusableRecord, write_rows
from samplers.sources import math, nq, taco


class Reader(Protocol):
    """What a source file offers: a raw record in, a row out."""

    def __call__(self, record: Mapping[str, Any], *, split: str, index: int) -> Row: ...


READERS: dict[str, Reader] = {
    taco.SOURCE: taco.to_row,
    nq.SOURCE: nq.to_row,
    math.SOURCE: math.to_row,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One written file."""

    path: Path
    rows: int
    skipped: dict[str, int]
    """Why raw records were left out -> how many."""


def prepare_source(
    source: str,
    raw_file: Path | str,
    out_file: Path | str,
    *,
    split: str,
    progress: Callable[[str], None] = print,
) -> Prepared:
    """Convert one raw file of a public dataset.

    Args:
        source: a name of `READERS`.
        raw_file: `.parquet`, `.jsonl`, or `.json` with one record or a list.
        out_file: parquet file to write.
        split: `train` or `validation`.
        progress: told in words what came out.

    Raises:
        ValueError: the source is unknown, the file cannot be read, or no record is usable.
    """
    if source not in READERS:
        raise ValueError(f"no reader for source={source!r}: known are {', '.join(READERS)}")
    rows: dict[str, Row] = {}  # a row_id names one row; copies of a record would share it
    skipped: Counter[str] = Counter()
    for index, record in enumerate(read_records(Path(raw_file))):
        try:
            row = READERS[source](record, split=split, index=index)
        except UnusableRecord as error:
            skipped[str(error)] += 1
            continue
        if row.row_id in rows:
            skipped["it is a copy of an earlier record"] += 1
        rows.setdefault(row.row_id, row)
    reasons = "; ".join(f"{count} x {reason}" for reason, count in skipped.most_common())
    if not rows:
        raise ValueError(
            f"cannot prepare source={source!r} from {raw_file}: no usable record "
            f"({reasons or 'the file is empty'}); check that it is the file of this dataset"
        )
    written = write_rows(out_file, rows.values())
    progress(f"wrote {out_file}: source={source} rows={written} skipped={skipped.total()}")
    if skipped:
        progress(f"skipped from {raw_file}: {reasons}")
    return Prepared(path=Path(out_file), rows=written, skipped=dict(skipped))


def read_records(path: Path) -> Iterable[Mapping[str, Any]]:
    """Raw records of a file, one after another.

    Raises:
        ValueError: the file is missing, of another kind, or damaged; with the line where known.
    """
    if not path.is_file():
        raise ValueError(f"cannot read records from {path}: no such file; correct the name")
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except pa.ArrowInvalid as error:
            raise ValueError(f"cannot read records from {path}: not a parquet file") from error
    elif path.suffix == ".json":
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"cannot read records from {path}: {error}") from error
        yield from content if isinstance(content, list) else [content]
    elif path.suffix == ".jsonl":
        with path.open() as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(
                        f"cannot read records from {path} line {number}: {error}"
                    ) from error
    else:
        raise ValueError(
            f"cannot read records from {path}: the kind {path.suffix!r} is unknown; "
            "give a .parquet, .jsonl or .json file"
        )
