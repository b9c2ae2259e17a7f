"""Passage search: a corpus into an index on disk, an index under words, an engine behind a URL."""

from agent_loop.tools.search.corpus import CorpusProgress
from agent_loop.tools.search.index import Passage, PassageIndex

__all__ = ["CorpusProgress", "Passage", "PassageIndex"]
