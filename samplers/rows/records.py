"""Reads the records of a file one by one in constant memory, for every supported format.

Formats: Parquet, Arrow IPC (file and stream, so the Hub's `.arrow` too), JSON lines, a JSON array,
CSV and TSV; text formats also gzipped, recognised by their first bytes. A fault of one record (a
broken line, a text that is not UTF-8, a row with too many cells) is returned in place of the
record; a fault after which nothing can be read is raised. Nothing is repaired: half of a surrogate
pair is a fault; `NaN` is read as Python reads it.

The scanner of Python's `json` finds the end of each element of an array, and the elements are read
like lines. (ijson 3.4 ends the file at `NaN` or an integer of 20 digits, makes `?` of half a
surrogate pair, and takes gigabytes for deeply nested brackets.)
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from config.disk import BrokenFile
from samplers.kind import BadRecord

MOST_RECORD_BYTES = 512 << 20
"""A longer record ends the reading, because such a file has no record ends."""

_BLOCK_BYTES = 1 << 20
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 32
"""Rows per batch; few, because a parquet file states only the mean size of its rows."""

_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

_SPACE = re.compile(r"[ \t\n\r]*")
_scan = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
"""Finds the end of a value; strings and numbers are checked later, when the value is read."""

_LONGEST_WORD = 16
"""Longer than any incomplete JSON token, except strings and numbers."""


class BadData(BrokenFile):
    """The input files cannot be used; the message says where, why and what to do."""


class Record(NamedTuple):  # there may be millions
    number: int
    """Position in the file from 0; faults count, blank lines do not."""

    line: int
    """Its first line in a text file, from 1; 0 in other formats."""

    value: Mapping[str, Any] | BadRecord


class RecordFile:
    """One file of records.

    Args:
        path: `.parquet`, `.arrow`, `.jsonl`, `.ndjson`, `.json` (an array, lines, or objects one
            after another), `.csv`, `.tsv`; texts may have `.gz` after that.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: the file cannot be read.
        ValueError: no format has this ending.
    """

    def __init__(self, path: Path | str) -> None:
        self.path: Path = Path(path)
        failed = f"cannot read records from {path}"
        if self.path.is_dir():
            raise IsADirectoryError(f"{failed}: it is a folder; give its files one by one")
        if not self.path.is_file():
            why = "not a regular file" if self.path.exists() else "no such file"
            raise FileNotFoundError(f"{failed}: {why}; correct the name")
        ending = self.path.suffix
        if ending == ".gz":
            ending = self.path.with_suffix("").suffix
        self._texts: dict[str, Callable[[IO[bytes], int], Iterator[Record]]] = {
            ".jsonl": self._json_lines,
            ".ndjson": self._json_lines,
            ".json": self._json,
            ".csv": partial(self._cells, ","),
            ".tsv": partial(self._cells, "\t"),
        }
        self._tables: dict[str, Callable[[], Iterator[Any]]] = {
            ".parquet": self._parquet_batches,
            ".arrow": self._arrow_batches,
        }
        known = self._texts if self.path.suffix == ".gz" else self._texts | self._tables
        if ending not in known:
            raise ValueError(
                f"{failed}: no format ends in {''.join(self.path.suffixes[-2:])!r}; give "
                f"{', '.join([*self._tables, *self._texts])}, the texts also as .gz"
            )
        try:
            self.path.open("rb").close()
        except PermissionError as error:
            raise PermissionError(f"{failed}: {error.strerror}; make it readable") from error
        self._ending = ending
        self._in_array = False
        self.size_bytes: int = self.path.stat().st_size
        self.read_bytes: int = 0
        """Size of the file on disk, for the progress bar."""

    def __str__(self) -> str:
        return str(self.path)

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yield the records from position `start` on; raises BadData where a file is damaged."""
        if self._ending in self._tables:
            yield from self._rows(self._tables[self._ending](), start)
            return
        with io.FileIO(self.path) as packed, io.BufferedReader(packed, _BLOCK_BYTES) as file:
            last = None
            try:
                for last in self._texts[self._ending](self._opened(file), start):
                    self.read_bytes = packed.tell()
                    yield last
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                after = self.path if last is None else f"after {self.place(last.number, last.line)}"
                raise BadData(
                    f"cannot read {after}: the gzip file is damaged ({error}); fetch it again"
                ) from error

    def place(self, number: int, line: int) -> str:
        """The place of a record in a message, by its `number` and `line`."""
        if self._in_array:
            return f"{self.path} record {number} (line {line})"
        return f"{self.path} line {line}" if line else f"{self.path} row {number}"

    # --- texts -----------------------------------------------------------------------------------

    def _opened(self, file: "io.BufferedReader[Any]") -> "io.BufferedReader[Any]":
        """The text's bytes, unpacked and without a byte order mark."""
        if file.peek(2)[:2] == _GZIP:
            file = io.BufferedReader(gzip.GzipFile(fileobj=file), _BLOCK_BYTES)
        head = file.peek(3)
        if head[:2] in _UTF16_MARKS:
            raise BadData(f"cannot read {self.path}: it is UTF-16; save it as UTF-8")
        if head[:3] == _UTF8_MARK:
            file.read(3)
        return file

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        line = 0
        while text := file.readline(MOST_RECORD_BYTES + 1):
            line += 1
            if len(text) > MOST_RECORD_BYTES:
                raise self._too_long(f"line {line}")
            yield text

    def _json_lines(self, file: IO[bytes], start: int) -> Iterator[Record]:
        index = -1
        for line, text in enumerate(self._lines(file), start=1):
            if text.isspace():
                continue
            index += 1
            if index >= start:
                yield Record(index, line, _object(text))

    def _json(self, file: IO[bytes], start: int) -> Iterator[Record]:
        """An array; lines; or objects that reach over several lines, as `json.dump(indent=2)`."""
        head = cast("io.BufferedReader[Any]", file).peek(_BLOCK_BYTES).lstrip()
        first, _, more = head.partition(b"\n")
        over_lines = head[:1] == b"{" and bool(more) and not first.rstrip().endswith(b"}")
        self._in_array = head[:1] == b"[" or over_lines
        if not self._in_array:
            yield from self._json_lines(file, start)
            return
        for index, (line, text) in enumerate(self._elements(file, in_array=not over_lines)):
            if index >= start:
                yield Record(index, line, _object(text))

    def _elements(self, file: IO[bytes], *, in_array: bool) -> Iterator[tuple[int, bytes]]:
        """(line, text) of each element. The text is decoded with one character per byte, so that
        places agree."""
        buffer, at, line = "", 0, 1

        def more() -> bool:
            nonlocal buffer, at
            block = file.read(max(_BLOCK_BYTES, len(buffer) - at))
            buffer, at = buffer[at:] + block.decode("latin-1"), 0
            return bool(block)

        def skip_to(end: int) -> None:
            nonlocal at, line
            line += buffer.count("\n", at, end)
            at = end

        def next_character() -> str:
            while True:
                found = _SPACE.match(buffer, at)
                skip_to(found.end() if found else at)
                if at < len(buffer) or not more():
                    return buffer[at : at + 1]

        def broken(why: str, place: int) -> BadData:
            return BadData(
                f"cannot read {self.path} line {line + buffer.count(chr(10), at, place)}: {why} in "
                "the array's own text, so that no later record can be found; mend it there, or "
                "write one object a line"
            )

        if in_array and next_character() == "[":
            skip_to(at + 1)
        is_first = True
        while character := next_character():
            if is_first and in_array and character == "]":
                break
            is_first = False
            while True:
                try:
                    _, end = _scan(buffer, at)
                except json.JSONDecodeError as error:
                    left = len(buffer) - error.pos
                    is_cut = left < _LONGEST_WORD or error.msg.startswith("Unterminated string")
                    if is_cut and len(buffer) - at > MOST_RECORD_BYTES:
                        raise self._too_long(f"line {line}") from error
                    if is_cut and more():
                        continue
                    raise broken(error.msg, error.pos) from error
                except RecursionError as error:
                    raise broken("values are nested too deep", at) from error
                if end < len(buffer) or not more():  # a number may go on in the next block
                    break
            yield line, buffer[at:end].encode("latin-1")
            skip_to(end)
            if not in_array:
                continue
            character = next_character()
            if character == "]":
                break
            if character != ",":
                raise broken("',' or ']' is missing", at)
            skip_to(at + 1)
            if not next_character():
                raise broken("']' is missing", at)
        else:
            if in_array:
                raise broken("']' is missing", at)
            return
        skip_to(at + 1)
        if next_character():
            raise broken("text follows the end", at)

    def _cells(self, delimiter: str, file: IO[bytes], start: int) -> Iterator[Record]:
        is_utf8 = True

        def lines() -> Iterator[str]:
            nonlocal is_utf8
            for block in self._lines(file):
                for text in block.splitlines(keepends=True) if b"\r" in block else (block,):
                    try:
                        yield text.decode()
                    except UnicodeDecodeError:
                        is_utf8 = False
                        yield text.decode(errors="replace")

        csv.field_size_limit(MOST_RECORD_BYTES)  # of the whole process, and 128 KiB by default
        # strict: else a quote that is never closed swallows the rest of the file in silence
        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        names: list[str] | None = None
        index = -1
        while True:
            line = reader.line_num + 1
            is_utf8 = True
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error) or "field larger" in str(error):
                    raise BadData(
                        f"cannot read {self.path} line {line}: the quoted cell that begins here is "
                        f"never closed ({error}); close it, or double the quotes inside it"
                    ) from error
                cells, fault = [""], str(error)
            else:
                fault = ""
            if cells is None:
                return
            if not cells:  # a blank line
                continue
            if names is None:
                names = self._header(cells, fault or ("" if is_utf8 else "it is not UTF-8"))
                continue
            index += 1
            if index < start:
                continue
            value: Mapping[str, Any] | BadRecord
            if fault:
                value = BadRecord(f"not CSV: {fault}", reason="not CSV")
            elif not is_utf8:
                value = BadRecord("not UTF-8: save the file as UTF-8", reason="not UTF-8")
            elif len(cells) != len(names):
                value = BadRecord(
                    f"it has {len(cells)} cells, the header names {len(names)}",
                    reason="another number of cells than the header has",
                )
            else:
                value = dict(zip(names, cells, strict=True))
            yield Record(index, line, value)

    def _header(self, names: list[str], fault: str = "") -> list[str]:
        twice = [name for name, count in Counter(names).items() if count > 1]
        fault = fault or (f"column {twice[0]!r} comes twice" if twice else "")
        if fault:
            raise BadData(f"cannot read the header of {self.path}: {fault}; mend it")
        return names

    def _too_long(self, place: str) -> BadData:
        return BadData(
            f"cannot read {self.path} {place}: the record is longer than "
            f"{MOST_RECORD_BYTES >> 20} MiB; check that the file is what its name says"
        )

    # --- tables ----------------------------------------------------------------------------------

    def _rows(self, batches: Iterator[Any], start: int) -> Iterator[Record]:
        index = 0
        while True:
            try:
                batch = next(batches, None)
                names = [] if batch is None else batch.schema.names
            except (ValueError, pa.ArrowException, OSError) as error:
                after = f"damaged after row {index - 1}" if index else "damaged, or of another kind"
                raise BadData(
                    f"cannot read {self.path}: the file is {after} ({error}); fetch it again"
                ) from error
            if batch is None:
                return
            self._header(names)
            rows = _batch_rows(batch.nbytes / max(1, len(batch)))
            for at in range(0, len(batch), rows):
                some = batch.slice(at, rows)
                if index + len(some) > start:
                    for number, value in enumerate(_values(some), start=index):
                        if number >= start:
                            yield Record(number, 0, value)
                index += len(some)

    def _parquet_batches(self) -> Iterator[Any]:
        # a buffer: else each column of a row group is read whole, and a row group may be the file
        with pq.ParquetFile(self.path, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
            rows = 0
            for at in range(file.num_row_groups):
                group = file.metadata.row_group(at)
                batch_rows = _batch_rows(group.total_byte_size / max(1, group.num_rows))
                for batch in file.iter_batches(batch_size=batch_rows, row_groups=[at]):
                    yield batch
                    rows += len(batch)
                    self.read_bytes = int(self.size_bytes * rows / file.metadata.num_rows)

    def _arrow_batches(self) -> Iterator[Any]:
        with pa.memory_map(str(self.path)) as source:
            try:
                file = pa.ipc.open_file(source)
            except pa.ArrowInvalid:
                source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            else:
                batches = map(file.get_batch, range(file.num_record_batches))
            for batch in batches:
                _check_offsets(batch)
                yield batch
                self.read_bytes = min(self.read_bytes + batch.nbytes, self.size_bytes)
            self.read_bytes = self.size_bytes


def _batch_rows(row_bytes: float) -> int:
    """Rows per batch, so that large rows do not fill the memory."""
    return int(min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, row_bytes))))


def _check_offsets(batch: Any) -> None:
    """Raise `pa.ArrowInvalid` if a column points beyond its memory, which would crash the process.
    `_values` finds texts that are not UTF-8."""
    for column in batch.columns:
        is_text = pa.types.is_string(column.type)
        (column.view(pa.binary()) if is_text else column).validate(full=True)


def _values(batch: Any) -> list[Mapping[str, Any] | BadRecord]:
    """The rows of a batch. Arrow does not check that its texts are UTF-8, or that Python can hold
    its dates."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) > 1:
            rows = (batch.slice(row, 1) for row in range(len(batch)))
            return [value for row in rows for value in _values(row)]
        if isinstance(error, UnicodeDecodeError):
            return [BadRecord(f"a text is not UTF-8 ({error.reason})", reason="not UTF-8")]
        return [
            BadRecord(f"Python cannot hold a value ({error})", reason="Python cannot hold a value")
        ]


def _object(text: bytes) -> Mapping[str, Any] | BadRecord:
    """The record of a JSON text, or the fault of the text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _as_python_reads(text)
    if isinstance(value, dict | BadRecord):
        return cast("dict[str, Any] | BadRecord", value)
    return BadRecord(
        f"not an object but {_shown(text)}: a record is an object of named fields",
        reason="not an object",
    )


def _as_python_reads(text: bytes) -> Any:
    """Read a text that the strict reader refused: NaN and infinities are accepted, all else is a
    fault."""
    try:
        value = json.loads(text.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return BadRecord(
            f"not UTF-8 (byte {error.object[error.start]:#x} at {error.start}): save the file as "
            "UTF-8",
            reason="not UTF-8",
        )
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        return BadRecord(
            f"{half} is half of a surrogate pair and no character",
            reason="half of a surrogate pair",
        )
    except RecursionError:
        return BadRecord("its values are nested too deep", reason="nested too deep")
    except ValueError as error:
        return BadRecord(f"not JSON ({error}): {_shown(text)}", reason="not JSON")
    return value


def _shown(text: bytes) -> str:
    words = text[:60].strip().decode(errors="replace")
    return repr(words + ("..." if len(text) > 60 else ""))
