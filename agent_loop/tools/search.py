"""Passage search for `POST /retrieve`: BM25 over a corpus, by tantivy.

Reads Search-R1's corpus format, `{"id", "contents"}` a line, where `contents` is the quoted title,
a line break, the text. A query is words: whatever punctuation a model writes, it is never query
syntax.
"""

import json
import re
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import tantivy

_WORD = re.compile(r"[^\W_]+")  # as tantivy's default tokenizer splits

WRITER_HEAP_BYTES = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One search result."""

    id: str
    contents: str
    score: float
    """BM25; only comparable within one query."""


class PassageIndex:
    """A searchable corpus; safe to share between threads."""

    def __init__(self, index: tantivy.Index, schema: tantivy.Schema, size: int) -> None:
        self._index, self._schema = index, schema
        self._searcher = index.searcher()
        self.size = size
        """Passages."""

    @classmethod
    def build(cls, corpus_path: Path | str, index_dir: Path | str | None = None) -> "PassageIndex":
        """Index a corpus.

        Args:
            corpus_path: JSON lines, `{"id", "contents"}` each.
            index_dir: folder for the index; None keeps it in a temporary folder, removed with the
                object or the process.

        Raises:
            FileNotFoundError: there is no such corpus.
            ValueError: a line is not of that form, or there is none.
        """
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("id", stored=True, tokenizer_name="raw")
        builder.add_text_field("contents", stored=True, tokenizer_name="default")
        schema = builder.build()
        folder = Path(index_dir or tempfile.mkdtemp(prefix="passages-"))
        folder.mkdir(parents=True, exist_ok=True)
        index = tantivy.Index(schema, path=str(folder))
        writer = index.writer(heap_size=WRITER_HEAP_BYTES, num_threads=1)
        writer.delete_all_documents()
        size = 0
        with Path(corpus_path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    document = tantivy.Document(
                        id=str(record["id"]), contents=str(record["contents"])
                    )
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"cannot index {corpus_path} line {number}: each line is a JSON object "
                        'with "id" and "contents"; prepare it with `verl-mixed prepare`'
                    ) from error
                writer.add_document(document)
                size += 1
        if size == 0:
            raise ValueError(f"cannot index {corpus_path}: it holds no passage")
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        passages = cls(index, schema, size)
        if index_dir is None:
            weakref.finalize(passages, shutil.rmtree, folder, ignore_errors=True)
        return passages

    def search(self, query: str, k: int) -> list[Passage]:
        """The best passages for the words of a query.

        Args:
            query: any text.
            k: most passages wanted, >= 1.

        Returns:
            At most k passages, best first; none when no word of the query is in the corpus.
        """
        words = [word.lower() for word in _WORD.findall(query)]
        if not words:
            return []
        terms = [
            (
                tantivy.Occur.Should,
                tantivy.Query.term_query(self._schema, "contents", word, "freq"),
            )
            for word in words
        ]
        hits = self._searcher.search(tantivy.Query.boolean_query(terms), limit=k).hits
        passages = []
        for score, address in hits:
            document = self._searcher.doc(address)
            passages.append(
                Passage(
                    id=str(document.get_first("id")),
                    contents=str(document.get_first("contents")),
                    score=float(score),
                )
            )
        return passages
