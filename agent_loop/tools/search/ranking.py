"""BM25 over a tantivy searcher, with the same passages and scores as a query of all its words.

tantivy's Python binding reads every posting of every word, and of the common ones there are as many
as passages. So a query is split: a passage must hold one of the rare words, and the common ones
only add to its score. That is exact where the best passages score more than all common words
together can give, which is known afterwards; where it is not so, a second search takes the words
that are missing. A word cannot give more than `(K1 + 1) * idf`.

Source: MaxScore, Turtle & Flood 1995, "Query evaluation: strategies and optimizations".
"""

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tantivy

MOST_WORDS = 256
"""Distinct words of a query that are looked up; further ones are ignored."""

K1 = 1.2
"""tantivy's, which cannot be set."""

_GUESS = 1.5
"""Times the idf of the rarest word: what the last passage found may score. Measured: from 1 to 2
matters little."""

Hit = tuple[float, tantivy.DocAddress]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    passages: int
    """That hold it."""

    most: float
    """It adds less than this to a score."""

    query: tantivy.Query


class Ranking:
    """The best passages for a query. Safe to share between threads; tantivy searches without the
    GIL.

    Args:
        searcher: over an index whose field has the default tokenizer.
        schema: of that index.
        field: the text to search.
    """

    def __init__(self, searcher: tantivy.Searcher, schema: tantivy.Schema, field: str) -> None:
        self._searcher, self._schema, self._field = searcher, schema, field
        self._size = searcher.num_docs
        filters = (tantivy.Filter.remove_long(40), tantivy.Filter.lowercase())
        builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())  # tantivy's "default"
        for each in filters:
            builder = builder.filter(each)
        self._analyzer = builder.build()
        self._analyzing = threading.Lock()  # two threads in it at once: "Already borrowed"

    def best(self, text: str, k: int) -> list[Hit]:
        """Score and address of the k best passages, best first; fewer where fewer hold a word.

        Args:
            text: any text; punctuation is never syntax, a word that comes twice counts twice.
            k: >= 1.
        """
        words = self._words(text)
        if not words:
            return []
        cut = _needed(words, _GUESS * _rarest_idf(words, k))
        hits = self._search(words, cut, k)
        if cut < len(words):
            exact = _needed(words, hits[-1][0] if len(hits) == k else 0.0)
            if exact > cut:
                hits = self._search(words, exact, k)
        return hits

    def all_words(self, text: str, k: int) -> list[Hit]:
        """The same by one query of all words, as tantivy offers it: what `best` must agree with."""
        words = self._words(text)
        return self._search(words, len(words), k) if words else []

    def _words(self, text: str) -> list[_Word]:
        """Those that any passage holds, rarest first."""
        with self._analyzing:
            tokens = self._analyzer.analyze(text)
        counts = Counter(tokens)
        words = []
        for word, count in list(counts.items())[:MOST_WORDS]:
            passages = self._searcher.doc_freq(self._field, word)
            if not passages:
                continue
            query = tantivy.Query.term_query(self._schema, self._field, word, "freq")
            if count > 1:
                query = tantivy.Query.boost_query(query, float(count))
            idf = math.log(1 + (self._size - passages + 0.5) / (passages + 0.5))
            most = count * (K1 + 1) * idf * (1 + 1e-5)  # scores are rounded
            words.append(_Word(passages=passages, most=most, query=query))
        return sorted(words, key=lambda word: word.passages)

    def _search(self, words: Sequence[_Word], cut: int, k: int) -> list[Hit]:
        """Passages with any of the first `cut` words, scored by all of them."""
        query = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, word.query) for word in words[:cut]]
        )
        for word in words[cut:]:  # one by one: a union of them would be read from end to end
            query = tantivy.Query.boolean_query(
                [(tantivy.Occur.Must, query), (tantivy.Occur.Should, word.query)]
            )
        return self._searcher.search(query, limit=k, count=False).hits


def _needed(words: Sequence[_Word], least: float) -> int:
    """How many of the words, from the rarest on, every passage that scores `least` holds one of."""
    cut, rest = len(words), 0.0
    while cut > 1 and rest + words[cut - 1].most < least:
        cut -= 1
        rest += words[cut].most
    return cut


def _rarest_idf(words: Sequence[_Word], k: int) -> float:
    """Of the rarest word that, with the rarer ones, k passages hold."""
    found = 0
    for word in words:
        found += word.passages
        if found >= k:
            return word.most / (K1 + 1)
    return 0.0
