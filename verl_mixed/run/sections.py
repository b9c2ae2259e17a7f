"""Load sections, sources and agent loops of a config; a mistake in one does not hide others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from config.lookup import at
from config.schema import ConfigError, Section, SourceConfig, load_section

S = TypeVar("S", bound=Section)


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
    """Name -> entry in the file of agent loops, None if the file is wrong; and the mistakes."""
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    path = at(config, key)
    file = Path(path or "")
    if not file.is_file():
        return None, [f"{key}={path!r}: no such file; name a YAML list of agent loops"]
    try:
        loops = {entry["name"]: dict(entry) for entry in yaml.safe_load(file.read_text())}
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        return None, [f"{key}={path!r}: not a list of {{name, _target_}} ({why}); correct it"]
    return loops, [
        f"{key}={path!r}: system_prompt={loop['system_prompt']!r} of {name}: it is not a text; put "
        "it into quotes"
        for name, loop in loops.items()
        if not isinstance(loop.get("system_prompt"), str | None)
    ]
