"""Parquet files of prepared rows: their paths, how they are written, and their metadata.

Metadata of the file describe the preparation (`verl_mixed.prepare`: fingerprint, split, summary).
In the schema they would keep files from being concatenated.
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from config.disk import sync
from samplers.rows.draft import draft_folder
from samplers.rows.schema import SCHEMA

GROUP_ROWS = 8192
GROUP_BYTES = 64 << 20
"""A row group is written at the first of these limits."""

_COMPARED_ROWS = 1024

_METADATA = b"verl_mixed.prepare"


class Output(NamedTuple):
    path: Path
    split: str

    @property
    def unfinished(self) -> Path:
        return draft_folder(self.path) / "unfinished.parquet"


def outputs_of(
    output: Path | str,
    split: str,
    validation_output: Path | str | None,
    validation: float | int | None,
) -> list[Output]:
    """The files to write, the first one first.

    Raises:
        ValueError: the outputs contradict each other, or a path is not possible.
    """
    failed = f"cannot prepare {output}"
    if (validation is None) != (validation_output is None):
        raise ValueError(
            f"{failed}: validation and validation_output go together; give both or neither"
        )
    outputs = [Output(_followed(output), split)]
    if validation_output is not None:
        if split == "validation":
            raise ValueError(f"{failed}: its rows are validation rows already; leave one out")
        outputs.append(Output(_followed(validation_output), "validation"))
    for path, _ in outputs:
        if path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
        if path.suffix != ".parquet":  # verl looks at the name
            raise ValueError(f"cannot write {path}: the name of a file of rows ends in .parquet")
        if path.exists() and not _is_parquet(path):
            raise ValueError(
                f"cannot write {path}: what is there is no parquet file; name another, or remove it"
            )
    return outputs


def _followed(path: Path | str) -> Path:
    """The target of a link, because renaming onto the link would replace the link."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def _is_parquet(path: Path) -> bool:
    if not path.is_file():  # opening a pipe waits for who writes into it
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


class RowFile:
    """A parquet file in its draft folder, written in row groups of moderate size."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._writer = pq.ParquetWriter(output.unfinished, SCHEMA)
        self._waiting: list[Any] = []
        self.rows: int = 0

    def close(self) -> None:
        self._writer.close()

    def add(self, table: Any) -> None:
        if not len(table):
            return
        self._waiting.append(table)
        self.rows += len(table)
        rows = sum(len(each) for each in self._waiting)
        if rows >= GROUP_ROWS or sum(each.nbytes for each in self._waiting) >= GROUP_BYTES:
            self._write_group()

    def describe(self, *, fingerprint: str, summary: dict[str, Any]) -> None:
        """Write the last rows and the metadata."""
        self._write_group()
        about = {"fingerprint": fingerprint, "split": self._output.split, "summary": summary}
        self._writer.add_key_value_metadata({_METADATA: json.dumps(about)})

    def _write_group(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        info = table["extra_info"].combine_chunks()
        fields = list(SCHEMA.field("extra_info").type)
        split = pa.array([self._output.split] * len(table), pa.string())
        columns = [split if f.name == "split" else pc.struct_field(info, f.name) for f in fields]
        at = SCHEMA.get_field_index("extra_info")
        info = pa.StructArray.from_arrays(columns, fields=fields)
        self._writer.write_table(table.set_column(at, SCHEMA.field(at), info), len(table))


def has_same_rows(one: Path, other: Path) -> bool:
    """Whether two files hold the same rows in the same order; not if one of them is none."""
    try:
        with pq.ParquetFile(one) as mine, pq.ParquetFile(other) as its:
            return mine.metadata.num_rows == its.metadata.num_rows and all(
                batch.equals(same)
                for batch, same in zip(
                    mine.iter_batches(_COMPARED_ROWS), its.iter_batches(_COMPARED_ROWS), strict=True
                )
            )
    except (OSError, ValueError):
        return False


def publish(outputs: Sequence[Output]) -> None:
    """Rename the finished files into their places; the first one comes last.

    Raises:
        OSError: a file cannot be renamed; the message says which others are new.
    """
    renamed: list[str] = []
    for output in reversed(outputs):
        try:
            sync(output.unfinished)
            output.unfinished.replace(output.path)
            sync(output.path.parent)
        except OSError as error:
            also = f" (but {', '.join(renamed)} is new)" if renamed else ""
            raise OSError(
                f"cannot put {output.path} in its place{also}: {error.strerror}; run it again"
            ) from error
        renamed.append(str(output.path))


def description(outputs: Sequence[Output], fingerprint: str) -> dict[str, Any] | None:
    """The summary in the files, if all of them have this fingerprint."""
    summary: dict[str, Any] | None = None
    for output in outputs:
        try:
            about = json.loads(pq.read_metadata(output.path).metadata[_METADATA])
            if (about["fingerprint"], about["split"]) != (fingerprint, output.split):
                return None
            summary = about["summary"]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not of ours
            return None
    return summary
