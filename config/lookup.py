"""Values of a nested config by dotted path, and where our YAML files are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_DIR = Path(__file__).resolve().parent


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or `default` where the path ends early."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def files_at(config: Mapping[str, Any], key: str) -> list[str]:
    """The files under `key`, which verl takes as one name or a list."""
    value = at(config, key)
    return [value] if isinstance(value, str) else list(map(str, value or []))


def flatten(config: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> leaf. Lists are leaves."""
    if not isinstance(config, Mapping):
        return {path: config}
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        leaves.update(flatten(value, f"{path}.{key}" if path else str(key)))
    return leaves
