"""Passage search: reads a corpus, builds an index on disk, searches it, or asks another engine."""

from agent_loop.tools.search.corpus import CorpusProgress
from agent_loop.tools.search.index import Passage, PassageIndex

__all__ = ["CorpusProgress", "Passage", "PassageIndex"]
