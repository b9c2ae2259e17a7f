"""Fast BM25 search with tantivy; the result equals that of one query of all words.

tantivy's Python binding reads all postings of all words, and a common word has about as many
postings as there are passages. So a query is split: a passage must contain one of the rare words,
and common words only add to its score. A word adds at most `(K1 + 1) * idf` to a score.

The result is exact if the k-th best score exceeds the sum that all common words together can add:
then no passage without a rare word can be among the best k. Otherwise a second search moves more
words to the rare ones.

Example: idf 6.0 of "nadia" and 0.1 of "the", k = 1. A passage with only "the" scores less than
(1.2 + 1) * 0.1 = 0.22. If the best passage with "nadia" scores 5.0, "the" need not be searched for.

Source: MaxScore, Turtle & Flood 1995, "Query evaluation: strategies and optimizations".
"""

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tantivy

MAX_WORDS = 256
"""Distinct words of a query that are searched; further words are ignored."""

K1 = 1.2
"""Parameter k1 of BM25 in tantivy, which cannot be set."""

_GUESS = 1.5
"""First guess of the k-th best score, in idf of the rarest word. Values from 1 to 2 are about as
fast (measured)."""

_FIELD = "contents"

Hit = tuple[float, tantivy.DocAddress]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    passages: int
    """Number of passages with the word."""

    max_score: float
    """Upper bound of what the word adds to a score."""

    query: tantivy.Query


class Ranking:
    """The best passages for a query. The index must use the default tokenizer for `contents`.

    Safe to share between threads; tantivy searches without the GIL.
    """

    def __init__(self, searcher: tantivy.Searcher, schema: tantivy.Schema) -> None:
        self._searcher, self._schema = searcher, schema
        self._size = searcher.num_docs
        builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())  # tantivy's "default"
        builder = builder.filter(tantivy.Filter.remove_long(40))
        self._analyzer = builder.filter(tantivy.Filter.lowercase()).build()
        self._analyzing = threading.Lock()  # two threads at once raise "Already borrowed"

    def best(self, text: str, k: int) -> list[Hit]:
        """Score and address of the k best passages, best first; fewer if fewer have a word.

        Punctuation is not syntax, and a word that comes twice counts twice. k is at least 1.
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
        """The same result by one query of all words; tests compare `best` with it."""
        words = self._words(text)
        return self._search(words, len(words), k) if words else []

    def _words(self, text: str) -> list[_Word]:
        """The words of a text that any passage contains, rarest first."""
        with self._analyzing:
            tokens = self._analyzer.analyze(text)
        counts = Counter(tokens)
        words = []
        for word, count in list(counts.items())[:MAX_WORDS]:
            passages = self._searcher.doc_freq(_FIELD, word)
            if not passages:
                continue
            query = tantivy.Query.term_query(self._schema, _FIELD, word, "freq")
            if count > 1:
                query = tantivy.Query.boost_query(query, float(count))
            idf = math.log(1 + (self._size - passages + 0.5) / (passages + 0.5))
            max_score = count * (K1 + 1) * idf * (1 + 1e-5)  # scores are rounded
            words.append(_Word(passages=passages, max_score=max_score, query=query))
        return sorted(words, key=lambda word: word.passages)

    def _search(self, words: Sequence[_Word], cut: int, k: int) -> list[Hit]:
        """Passages with any of the first `cut` words, scored by all of them."""
        query = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, word.query) for word in words[:cut]]
        )
        for word in words[cut:]:  # one by one, because a union would read all of their postings
            query = tantivy.Query.boolean_query(
                [(tantivy.Occur.Must, query), (tantivy.Occur.Should, word.query)]
            )
        return self._searcher.search(query, limit=k, count=False).hits


def _needed(words: Sequence[_Word], least: float) -> int:
    """Smallest n so that each passage with a score of `least` has one of the n rarest words."""
    cut, rest = len(words), 0.0
    while cut > 1 and rest + words[cut - 1].max_score < least:
        cut -= 1
        rest += words[cut].max_score
    return cut


def _rarest_idf(words: Sequence[_Word], k: int) -> float:
    """Idf of the first word, from the rarest on, up to which the words are in k passages."""
    covered = 0
    for word in words:
        covered += word.passages
        if covered >= k:
            return word.max_score / (K1 + 1)
    return 0.0
