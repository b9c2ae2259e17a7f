"""Hydra overrides as people type them: values that Hydra's grammar cannot read are quoted.

`code_start_tag=<custom_code>` has no quotes of its own, because the shell takes them away, and the
grammar knows no `<`. Whether a value is good is left to the checks.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from config.schema import TAG_FIELDS, TOOL_CONFIG, ConfigError
from verl_mixed.run.settings import override_key

TAGS = frozenset(f"{TOOL_CONFIG}.{name}" for name in TAG_FIELDS)
"""Keys whose value is a text, whatever it looks like."""

_NAMED_BY_USER = ("mixed.sources.", "mixed.prompts.", "mixed.agent_loops.", "agent_loops.")
"""Sections with keys that the shipped config does not have."""

_BEGINNINGS = {"[": '["a text"]', "{": '{name: "a text"}'}
"""How a list and a mapping begin -> one with a text in quotes."""


def quoted(text: str, quote: Quote = Quote.single) -> str:
    """A text in the syntax of Hydra's overrides; the composed config has it as it is here."""
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
    return QuotedString(text=escaped, quote=quote).with_quotes()


def readable(overrides: Sequence[str], shipped: Callable[[], Mapping[str, Any]]) -> list[str]:
    """The overrides, with the texts quoted that Hydra would refuse or read as something else.

    A value that Hydra cannot read is a text if the key's value in the shipped config is a text or
    null, and if it does not begin as a list or mapping does. A tag of `tool_config` is a text
    whatever it looks like: `[code]` is no list.

    Args:
        overrides: as given on the command line.
        shipped: dotted key -> leaf of the shipped config; called only if it is needed.

    Raises:
        ConfigError: Hydra cannot read a value, and its key is not known to be a text.
    """
    parser = OverridesParser.create()
    found: list[str] = []
    problems: list[str] = []
    for override in overrides:
        start, _, value = override.partition("=")
        key, reason = override_key(override), _why_not_taken(parser, override)
        if reason is not None and _is_text(key, value, shipped):
            override = f"{start}={quoted(value)}"
        elif reason:
            text = _BEGINNINGS.get(value[:1]) or quoted(value, Quote.double)
            problems.append(
                f"{override}: Hydra cannot read this value ({reason}); put a text into quotes that "
                f"the shell leaves, as {shlex.quote(f'{start}={text}')}"
            )
        found.append(override)
    if problems:
        raise ConfigError(problems)
    return found


def _why_not_taken(parser: OverridesParser, override: str) -> str | None:
    """Why Hydra does not take a value as one text or value; None if it takes it.

    The reason is empty for a value that is several values, or no text at the key of a tag. What is
    wrong with a key is left to Hydra.
    """
    start, equals, _ = override.partition("=")
    key = override_key(override)
    try:
        given = parser.parse_override(override)
    except HydraException as error:
        try:
            parser.parse_override(f"{start}=1")
        except HydraException:
            return None
        return str(error).partition("\n")[0] if equals else None
    if given.is_sweep_override():
        return None if key.endswith("files") else ""
    return "" if key in TAGS and not isinstance(given.value(), str | None) else None


def _is_text(key: str, value: str, shipped: Callable[[], Mapping[str, Any]]) -> bool:
    if key in TAGS:
        return True
    if value[:1] in _BEGINNINGS:
        return False
    if key.startswith(_NAMED_BY_USER):
        return True
    leaves = shipped()
    return key in leaves and isinstance(leaves[key], str | None)
