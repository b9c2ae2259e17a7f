"""Reader of a corpus file: yields its passages one by one and counts the lines it leaves out.

The format is Search-R1's: JSON lines of `{"id", "contents"}`, where `contents` is the title in
quotes, a line break and the text. A line may have `title` and `text` instead of `contents`. Other
keys are ignored. The file is plain or gzip, which its first bytes show. An id that comes twice is
not detected, because a corpus may be larger than memory.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from config.disk import BrokenFile

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
FORM = 'each line is a JSON object with "id" and "contents"'


class _Row(msgspec.Struct):
    id: str | int
    contents: str | None = None
    title: str | None = None
    text: str | None = None


_decode = msgspec.json.Decoder(_Row).decode


class BadLine(BrokenFile):
    """A line that is not a passage."""

    def __init__(self, place: str, kind: str, detail: str) -> None:
        super().__init__(
            f"cannot index {place}: {kind} ({detail}); {FORM}; correct the line, "
            "or leave such lines out with `verl-mixed prepare corpus --skip-bad`"
        )
        self.kind = kind
        """The reason without details, for counts."""


class CorpusReader:
    """Iterates over `(id, contents)` of a corpus file. Constant memory.

    Args:
        path: the file.
        skip_bad: leave out and count lines that are not passages.
        limit: passages to read; None reads all.

    Raises:
        FileNotFoundError: there is no such file.
        BadLine: a line is not a passage, and `skip_bad` is False.
        ValueError: the gzip file is damaged.
    """

    def __init__(
        self, path: Path | str, *, skip_bad: bool = False, limit: int | None = None
    ) -> None:
        self.path, self._skip_bad, self.limit = Path(path), skip_bad, limit
        if not self.path.is_file():
            why = "it is a folder" if self.path.is_dir() else "no such file"
            raise FileNotFoundError(
                f"cannot index {path}: {why}; give JSON lines of id and contents"
            )
        self.rows = self.kept = 0
        self.dropped: Counter[str] = Counter()
        """Reason -> lines left out."""

        self.size_bytes, self.read_bytes = self.path.stat().st_size, 0
        """Bytes of the file as stored, so of a gzip file the compressed bytes."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        with self.path.open("rb") as file:
            is_gzip = file.peek(2)[:2] == _GZIP
            lines = gzip.GzipFile(fileobj=file) if is_gzip else file
            try:
                while self.kept != self.limit and (line := lines.readline()):
                    self.read_bytes = file.tell()
                    self.rows += 1
                    if (passage := self._passage(line)) is not None:
                        self.kept += 1
                        yield passage
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"cannot index {self.path}: the gzip file is damaged after line {self.rows} "
                    f"({error}); download it again"
                ) from error

    def _passage(self, line: bytes) -> tuple[str, str] | None:
        """The passage of a line; None if the line is left out."""
        if self.rows == 1:
            line = line.removeprefix(_BOM)
        if line.isspace() or not line:
            self.dropped["blank line"] += 1
            return None
        try:
            id, contents = self._fields(line)
        except BadLine as error:
            if not self._skip_bad:
                raise
            self.dropped[error.kind] += 1
            return None
        if not contents.strip():
            self.dropped["contents is empty"] += 1
            return None
        return id, contents

    def _fields(self, line: bytes) -> tuple[str, str]:
        place = f"{self.path} line {self.rows}"
        try:
            row = _decode(line)
        except msgspec.ValidationError as error:
            raise BadLine(place, "a field is missing or wrong", str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLine(place, "not JSON in UTF-8", str(error)) from error
        contents = row.contents
        if contents is None:
            if row.text is None:
                raise BadLine(place, "a field is missing or wrong", "no `contents`")
            contents = row.text if row.title is None else f'"{row.title}"\n{row.text}'
        return str(row.id), contents
