"""The tools that sources name, and the format in which a model calls them."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from agent_loop.toolbox.own import SPECS
from agent_loop.toolbox.spec import ToolSpec
from config.agents import BLOCKS
from config.gateway import GATEWAY_LOOP
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, SourceConfig, ToolConfig
from config.tool_entries import OWN_TOOLS, ToolEntry
from tool_server.wire.protocol import Fault
from verl_mixed.checks.config.data import named_agents, sound_files
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.run.sections import (
    FORMAT_KEY,
    MODEL_KEY,
    NAMED_TOOLS_LOOPS,
    NATIVE_LOOP,
    entry_of,
    loop_of,
    section_of,
    sound_sources,
)

ONE_CALL = frozenset({"gpt-oss", "gemma4"})
"""Formats in which the engine stops after one call."""

TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"

_TURNS = FORMAT_KEY.rpartition(".")[0]
MOST_CALLS_KEY = f"{_TURNS}.max_parallel_calls"
_VERLS_FILES = (f"{_TURNS}.tool_config_path", f"{_TURNS}.function_tool_path")


def tool_problems(config: Mapping[str, Any], *, data: bool = True) -> Iterator[str]:
    """Tools that an agent would not call, that cannot be listed, or that contradict a setting.

    Args:
        data: whether the rows may be read, for the agents of sources that name none.
    """
    for name, agents in agents_of(config, data=data).items():
        source, key = sound_sources(config)[name], f"mixed.sources.{name}"
        if source.tools is not None and source.agent is None:
            yield (
                f"{key}.tools without {key}.agent: the rows name the agent; set it to one that "
                "calls tools by name, as native_agent or react_agent"
            )
            continue
        for agent in agents:
            yield from _agent_problems(config, name, source, agent)


def _agent_problems(
    config: Mapping[str, Any], name: str, source: SourceConfig, agent: str
) -> Iterator[str]:
    """Problems of a source whose trajectories, or some of them, have this agent."""
    entry, key = entry_of(config, agent), f"mixed.sources.{name}"
    loop = loop_of(entry)
    if loop == GATEWAY_LOOP and source.observation_style is not None:
        yield (
            f"{key}.observation_style={source.observation_style!r} with agent={agent!r}: an agent "
            "behind the gateway sends the results itself; leave it out"
        )
    if loop == NATIVE_LOOP and source.observation_style == "inline":
        yield (
            f"{key}.observation_style='inline' with agent={agent!r}: results of native calls are "
            "messages of the chat template; leave it out"
        )
    if source.tools is not None:
        if agent in VERLS_AGENTS or (loop and loop not in NAMED_TOOLS_LOOPS):
            yield (
                f"{key}.tools with agent={agent!r}: this agent calls no tools by name; use "
                "native_agent or react_agent"
            )
            return
        if entry.get("tool_names"):
            yield (
                f"{key}.tools: agent={agent!r} has tool_names={entry['tool_names']} too, which is "
                "not read then; set one of them"
            )
            return
        own = [tool for tool in source.tools if tool.tool == "run_code"]
        if entry.get("persistent_interpreter") and any(tool.retry or tool.cache for tool in own):
            yield (
                f"{key}.tools: run_code with retry or cache, and agent={agent!r} has "
                "persistent_interpreter=true: a cell is never repeated, and its result never "
                "shared; leave them out, or set persistent_interpreter=false"
            )
    if isinstance(found := specs_of(config, name, agent), str):
        yield found


def agents_of(config: Mapping[str, Any], *, data: bool = True) -> dict[str, list[str]]:
    """source that takes part -> its agent, or all agents that its rows name.

    Args:
        data: whether the rows may be read. There are no agents of rows that are not there.
    """
    sources = {n: source for n, source in sound_sources(config).items() if source.takes_part}
    found = {name: [source.agent] if source.agent else [] for name, source in sources.items()}
    of_rows = {name: found[name] for name, source in sources.items() if not source.agent}
    files = [*files_at(config, "data.train_files"), *files_at(config, "data.val_files")]
    for file in sound_files(files) if of_rows and data else ():
        for source, agent in named_agents(file):
            if agent not in of_rows.get(source, [agent]):
                of_rows[source].append(agent)
    return found


def tried_agents(config: Mapping[str, Any], *, data: bool = True) -> set[str]:
    """Agents of sources and those that the run config itself sets, whose code is tried before a
    run. A worker loads no other, so an unused one of the file may lack its module."""
    used = {agent for agents in agents_of(config, data=data).values() for agent in agents}
    blocks = [at(config, block) for block in BLOCKS]
    return used.union(*(block for block in blocks if isinstance(block, Mapping)))


def entries_of(config: Mapping[str, Any], name: str, agent: str) -> list[ToolEntry]:
    """The tools of a source, or else those of the settings of its agent, verl's files included.

    Raises:
        ValueError: a setting of the agent names an unknown tool, or verl cannot load a file.
    """
    if (tools := sound_sources(config)[name].tools) is not None:
        return tools
    entry, verls = entry_of(config, agent), dict[str, list[str]]()
    if files := [file for key in _VERLS_FILES if (file := at(config, key))]:
        from agent_loop.training.verl_adapters.verl_tools import (
            tools_of_file,
        )  # imports verl, which takes seconds

        verls = {file: [tool.name for tool in tools_of_file(file)] for file in files}
    loaded = [tool for names in verls.values() for tool in names]
    own = OWN_TOOLS if loop_of(entry) in NAMED_TOOLS_LOOPS else ()
    known = list(dict.fromkeys([*own, *loaded]))
    names = known if entry.get("tool_names") is None else entry["tool_names"]
    if not isinstance(names, list) or any(each not in known for each in names):
        raise ValueError(f"tool_names={names!r}: want a list of {', '.join(known)}; correct it")
    return [
        *(ToolEntry(tool=each) for each in own if each in names and each not in loaded),
        *(ToolEntry(verl=f, only=[n for n in there if n in names]) for f, there in verls.items()),
    ]


def specs_of(config: Mapping[str, Any], name: str, agent: str) -> dict[str, ToolSpec] | str:
    """Name -> tool that the model of a source can call by name; or why they cannot be listed."""
    loop = loop_of(entry_of(config, agent))
    is_verls = _is_verls_tool_agent(config, agent)
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if tools is None or not (is_verls or loop in NAMED_TOOLS_LOOPS):
        return {}  # the check of sections reports wrong settings of tools
    is_own = sound_sources(config)[name].tools is not None
    place = f"mixed.sources.{name}.tools" if is_own else f"source={name!r} with agent={agent!r}"
    try:
        entries = entries_of(config, name, agent)
    except ValueError as error:
        return f"{place}: {error}"
    if not is_own and all(entry.tool for entry in entries):  # without an import of the toolbox
        return {str(entry.tool): SPECS[str(entry.tool)] for entry in entries}
    found = _listed(_Listing(entries, tools))
    return f"{place}: {found}" if isinstance(found, str) else found


class _Listing:
    """What a listing depends on; MCP servers are asked once in a process."""

    def __init__(self, entries: list[ToolEntry], tools: ToolConfig) -> None:
        self.entries, self.tools = entries, tools
        self._key = "".join(entry.model_dump_json() for entry in self.entries)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Listing) and self._key == other._key


@lru_cache(64)
def _listed(listing: _Listing) -> dict[str, ToolSpec] | str:
    from agent_loop.toolbox.listing import listed

    try:
        return asyncio.run(listed(listing.entries, listing.tools))
    except (ValueError, Fault) as error:
        return str(error)


def native_agents(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(source, agent) of each agent that makes native tool calls."""
    return _agents_with(config, NATIVE_LOOP)


def gateway_agents(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(source, agent) of each agent behind the gateway, which may make native tool calls."""
    return _agents_with(config, GATEWAY_LOOP)


def _agents_with(config: Mapping[str, Any], loop: str) -> list[tuple[str, str]]:
    return [
        (name, agent)
        for name, agents in agents_of(config).items()
        for agent in agents
        if loop_of(entry_of(config, agent)) == loop
    ]


def uses_verls_calls(config: Mapping[str, Any]) -> bool:
    """Whether a source, or one of its rows, has verl's `tool_agent` or a loop that inherits it."""
    agents = {agent for named in agents_of(config).values() for agent in named}
    return any(_is_verls_tool_agent(config, agent) for agent in agents)


def _is_verls_tool_agent(config: Mapping[str, Any], agent: str) -> bool:
    return agent == "tool_agent" or loop_of(entry_of(config, agent)).endswith(".ToolAgentLoop")


def template_formats(tokenizer: Any) -> list[str]:
    """Formats of calls that a tokenizer's chat template has; none if it refuses calls."""
    from agent_loop.turns.template_format import formats_of
    from agent_loop.turns.tool_messages import CannotContinue

    try:
        return formats_of(_rendering(tokenizer, []))
    except CannotContinue:
        return []


def text_messages(tokenizer: Any, schemas: list[dict[str, Any]]) -> Any:
    """The chat template's glue around messages after the model's."""
    from agent_loop.turns.codec import codec_of
    from agent_loop.turns.native import messages_of

    return messages_of(_rendering(tokenizer, schemas), codec_of(tokenizer))


def _rendering(tokenizer: Any, schemas: list[dict[str, Any]]) -> Any:
    def render(messages: Any, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tools=schemas or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    return render


def call_problem(tokenizer: Any, call_format: Any, schemas: list[dict[str, Any]]) -> str | None:
    """Why a model with this chat template cannot make native tool calls; None if it can."""
    from agent_loop.turns.call_formats import FORMATS
    from agent_loop.turns.template_format import formats_of
    from agent_loop.turns.tool_messages import CannotContinue

    if call_format is not None and call_format not in FORMATS:
        return f"{FORMAT_KEY}={call_format!r}: choose one of {', '.join(FORMATS)}"
    template = f"the chat template of {MODEL_KEY}"
    try:
        found = formats_of(_rendering(tokenizer, schemas))
        if call_format is None or call_format not in found:
            clear = f"it is that of {' or '.join(found)}" if found else "it is none of them"
            return (
                f"{FORMAT_KEY}={call_format!r} is not the format of calls in {template}: {clear}; "
                f"set it to one of {', '.join(FORMATS)} that the template has, or set "
                f"{TEMPLATE_KEY}"
            )
        text_messages(tokenizer, schemas).check(several=call_format not in ONE_CALL)
    except CannotContinue as error:
        return f"{template} cannot continue after a tool call: {error}; set {TEMPLATE_KEY}"
    user: list[Any] = [{"role": "user", "content": "u"}]
    plain = tokenizer.apply_chat_template(user, tokenize=False)
    if schemas and tokenizer.apply_chat_template(user, tools=schemas, tokenize=False) == plain:
        return f"{template} leaves `tools` out, so the model never sees them; set {TEMPLATE_KEY}"
    return None
