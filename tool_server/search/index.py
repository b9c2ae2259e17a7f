"""Search index of passages on disk: built once from a corpus, opened in milliseconds.

An index is a folder of tantivy's files and `manifest.json`, which says of which corpus it is. The
folder is written under another name and renamed when it is complete, so that an incomplete index
never has the right name.
"""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tantivy
from pydantic import BaseModel, ConfigDict

from config.disk import flush, sync
from tool_server.search.corpus import FORM, CorpusReader
from tool_server.search.ranking import Ranking

MANIFEST = "manifest.json"
WRITER_HEAP_BYTES = 200_000_000
"""Memory of a build before it writes a segment; 100k passages of 100 words fit in one segment."""

PROGRESS_EVERY = 1000
"""Passages between two calls of the progress function."""


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """One search result, in Search-R1's form."""

    document: dict[str, Any]
    """Has `contents`, `id` if the engine gives one, and further fields of the engine."""

    score: float
    """Only comparable within one query; of an index BM25."""

    @property
    def contents(self) -> str:
        return self.document["contents"]


class CorpusFile(BaseModel):
    """The file from which an index was built."""

    model_config = ConfigDict(frozen=True)

    size_bytes: int
    mtime_ns: int
    sha256: str
    limit: int | None
    """Most passages to read; None for all."""


class Manifest(BaseModel):
    """Content of `manifest.json`; that of release 1.1.0 has further fields."""

    model_config = ConfigDict(frozen=True)

    corpus: CorpusFile


class PassageIndex:
    """A searchable corpus; threads may share it, and many processes may open it.

    An open index works on when its folder is replaced or removed.
    """

    def __init__(self, index: tantivy.Index, corpus: CorpusFile) -> None:
        self.corpus = corpus
        self.read: CorpusReader | None = None
        """What was read and left out, if this object has built the index."""

        self._searcher = index.searcher()
        self.size = self._searcher.num_docs
        """Number of passages."""

        self._ranking = Ranking(self._searcher, index.schema)

    @classmethod
    def build(
        cls,
        corpus_path: Path | str,
        index_dir: Path | str | None = None,
        *,
        progress: Callable[[CorpusReader], None] = lambda _: None,
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
            ValueError: a line is not a passage, the corpus has no passages, `index_dir` has other
                content, or tantivy cannot write the index.
            OSError: the folder cannot be written.
        """
        if index_dir is None:
            home = Path(tempfile.mkdtemp(prefix="passages-"))
            try:
                index = cls.build(
                    corpus_path, home / "index", progress=progress, skip_bad=skip_bad, limit=limit
                )
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)
                raise
            weakref.finalize(index, shutil.rmtree, home, ignore_errors=True)
            return index
        reader, folder = CorpusReader(corpus_path, skip_bad=skip_bad, limit=limit), Path(index_dir)
        _refuse_other(folder)
        draft, old = (folder.with_name(f".{folder.name}.{name}") for name in ("draft", "old"))
        shutil.rmtree(draft, ignore_errors=True)  # of a build that was killed
        draft.mkdir(parents=True)
        try:
            _fill(draft, reader, progress)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)  # for a moment there is none
            draft.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        sync(folder.parent)
        index = cls.open(folder)
        index.read = reader
        return index

    @classmethod
    def open(cls, index_dir: Path | str) -> "PassageIndex":
        """Open a built index. The corpus is not needed.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the folder is not an index, or is damaged or of another version of tantivy.
        """
        folder = Path(index_dir)
        rebuild = "build it again with `verl-mixed prepare corpus`"
        if not folder.is_dir():
            raise FileNotFoundError(f"cannot open index {folder}: no such folder; {rebuild}")
        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            return cls(_opened(folder), manifest.corpus)
        except FileNotFoundError as error:
            why = f"it has no {MANIFEST}, so it is not an index of passages, or its build was cut"
            raise ValueError(f"cannot open index {folder}: {why}; {rebuild}") from error
        except (ValueError, OSError) as error:
            raise ValueError(f"cannot open index {folder}: {error}; {rebuild}") from error

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
        path, corpus = Path(corpus_path), self.corpus
        stat = path.stat()
        return (
            corpus.limit is None
            and stat.st_size == corpus.size_bytes
            and (stat.st_mtime_ns == corpus.mtime_ns or _sha256_of(path) == corpus.sha256)
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
                    document={
                        "id": bytes(document.get_first("id") or b"").decode(),
                        "contents": str(document.get_first("contents")),
                    },
                    score=float(score),
                )
            )
        return passages


def index_beside(corpus_path: Path) -> Path:
    """Default folder of the index that `verl-mixed prepare corpus` builds."""
    return corpus_path.with_name(f"{corpus_path.name}.index")


def _opened(folder: Path) -> tantivy.Index:
    """tantivy's index in a folder that may be on a read-only disk.

    tantivy writes a lock beside the files that it opens, so it opens links to them.
    """
    links = Path(tempfile.mkdtemp(prefix="index-links-"))
    try:
        for path in folder.resolve().iterdir():
            if not path.name.startswith("."):  # tantivy's locks
                (links / path.name).symlink_to(path)
        return tantivy.Index.open(str(links))
    finally:
        for _ in range(100):  # a thread of tantivy may write the lock once more meanwhile
            shutil.rmtree(links, ignore_errors=True)
            if not links.exists():
                break


# --- building -------------------------------------------------------------------------------------


def _fill(folder: Path, reader: CorpusReader, progress: Callable[[CorpusReader], None]) -> None:
    """Write an index into an empty folder, the manifest last."""
    stat = reader.path.stat()
    builder = tantivy.SchemaBuilder()
    builder.add_bytes_field("id", stored=True)
    builder.add_text_field("contents", stored=True, index_option="freq")
    index = tantivy.Index(builder.build(), path=str(folder))
    # One thread keeps the order of passages, so that equal scores have the same order everywhere.
    writer = index.writer(heap_size=WRITER_HEAP_BYTES, num_threads=1)
    for id, contents in reader:
        document = tantivy.Document()
        document.add_bytes("id", id.encode())
        document.add_text("contents", contents)
        writer.add_document(document)
        if reader.kept % PROGRESS_EVERY == 0:
            progress(reader)
    progress(reader)
    if reader.kept == 0:
        reasons = ", ".join(f"{count} x {why}" for why, count in reader.dropped.items())
        raise ValueError(
            f"cannot index {reader.path}: it has no passages ({reasons or 'empty'}); {FORM}"
        )
    writer.commit()
    writer.wait_merging_threads()
    for path in folder.iterdir():  # tantivy creates some files readable for their owner only
        path.chmod(folder.stat().st_mode & 0o666)
    corpus = CorpusFile(
        size_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        sha256=_sha256_of(reader.path),
        limit=reader.limit,
    )
    with (folder / MANIFEST).open("w") as file:
        file.write(Manifest(corpus=corpus).model_dump_json(indent=2) + "\n")
        flush(file)


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _refuse_other(folder: Path) -> None:
    """Raise an error if the folder exists and is neither empty nor an index (of any version)."""
    if folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir())):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"cannot build index {folder}: something else is there; give a new or empty folder"
        )
