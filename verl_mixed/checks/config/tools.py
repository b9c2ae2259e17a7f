"""The tools that sources name, and the format in which a model calls them."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from agent_loop.toolbox.own import SPECS
from agent_loop.toolbox.spec import ToolSpec
from agent_loop.tools.protocol import ToolError
from config.lookup import at
from config.schema import TOOL_CONFIG, SourceConfig, ToolConfig
from config.tool_entries import OWN_TOOLS
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.run.sections import (
    NAMED_TOOLS_LOOPS,
    NATIVE_LOOP,
    TAG_LOOPS,
    agent_loops,
    section_of,
    sound_sources,
)

FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"
DEFAULT_FORMAT = "hermes"
"""verl's default."""

ONE_CALL = frozenset({"gpt-oss", "gemma4"})
"""Formats in which the engine stops after one call."""

MODEL_KEY = "actor_rollout_ref.model.path"
TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"


def tool_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Tools that an agent would not call, that cannot be listed, or that contradict a setting."""
    loops, _ = agent_loops(config)
    for name, source in sound_sources(config).items():
        entry = (loops or {}).get(source.agent or "", {})
        target, key = entry.get("_target_"), f"mixed.sources.{name}"
        if is_native(config, source) and source.observation_style == "inline":
            yield (
                f"{key}.observation_style='inline' with agent={source.agent!r}: results of native "
                "calls are messages of the chat template; leave it out"
            )
        if source.tools is None:
            continue
        if source.agent in VERLS_AGENTS or target in TAG_LOOPS:
            yield (
                f"{key}.tools with agent={source.agent!r}: this agent calls no tools by name; use "
                "native_agent or react_agent"
            )
        elif source.agent is None:
            yield (
                f"{key}.tools without {key}.agent: the rows name the agent; set it to one that "
                "calls tools by name, as native_agent or react_agent"
            )
        elif entry.get("tool_names") is not None:
            yield (
                f"{key}.tools: agent={source.agent!r} has tool_names={entry['tool_names']} too, "
                "which is not read then; set one of them"
            )
        elif isinstance(found := specs_of(config, name, source), str):
            yield f"{key}.tools: {found}"


def specs_of(
    config: Mapping[str, Any], name: str, source: SourceConfig
) -> dict[str, ToolSpec] | str:
    """Name -> tool that the model of a source can call; or why the tools cannot be listed.

    Tools that verl loads for an agent (`tool_config_path`) are not in it.
    """
    loops, _ = agent_loops(config)
    entry = (loops or {}).get(source.agent or "", {})
    if entry.get("_target_") not in NAMED_TOOLS_LOOPS:
        return {}
    if source.tools is None:
        names = OWN_TOOLS if entry.get("tool_names") is None else entry["tool_names"]
        return {n: SPECS[n] for n in names if n in SPECS}
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if tools is None:
        return {}  # its own check reports it
    return _listed(_Listing(source, tools))


class _Listing:
    """What a listing depends on; MCP servers are asked once in a process."""

    def __init__(self, source: SourceConfig, tools: ToolConfig) -> None:
        self.entries, self.tools = source.tools or [], tools
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
    except (ValueError, ToolError) as error:
        return str(error)


def is_native(config: Mapping[str, Any], source: SourceConfig) -> bool:
    """Whether the agent of a source makes native tool calls."""
    loops, _ = agent_loops(config)
    return (loops or {}).get(source.agent or "", {}).get("_target_") == NATIVE_LOOP


def uses_native_calls(config: Mapping[str, Any]) -> bool:
    return any(is_native(config, source) for source in sound_sources(config).values())


def uses_verls_calls(config: Mapping[str, Any]) -> bool:
    """Whether a source has verl's `tool_agent`, or an agent that its rows name."""
    agents = {source.agent for source in sound_sources(config).values()}
    return bool(agents & {None, "tool_agent"})


def template_formats(tokenizer: Any) -> list[str]:
    """Formats of calls that a tokenizer's chat template has; none if it refuses calls."""
    from agent_loop.turns.template_format import formats_of
    from agent_loop.turns.tool_messages import CannotContinue

    try:
        return formats_of(
            lambda messages, prompt: tokenizer.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=False
            )
        )
    except CannotContinue:
        return []


def call_problem(tokenizer: Any, call_format: Any, schemas: list[dict[str, Any]]) -> str | None:
    """Why a model with this chat template cannot make native tool calls; None if it can."""
    from agent_loop.turns.call_formats import FORMATS
    from agent_loop.turns.observation_style import codec_of
    from agent_loop.turns.tags import stop_token_ids
    from agent_loop.turns.template_format import formats_of
    from agent_loop.turns.tool_messages import CannotContinue, ToolMessages

    def render(messages: Any, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tools=schemas or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    if call_format is not None and call_format not in FORMATS:
        return f"{FORMAT_KEY}={call_format!r}: choose one of {', '.join(FORMATS)}"
    template = f"the chat template of {MODEL_KEY}"
    try:
        found = formats_of(render)
        if call_format is None or call_format not in found:
            clear = f"it is that of {' or '.join(found)}" if found else "it is none of them"
            return (
                f"{FORMAT_KEY}={call_format!r} is not the format of calls in {template}: {clear}; "
                f"set it to one of {', '.join(FORMATS)} that the template has, or set "
                f"{TEMPLATE_KEY}"
            )
        codec = codec_of(tokenizer)
        stops = stop_token_ids(FORMATS[call_format].stop_texts, codec.encode)
        messages = ToolMessages(render, codec.encode, codec.end_ids | frozenset(stops))
        messages.check(several=call_format not in ONE_CALL)
    except CannotContinue as error:
        return f"{template} cannot continue after a tool call: {error}; set {TEMPLATE_KEY}"
    user: list[Any] = [{"role": "user", "content": "u"}]
    plain = tokenizer.apply_chat_template(user, tokenize=False)
    if schemas and tokenizer.apply_chat_template(user, tools=schemas, tokenize=False) == plain:
        return f"{template} leaves `tools` out, so the model never sees them; set {TEMPLATE_KEY}"
    return None
