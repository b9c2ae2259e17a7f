"""Sources that search although no search engine would answer: `/retrieve` would answer 503.

Every trajectory that searches would then be lost as a fault of the infrastructure.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config.lookup import at, files_at
from verl_mixed.checks.config.tools import agents_of
from verl_mixed.run.sections import (
    NAMED_TOOLS_LOOPS,
    SEARCH_LOOP,
    entry_of,
    loop_of,
    sound_sources,
)


def own_search_problems(
    config: Mapping[str, Any], corpus: Path | None, environ: Mapping[str, str], *, data: bool = True
) -> Iterator[str]:
    """Sources that search, if the run's own tool server has no engine.

    Args:
        corpus: found beside the data, see `launch.plan`.
        environ: of the tool server.
        data: whether the rows may be read, for the agents of sources that name none.
    """
    given = at(config, "mixed.tool_server")
    given = given if isinstance(given, Mapping) else {}
    if corpus or given.get("corpus_path") or given.get("search_upstream"):
        return
    if not all(Path(file).exists() for file in files_at(config, "data.train_files")):
        return  # reported elsewhere; the corpus may be beside them
    for problem, remedy in _searching(config, data=data):
        from tool_server.search.upstream import serper_key  # takes a quarter of a second

        if serper_key(environ) is not None:
            return
        yield (
            f"{problem}, and the run's tool server has no search engine: each search would answer "
            "503; put corpus.jsonl beside the training files, set 'mixed.tool_server={corpus_path: "
            "FILE}' or 'mixed.tool_server={search_upstream: URL}', or export SERPER_API_KEY"
            f"{remedy}"
        )


def given_search_problems(
    config: Mapping[str, Any], healths: Mapping[str, bytes], *, data: bool = True
) -> Iterator[str]:
    """Sources that search, if a tool server that is given says that it has no engine.

    Args:
        healths: URL -> what its `/health` answers.
    """
    without = [url for url, health in healths.items() if _has_no_engine(health)]
    for problem, remedy in _searching(config, data=data) if without else ():
        yield (
            f"{problem}, and {', '.join(without)} (TOOL_SERVER_URL) has no search engine: each "
            "search would answer 503; start it with `verl-mixed serve-tools --corpus FILE`, with "
            f"--search-upstream URL, or with SERPER_API_KEY{remedy}"
        )


def _has_no_engine(health: bytes) -> bool:
    """False if the answer does not say it: without the token, or by another kind of server."""
    try:
        return json.loads(health).get("search", "unknown") is None
    except (ValueError, AttributeError):
        return False


def _searching(config: Mapping[str, Any], *, data: bool) -> Iterator[tuple[str, str]]:
    """(who searches, one more remedy) for each source whose agent offers a search."""
    sources = sound_sources(config)
    pairs = [(n, each) for n, agents in agents_of(config, data=data).items() for each in agents]
    for name, agent in pairs:
        entry = entry_of(config, agent)
        who = f"source={name!r} with agent={agent!r} searches"
        if (loop := loop_of(entry)) == SEARCH_LOOP:
            yield who, ""
        elif loop in NAMED_TOOLS_LOOPS:
            own, tools = sources[name].tools, entry.get("tool_names")
            if own is not None:
                tools = [tool.tool for tool in own]
            if tools is None:
                yield (
                    f"source={name!r} with agent={agent!r} has all tools, search too",
                    f", or name the tools that it has: agent.tools=[calculator,answer], or "
                    f"++agent_loops.{agent}.tool_names=[calculate]",
                )
            elif "search" in tools:
                yield who, ""
