"""Environments of sources: their agents, and one episode that is begun and ended before Ray starts.

An episode of the first row shows that the class can be imported, takes its options and answers, and
how the model's chat template writes what it says.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.environments.episode import Start
from agent_loop.row import Row
from config.environments import ENVIRONMENT_LOOP, EnvironmentEntry
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, PromptConfig, SourceConfig, ToolConfig
from tool_server.wire.protocol import Fault
from verl_mixed.checks.config.data import batches, sound_files
from verl_mixed.checks.config.tools import agents_of
from verl_mixed.run.sections import entry_of, loop_of, section_of, sound_sources

_OF_TOOLS = frozenset({"tool_names", "topk", "persistent_interpreter"})
"""Settings of agents that call tools of a run; an agent of environments reads none of them."""

_COLUMNS = ("data_source", "prompt", "extra_info", "reward_model")


def environment_problems(config: Mapping[str, Any], *, data: bool = True) -> Iterator[str]:
    """Environments that their source's agent would not read, or that do not begin an episode.

    Args:
        data: whether the rows may be read; no episode begins without them.
    """
    sources = sound_sources(config)
    for name, agents in agents_of(config, data=data).items():
        source, key = sources[name], f"mixed.sources.{name}"
        acting = [agent for agent in agents if loop_of(entry_of(config, agent)) == ENVIRONMENT_LOOP]
        if source.environment is None:
            for agent in acting:
                yield (
                    f"{key} with agent={agent!r} has no environment; set {key}.environment, as "
                    "path/to/file.py:Class (docs/environments.md)"
                )
            continue
        for agent in agents:
            if agent not in acting:
                yield (
                    f"{key}.environment with agent={agent!r}: this agent acts in no environment; "
                    "leave `agent` out, or name one whose class inherits EnvironmentAgentLoop"
                )
        for agent in acting:
            if given := sorted(_OF_TOOLS & entry_of(config, agent).keys()):
                yield (
                    f"agent {agent!r}: {', '.join(given)}: the tools of an environment are its "
                    "own; leave it out"
                )
        if source.observation_style is not None:
            yield (
                f"{key}.observation_style={source.observation_style!r} with an environment: its "
                "answers are messages of the chat template; leave it out"
            )
        if _has_a_question(config, source):
            yield (
                f"{key}.prompt={source.prompt!r} with an environment: it says what the model reads "
                "first, so `user` and `examples` of a template have no effect; set it to {}, and "
                f"write what is to be said into {key}.system_prompt"
            )
        if data and agents == acting and isinstance(found := start_of_source(config, name), str):
            yield f"{key}.environment: {found}"


def _has_a_question(config: Mapping[str, Any], source: SourceConfig) -> bool:
    """Whether the template of a source has texts around a question, or examples."""
    template, library = source.prompt, at(config, "mixed.prompts")
    if not isinstance(template, PromptConfig):
        named = library if isinstance(library, Mapping) else {}
        values = named.get(template or source.agent or "", {})
        template, _ = section_of(PromptConfig, values, "mixed.prompts")
    plain = PromptConfig()
    return template is not None and (template.user != plain.user or bool(template.examples))


def start_of_source(config: Mapping[str, Any], name: str) -> Start | str | None:
    """What the model reads first in the environment of a source, for its first row; or why no
    episode begins. None without an environment or without rows."""
    source = sound_sources(config).get(name)
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if source is None or source.environment is None or tools is None:
        return None  # the check of sections reports wrong settings of tools
    if (row := _first_row(config, name)) is None:
        return None
    # without the run's rate and slots
    entry = source.environment.model_copy(update={"rate": None, "slots": None})
    key = entry.model_dump_json() + json.dumps(row.columns(), default=str)
    if key not in _begun:
        try:
            _begun[key] = asyncio.run(_try_episode(entry, row, tools))
        except (ValueError, Fault) as error:
            _begun[key] = str(error)
    return _begun[key]


_begun: dict[str, Start | str] = {}
"""What `start_of_source` found in this process: several checks ask for it."""


async def _try_episode(entry: EnvironmentEntry, row: Row, tools: ToolConfig) -> Start:
    from agent_loop.environments.provider import EnvironmentProvider
    from agent_loop.toolbox.listing import client_of

    async with client_of(tools) as client:
        provider = client.resource("environment", lambda: EnvironmentProvider(entry, client))
        async with provider.begin(client.for_source(row.source), row) as episode:
            return episode.start


def _first_row(config: Mapping[str, Any], name: str) -> Row | None:
    for file in sound_files(files_at(config, "data.train_files")):
        for _, rows in batches(file, _COLUMNS):
            for row in rows:
                if row["data_source"] == name:
                    return Row.from_columns({**row, "raw_prompt": row["prompt"]})
    return None
