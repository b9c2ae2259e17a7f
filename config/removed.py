"""Settings that a release had and this one has not: a config that sets one is told why."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

REMOVED: dict[str, str] = {
    "mixed.tool_server.search_upstream_kind": (
        "a URL that ends in /search is Serper's, and others are Search-R1's; leave it out"
    ),
    "mixed.tool_server.search_timeout_s": "a request to a search engine has 30 s; leave it out",
    "mixed.tool_server.search_connections": "32 requests to an engine run at once; leave it out",
    "mixed.tool_server.search_workers": "two threads search the corpus; leave it out",
    "mixed.tool_server.session_idle_s": "an interpreter ends after 15 idle minutes; leave it out",
    "mixed.tool_server.queue_length": "20,000 requests of a tool may wait; leave it out",
    "mixed.tool_server.drain_s": "after SIGTERM requests have 10 s to end; leave it out",
    "mixed.tool_server.max_body_mb": "a body has at most 32 MB; leave it out",
    "mixed.tool_server.algebra_workers": (
        "as many expressions as programs run at once; set mixed.tool_server.sandbox_workers"
    ),
    "mixed.tool_server.algebra_s": "an expression has 5 s; leave it out",
    "mixed.tool_server.algebra_memory_mb": "an expression has 1024 MB; leave it out",
}
"""Why each key is gone; and after a semicolon, what to do. A key is a dotted path with `*` for a
name that the user chose; `agent_loops.*.` begins the settings of an agent loop's entry."""


def why_removed(key: str) -> str | None:
    """The reason why a key is gone; None if no release had it."""
    why = next((why for gone, why in REMOVED.items() if fnmatchcase(key, gone)), None)
    return why and f"this release has no such key: {why}"


def without_removed(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The config of a run that an earlier release began, without the keys that are gone since."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{path}.{name}" if path else str(name)
        if why_removed(key) is None:
            kept[name] = without_removed(value, key) if isinstance(value, Mapping) else value
    return kept
