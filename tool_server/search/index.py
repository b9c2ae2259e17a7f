"""Search index of passages on disk: built once from a corpus, opened in milliseconds.

An index is a folder of tantivy's files and `manifest.json`, which describes the corpus and the size
of each file. The folder is written under another name and renamed when it is complete, so that an
incomplete index never has the right name. Opening a folder that is damaged, has another version, or
is not an index, fails with an error that says so.
"""

import importlib.metadata
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tantivy
from pydantic import BaseModel, ConfigDict, ValidationError

from config.disk import claimed, flush, sync
from tool_server.search.corpus import FORM, CorpusProgress, CorpusReader, sha256_of
from tool_server.search.ranking import Ranking

FORMAT = 1
"""Version of the folder's format; an index of another version must be built again."""

MANIFEST = "manifest.json"
WRITER_HEAP_BYTES = 200_000_000
"""Memory of a build before it writes a segment; 100k passages of 100 words fit in one segment."""

PROGRESS_EVERY = 1000
"""Passages between two calls of the progress function."""

_TEMPORARY = "passages-"
_TANTIVY = importlib.metadata.version("tantivy")
_REBUILD = "build it again with `verl-mixed prepare corpus`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One search result."""

    id: str
    contents: str
    score: float
    """BM25 score; only comparable within one query."""


class CorpusFile(BaseModel):
    """The file from which an index was built."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    """Checksum of the file; with `limit`, of the part that was read."""

    limit: int | None
    """Most passages to read; None for all."""


class Manifest(BaseModel):
    """Content of `manifest.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    tantivy: str
    """Version of tantivy that wrote the index."""

    passages: int
    rows: int
    """Lines of the corpus that were read."""

    dropped: dict[str, int]
    """Reason -> lines left out."""

    corpus: CorpusFile
    files: dict[str, int]
    """Name -> bytes."""


class PassageIndex:
    """A searchable corpus; threads may share it, and many processes may open it.

    An open index works on when its folder is replaced or removed.
    """

    def __init__(self, index: tantivy.Index, manifest: Manifest) -> None:
        self.manifest = manifest
        self.size = manifest.passages
        """Number of passages."""

        self._searcher = index.searcher()
        self._ranking = Ranking(self._searcher, index.schema)

    @classmethod
    def build(
        cls,
        corpus_path: Path | str,
        index_dir: Path | str | None = None,
        *,
        progress: Callable[[CorpusProgress], None] = lambda _: None,
        skip_bad: bool = False,
        limit: int | None = None,
    ) -> "PassageIndex":
        """Build an index of a corpus. Constant memory; a killed build leaves no folder that opens.

        Args:
            corpus_path: JSON lines in the format of `corpus`, plain or gzip.
            index_dir: folder of the index. An existing index is replaced; any other content is an
                error. None takes a temporary folder, removed with the object or the process.
            progress: called every `PROGRESS_EVERY` passages and at the end.
            skip_bad: leave out and count lines that are not passages.
            limit: most passages to read; None reads all.

        Raises:
            FileNotFoundError: there is no such corpus.
            ValueError: a line is not a passage, the corpus has no passages, or `index_dir` has
                other content.
            OSError: the folder cannot be written, or another process builds the index now.
        """
        reader = CorpusReader(corpus_path, skip_bad=skip_bad, limit=limit)
        if index_dir is None:
            folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
            try:
                _fill(folder, reader, progress, limit)
                index = cls.open(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
            return index
        folder = Path(index_dir)
        _refuse_other(folder)
        with _draft(folder) as draft:
            _fill(draft, reader, progress, limit)
            cls.open(draft)
            _rename(draft, folder)
        return cls.open(folder)

    @classmethod
    def open(cls, index_dir: Path | str) -> "PassageIndex":
        """Open a built index. The corpus is not needed.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the folder is not an index, is damaged, or has another version.
        """
        folder = Path(index_dir)
        manifest = read_manifest(folder)
        for name, size_bytes in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise _cannot_open(folder, f"{name} is missing")
            if (held := path.stat().st_size) != size_bytes:
                why = f"{name} has {held} bytes and was written with {size_bytes}"
                raise _cannot_open(folder, why)
        try:
            with _links(folder, manifest.files) as links:
                opened = cls(tantivy.Index.open(str(links)), manifest)
        except (ValueError, OSError) as error:
            why = f"{error} (tantivy {_TANTIVY}, written by {manifest.tantivy})"
            raise _cannot_open(folder, why) from error
        held = opened._searcher.num_docs
        if held != manifest.passages:
            why = f"it has {held} passages, {MANIFEST} says {manifest.passages}"
            raise _cannot_open(folder, why)
        return opened

    @classmethod
    def of(cls, path: Path | str) -> "PassageIndex":
        """The index of an index folder or of a corpus file.

        Args:
            path: an index folder, or a corpus. For a corpus, `<corpus>.index` beside it is opened
                if it was built from the whole, unchanged corpus; otherwise an index is built in a
                temporary folder.

        Raises:
            FileNotFoundError, ValueError: see `open` and `build`.
        """
        path = Path(path)
        if path.is_dir():
            return cls.open(path)
        beside = index_beside(path)
        if beside.is_dir():
            index = cls.open(beside)
            if index.is_of(path):
                return index
        return cls.build(path)

    def is_of(self, corpus_path: Path | str) -> bool:
        """Whether it was built from the whole corpus, which has not changed since.

        A corpus is unchanged if its size is the same, and its time or its checksum.

        Raises:
            FileNotFoundError: there is no such corpus.
        """
        path, corpus = Path(corpus_path), self.manifest.corpus
        stat = path.stat()
        return (
            corpus.limit is None
            and stat.st_size == corpus.size_bytes
            and (stat.st_mtime_ns == corpus.mtime_ns or sha256_of(path) == corpus.sha256)
        )

    def search(self, query: str, k: int) -> list[Passage]:
        """The best passages for the words of a query.

        Args:
            query: any text.
            k: most passages to return, >= 1.

        Returns:
            At most k passages, best first; none if the corpus has no word of the query.

        Raises:
            ValueError: k is below 1.
        """
        if k < 1:
            raise ValueError(f"cannot search for k={k} passages: k is at least 1")
        passages = []
        for score, address in self._ranking.best(query, k):
            document = self._searcher.doc(address)
            passages.append(
                Passage(
                    id=bytes(document.get_first("id") or b"").decode(),
                    contents=str(document.get_first("contents")),
                    score=float(score),
                )
            )
        return passages


def index_beside(corpus_path: Path) -> Path:
    """Default folder of the index that `verl-mixed prepare corpus` builds."""
    return corpus_path.with_name(f"{corpus_path.name}.index")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is not an index, or has another format.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot open index {folder}: no such folder; {_REBUILD}")
    try:
        text = (folder / MANIFEST).read_text()
    except FileNotFoundError as error:
        why = f"it has no {MANIFEST}, so it is not an index of passages, or its build was cut short"
        raise _cannot_open(folder, why) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot_open(folder, f"{MANIFEST}: {error}") from error
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or MANIFEST}: {item['msg']}"
            for item in error.errors()
        )
        raise _cannot_open(folder, wrong) from error
    if manifest.format != FORMAT:
        why = f"its format is {manifest.format}, this version reads {FORMAT}"
        raise _cannot_open(folder, why)
    return manifest


def _cannot_open(folder: Path, why: str) -> ValueError:
    return ValueError(f"cannot open index {folder}: {why}; {_REBUILD}")


@contextmanager
def _links(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A temporary folder of links to the index's files, needed until the index is open.

    tantivy writes a lock beside the files that it opens, and the index may be on a read-only disk.
    """
    links = Path(tempfile.mkdtemp(prefix="index-links-"))
    try:
        for name in names:
            (links / name).symlink_to(folder.resolve() / name)
        yield links
    finally:
        for _ in range(100):  # a thread of tantivy may write the lock once more meanwhile
            shutil.rmtree(links, ignore_errors=True)
            if not links.exists():
                break


# --- building -------------------------------------------------------------------------------------


def _fill(
    folder: Path,
    reader: CorpusReader,
    progress: Callable[[CorpusProgress], None],
    limit: int | None,
) -> None:
    """Write an index into an empty folder, the manifest last."""
    builder = tantivy.SchemaBuilder()
    builder.add_bytes_field("id", stored=True)
    builder.add_text_field("contents", stored=True, index_option="freq")
    index = tantivy.Index(builder.build(), path=str(folder))
    # One thread keeps the order of passages, so that equal scores have the same order everywhere.
    writer = index.writer(heap_size=WRITER_HEAP_BYTES, num_threads=1)
    with reader:
        for id, contents in reader:
            document = tantivy.Document()
            document.add_bytes("id", id.encode())
            document.add_text("contents", contents)
            with _writing(folder):
                writer.add_document(document)
            if reader.kept % PROGRESS_EVERY == 0:
                progress(reader.progress)
        progress(reader.progress)
        if reader.kept == 0:
            reasons = ", ".join(f"{count} x {why}" for why, count in reader.dropped.items())
            raise ValueError(
                f"cannot index {reader.path}: it has no passages ({reasons or 'empty'}); {FORM}"
            )
    with _writing(folder):
        writer.commit()
        writer.wait_merging_threads()
    for path in folder.iterdir():  # tantivy creates some files readable for their owner only
        path.chmod(folder.stat().st_mode & 0o666)
    corpus = CorpusFile(
        name=reader.path.name,
        size_bytes=reader.stat.st_size,
        mtime_ns=reader.stat.st_mtime_ns,
        sha256=reader.sha256,
        limit=limit,
    )
    manifest = Manifest(
        format=FORMAT,
        tantivy=_TANTIVY,
        passages=reader.kept,
        rows=reader.rows,
        dropped=dict(reader.dropped),
        corpus=corpus,
        files={
            path.name: path.stat().st_size
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".")  # tantivy's locks
        },
    )
    with (folder / MANIFEST).open("w") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        flush(file)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # tantivy raises it for a full disk too
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"cannot write index {folder}: {error} ({free >> 20} MiB are free there); free space "
            "on the disk, or give another folder"
        ) from error


def _refuse_other(folder: Path) -> None:
    """Raise an error if the folder exists and is neither empty nor an index (of any format)."""
    if folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir())):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"cannot build index {folder}: something else is there; give a new or empty folder"
        )


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, locked by this process; remains of a killed build are
    removed."""
    draft = folder.with_name(f".{folder.name}.draft")
    draft.mkdir(parents=True, exist_ok=True)
    with claimed(draft) as is_ours:
        if not is_ours:
            raise OSError(
                f"cannot build index {folder}: another process builds it now; wait for its end"
            )
        for path in draft.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield draft
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _rename(draft: Path, folder: Path) -> None:
    """Rename the draft to `folder`. An older index is renamed first, so for a moment there is
    none."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)
