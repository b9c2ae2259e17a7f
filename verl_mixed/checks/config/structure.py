"""Whether a composed config has the sections, keys and kinds of values that all readers expect.

It is checked once, before anything reads the config: `launch.plan` and the other checks may then
read a section as a mapping and a number as a number. Whether a value is good is left to the others.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from config.schema import TOOL_CONFIG
from verl_mixed.checks.config.numbers import KINDS

_BY_SCHEMA = frozenset({"mixed", TOOL_CONFIG, "algorithm.state_masked_grpo"})
"""Sections whose keys `config.schema` checks."""

_OPEN = frozenset({"ray_init", "engine_kwargs", "sampler_kwargs", "profiler"})
"""Names of sections that are given to other programs; a user may add and remove keys. So are
those that begin with `override_`."""

_NULL_IS_OFF = frozenset({"filter_groups", "rollout_correction", "profiler", "qat"})
"""Names of sections that verl takes as null too."""

_TEXT_OR_LIST = frozenset({"train_files", "val_files", "target_modules", "exclude_modules"})
_ANY_KIND = frozenset({"rollout_is_threshold", "project_name"})
"""Names of leaves with values of another kind than the base has: `0.5_2.0`, a number as a name."""

_LEAVES: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool, int), "true or false"),
    int: ((int, float), "a number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text, in quotes if it looks like a number"),
    list: ((list, str), "a list"),
}
"""Kind of the base's value -> kinds that are taken, in words too. Null is left to other checks."""


def structure_problems(
    given: Mapping[str, Any], base: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    """Each section, key or kind that is not as in the config without a profile.

    Args:
        given: the composed config as plain containers, interpolations not resolved; they are left
            to the key that they name.
        base: likewise, of the same training engine without a profile and overrides.
        path: key of this section; empty for the whole config.
    """
    for name, wanted in base.items():
        key = f"{path}.{name}" if path else str(name)
        if name not in given:
            yield (
                f"{key}: the run reads this key, and it was removed; leave out ~{key}, or the ~ of "
                "a section above it"
            )
            continue
        value = given[name]
        if isinstance(value, str) and ("${" in value or value == "???"):
            continue
        if isinstance(wanted, Mapping):
            if isinstance(value, Mapping):
                is_open = name in _OPEN or str(name).startswith("override_")
                if not is_open and key not in _BY_SCHEMA:
                    yield from structure_problems(value, wanted, key)
            elif value is not None or (wanted and name not in _NULL_IS_OFF):
                keys = [name for name in wanted if name != "_target_"]
                such = f", such as {key}.{keys[0]}" if keys else ""
                yield f"{key}={value!r}: it is a section of keys{such}; remove the override"
        elif key not in KINDS and name not in _ANY_KIND and value is not None:
            if type(wanted) not in _LEAVES or "${" in str(wanted) or wanted == "???":
                continue
            taken, words = _LEAVES[type(wanted)]
            if name in _TEXT_OR_LIST:
                taken, words = (str, list), "a text or a list of texts"
            if not isinstance(value, taken):
                yield f"{key}={value!r}: want {words}; correct it, or remove the override"
