"""An index of passages on disk: built once, whole or absent, opened in milliseconds.

A folder of tantivy's files and `manifest.json`, which says what they were made of and how long each
is. It is written under another name and renamed when it is complete; who opens a folder that is
damaged, foreign or of another version is told which of these it is.
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

from agent_loop.tools.search.corpus import CorpusProgress, CorpusReader, sha256_of
from agent_loop.tools.search.ranking import Ranking
from samplers.disk import claimed, flush, sync

FORMAT = 1
"""Of the folder; another one has to be built again."""

MANIFEST = "manifest.json"
WRITER_HEAP_BYTES = 200_000_000
"""What a build holds before it writes a segment; 100k passages of 100 words are one."""

PROGRESS_EVERY = 1000
"""Passages between two calls of a progress function."""

_TEMPORARY = "passages-"
_TANTIVY = importlib.metadata.version("tantivy")
_REBUILD = "build it again with `verl-mixed prepare corpus`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One search result."""

    id: str
    contents: str
    score: float
    """BM25; only comparable within one query."""


class CorpusFile(BaseModel):
    """Which file an index was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    """Of the file as it lay there; where `limit` cut it short, of the part that was read."""

    limit: int | None
    """Passages that were wanted at most."""


class Manifest(BaseModel):
    """What `manifest.json` says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    tantivy: str
    """Version that wrote it."""

    passages: int
    rows: int
    """Lines of the corpus that were read."""

    dropped: dict[str, int]
    """Reason -> lines left out."""

    corpus: CorpusFile
    files: dict[str, int]
    """Name -> bytes."""


class PassageIndex:
    """A searchable corpus; safe to share between threads, and open in many processes at once.

    Stays usable when its folder is replaced or removed meanwhile.
    """

    def __init__(self, index: tantivy.Index, manifest: Manifest) -> None:
        self.manifest = manifest
        self.size = manifest.passages
        """Passages."""

        self._searcher = index.searcher()
        self._ranking = Ranking(self._searcher, index.schema, "contents")

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
        """Index a corpus. Constant memory; a build that is killed leaves nothing that opens.

        Args:
            corpus_path: JSON lines as `corpus` describes them, plain or gzip.
            index_dir: folder of the index; an index that is there is replaced, anything else is
                left alone. None keeps it in a temporary folder, removed with the object or the
                process.
            progress: told now and then, and at the end, how far it is.
            skip_bad: leave out, and count, lines that are no passage.
            limit: passages to take; None takes all.

        Raises:
            FileNotFoundError: there is no such corpus.
            ValueError: a line is no passage, or none is; `index_dir` is something else.
            OSError: the folder cannot be written, or another process builds it now.
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
            ValueError: it is no index, or damaged, or of another version.
        """
        folder = Path(index_dir)
        manifest = read_manifest(folder)
        for name, size_bytes in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise ValueError(f"cannot open index {folder}: {name} is missing; {_REBUILD}")
            if path.stat().st_size != size_bytes:
                raise ValueError(
                    f"cannot open index {folder}: {name} has {path.stat().st_size} bytes and was "
                    f"written with {size_bytes}; {_REBUILD}"
                )
        try:
            with _links(folder, manifest.files) as links:
                opened = cls(tantivy.Index.open(str(links)), manifest)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"cannot open index {folder}: {error} (tantivy {_TANTIVY}, written by "
                f"{manifest.tantivy}); {_REBUILD}"
            ) from error
        held = opened._searcher.num_docs
        if held != manifest.passages:
            raise ValueError(
                f"cannot open index {folder}: it holds {held} passages and {MANIFEST} says "
                f"{manifest.passages}; {_REBUILD}"
            )
        return opened

    @classmethod
    def of(
        cls,
        path: Path | str,
        *,
        progress: Callable[[CorpusProgress], None] = lambda _: None,
    ) -> "PassageIndex":
        """The index that a setting names.

        Args:
            path: an index folder, or a corpus. A corpus whose index lies beside it, as
                `<corpus>.index`, and was built of all of it as it is now, is not indexed again;
                otherwise it is, into a temporary folder.
            progress: told how far that is.

        Raises:
            FileNotFoundError, ValueError: as `open` and `build`.
        """
        path = Path(path)
        if path.is_dir():
            return cls.open(path)
        beside = index_beside(path)
        if beside.is_dir():
            index = cls.open(beside)
            if index.is_of(path):
                return index
        return cls.build(path, progress=progress)

    def is_of(self, corpus_path: Path | str) -> bool:
        """Whether it holds all of the corpus as it is now: same length, and same time or content.

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
            k: most passages wanted, >= 1.

        Returns:
            At most k passages, best first; none when no word of the query is in the corpus.

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
    """Where `verl-mixed prepare corpus` puts the index of a corpus unless told otherwise."""
    return corpus_path.with_name(f"{corpus_path.name}.index")


def read_manifest(folder: Path) -> Manifest:
    """What an index folder says of itself.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not an index, or of another format.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot open index {folder}: no such folder; {_REBUILD}")
    try:
        text = (folder / MANIFEST).read_text()
    except FileNotFoundError as error:
        raise ValueError(
            f"cannot open index {folder}: it has no {MANIFEST}, so it is not an index of passages, "
            f"or its build was cut short; {_REBUILD}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot open index {folder}: {MANIFEST}: {error}; {_REBUILD}") from error
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or MANIFEST}: {item['msg']}"
            for item in error.errors()
        )
        raise ValueError(f"cannot open index {folder}: {wrong}; {_REBUILD}") from error
    if manifest.format != FORMAT:
        raise ValueError(
            f"cannot open index {folder}: its format is {manifest.format}, this version reads "
            f"{FORMAT}; {_REBUILD}"
        )
    return manifest


@contextmanager
def _links(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A folder of links to the index: tantivy writes a lock beside what it opens, and an index may
    lie where it cannot. Needed only until it is open."""
    links = Path(tempfile.mkdtemp(prefix="index-links-"))
    try:
        for name in names:
            (links / name).symlink_to(folder.resolve() / name)
        yield links
    finally:
        for _ in range(100):  # a thread of tantivy's may put the lock back, once, in between
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
    # One thread: passages keep their order, so that equal scores come in the same order anywhere.
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
                f"cannot index {reader.path}: it holds no passage ({reasons or 'empty'})"
            )
    with _writing(folder):
        writer.commit()
        writer.wait_merging_threads()
    for path in folder.iterdir():  # tantivy makes some readable for their owner alone
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
    except ValueError as error:  # tantivy's word for a full disk too
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"cannot write index {folder}: {error}; {free >> 20} MiB are free there"
        ) from error


def _refuse_other(folder: Path) -> None:
    """Nothing but an index of ours, of any format, is replaced."""
    if folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir())):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"cannot build index {folder}: something else is there; give a new or empty folder"
        )


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, ours alone; what a killed build left in it is removed."""
    draft = folder.with_name(f".{folder.name}.draft")
    draft.mkdir(parents=True, exist_ok=True)
    with claimed(draft) as is_ours:
        if not is_ours:
            raise OSError(
                f"cannot build index {folder}: another process builds it now; wait for it"
            )
        for path in draft.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield draft
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _rename(draft: Path, folder: Path) -> None:
    """Put the index where it belongs. Between two renames there is none, where one was before."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)
