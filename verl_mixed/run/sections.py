"""Load sections, sources and agent loops of a config; a mistake in one does not hide others."""

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from config.agents import BLOCKS, with_blocks
from config.child import put_last
from config.gateway import GATEWAY_LOOP
from config.lookup import CONFIG_DIR, at
from config.removed import why_removed
from config.schema import ConfigError, Section, SourceConfig, load_section

S = TypeVar("S", bound=Section)

LOOPS_FILE = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
"""Key of the file of agent loops."""

MODEL_KEY = "actor_rollout_ref.model.path"
FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"
"""Key of the format of native tool calls."""

DEFAULT_FORMAT = "hermes"
"""The format of verl, and of AgentFly's `agent_type: hf`, where none is named."""

SEARCH_LOOP = "agent_loop.search_agent_loop.SearchAgentLoop"
REACT_LOOP = "agent_loop.react_agent_loop.ReactAgentLoop"
NATIVE_LOOP = "agent_loop.native_agent_loop.NativeAgentLoop"
"""`_target_` of some of our agent loops; importing them would import verl."""

NAMED_TOOLS_LOOPS = (
    *(REACT_LOOP, NATIVE_LOOP, GATEWAY_LOOP),
    "agent_loop.named_tools_loop.NamedToolsLoop",
)
"""Loops whose model calls tools by name."""

_parsed = lru_cache(8)(yaml.safe_load)
"""A check asks for the loops of one file many times."""

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def section_of(section: type[S], values: Any, path: str) -> tuple[S | None, list[str]]:
    """The section at the key `path` of the run config, None if it has mistakes; and the mistakes.

    `values` is the subtree at that key as plain containers, resolved.
    """
    try:
        return load_section(section, values, path), []
    except ConfigError as error:
        return None, error.problems


def named_sources(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """source -> its settings in the config, not checked."""
    sources = at(config, "mixed.sources")
    return sources if isinstance(sources, Mapping) else {}


def sound_sources(config: Mapping[str, Any]) -> dict[str, SourceConfig]:
    """The sources whose own settings have no mistakes."""
    sources = {
        name: section_of(SourceConfig, values, f"mixed.sources.{name}")[0]
        for name, values in named_sources(config).items()
    }
    return {name: source for name, source in sources.items() if source is not None}


def agent_loops(config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]] | None, list[str]]:
    """Name -> settings of each agent loop, None if their file is wrong; and the mistakes.

    The settings are those of the file with the blocks `BLOCKS` of the run config over them.
    """
    path = at(config, LOOPS_FILE)
    file = Path(path or "")
    if not file.is_file():
        return None, [f"{LOOPS_FILE}={path!r}: no such file; name a YAML list of agent loops"]
    try:
        of_file = {entry["name"]: dict(entry) for entry in _parsed(file.read_text())}
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, RecursionError) as error:
        why = " ".join(str(error).split())
        return None, [
            f"{LOOPS_FILE}={path!r}: not a list of {{name, _target_}} ({why}); correct it"
        ]
    loops = with_blocks(of_file, [at(config, block) for block in BLOCKS])
    return loops, [*_block_problems(config), *_entry_problems(config, of_file, loops)]


def entry_of(config: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """The settings of an agent loop; empty if there are none, as for verl's own."""
    return (agent_loops(config)[0] or {}).get(agent, {})


def loop_of(entry: Mapping[str, Any]) -> str:
    """The class of an agent loop; of a user's class, the nearest base class of this project or of
    verl. Empty if there is none, or if the class cannot be imported."""
    return _base_of(str(entry.get("_target_", "")))


@cache
def _base_of(target: str) -> str:
    ours = ("agent_loop.", "verl.")
    if target.startswith(ours) or not target:
        return target  # without an import, which takes seconds
    mro = getattr(loaded(target)[0], "__mro__", ())
    bases = [f"{base.__module__}.{base.__qualname__}" for base in mro]
    return next((base for base in bases if base.startswith(ours)), "")


def loaded(name: str) -> tuple[Any, str]:
    """The object `package.module.Name`, or a module; or None and Python's error.

    The trainer and its workers find modules of the current folder, so they are found here too.
    """
    put_last(os.getcwd())
    parts = name.split(".")
    try:
        found: Any = import_module(parts[0])
        for place, part in enumerate(parts[1:], 2):
            path = ".".join(parts[:place])
            if isinstance(found, ModuleType) and not hasattr(found, part):
                try:
                    import_module(path)
                except ModuleNotFoundError as error:
                    if error.name != path:
                        raise
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    return found, ""


def place_of(config: Mapping[str, Any], agent: str) -> str:
    """Where an agent loop is registered or changed last, for messages."""
    blocks = [block for block in BLOCKS if at(config, f"{block}.{agent}") is not None]
    return (
        f"{blocks[-1]}.{agent}" if blocks else f"{LOOPS_FILE}={at(config, LOOPS_FILE)!r}: {agent}"
    )


def where_agents_are(config: Mapping[str, Any]) -> str:
    """Where an agent loop is registered, for messages."""
    return f"register it in {at(config, LOOPS_FILE)}, or as {BLOCKS[-1]}.<name>._target_"


def _block_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Blocks, or entries of them, that are no mappings."""
    example = "_target_: package.module.Class"
    for block in BLOCKS:
        given = at(config, block)
        if not isinstance(given, Mapping):
            if given is not None and block == BLOCKS[-1]:  # the schema reports the other one
                yield f"{block}={given!r}: want {{my_agent: {{{example}}}}}; correct it"
            continue
        for name, entry in given.items():
            if not isinstance(name, str) or not name.strip():
                yield f"{block}: {name!r} is no name of an agent; write a text"
            elif not isinstance(entry, Mapping):
                yield f"{block}.{name}={entry!r}: want its settings, as {{{example}}}; correct it"
            elif entry.get("name", name) != name:
                yield f"{block}.{name}.name={entry['name']!r}: the key is the name; leave it out"


def _entry_problems(
    config: Mapping[str, Any],
    of_file: Mapping[str, Any],
    loops: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """Settings of single agent loops that no class would take."""
    for name, entry in loops.items():
        place = place_of(config, name)
        target, prompt = entry.get("_target_"), entry.get("system_prompt")
        if target is None and name not in of_file:
            yield (
                f"{place}: it has no _target_, and {at(config, LOOPS_FILE)} has no agent of this "
                f"name; add _target_: package.module.Class, or name one of {', '.join(of_file)}"
            )
        elif not isinstance(target, str) or not _CLASS.fullmatch(target):
            yield f"{place}: _target_={target!r} is no package.module.Class; correct it"
        elif target.startswith("agent_loop."):
            settings = {key for entry in shipped_loops() for key in entry}
            for key in sorted(entry.keys() - settings):
                near = get_close_matches(key, settings, n=1)
                hint = f"did you mean {near[0]}?" if near else "remove it"
                hint = why_removed(f"agent_loops.*.{key}") or hint
                yield f"{place}: {target} has no setting {key}={entry[key]!r}; {hint}"
        if not isinstance(prompt, str | None):
            yield f"{place}: system_prompt={prompt!r} is not a text; put it into quotes"


@cache
def shipped_loops() -> list[dict[str, Any]]:
    """The entries of the shipped file, which show every setting of our agent loops."""
    return yaml.safe_load((CONFIG_DIR / "agent_loops.yaml").read_text())
