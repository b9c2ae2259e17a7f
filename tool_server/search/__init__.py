"""Passage search: reads a corpus, builds an index on disk, searches it, or asks another engine."""

from tool_server.search.index import Passage, PassageIndex

__all__ = ["Passage", "PassageIndex"]
