"""Llama 3: `{"name": "search", "parameters": {...}}`, the whole message or a part of it.

Nothing but the JSON marks a call, so it is read where vLLM's parser `llama3_json` reads it:

- at the beginning of a line: alone, in a list, or several one after the other, as with `; ` between
- anywhere, if it begins with `"name"` or `"type": "function"`
- after `<|python_tag|>`, where anything else, as a call of Meta's own tools, is a mistake

The arguments are `parameters` or `arguments`. JSON that has no name with them and names no tool, as
an answer may be, belongs to the final words.
"""

import re
from typing import Any

from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    calls_of,
    read_json,
    shown,
    skip_space,
)
from agent_loop.turns.call_formats.message import MOST_CALLS, Attempt, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, skip_broken

_TAG = "<|python_tag|>"
_KEYS, _NAMES = ("parameters", "arguments"), ("name", "function")
_HEADER = r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")'
_ATTEMPT = re.compile(rf"(?:\[\s*)?{_HEADER}")
_NEXT = re.compile(r"\s*[;,]?\s*(?=\{)")
_AFTER_BROKEN = re.compile(rf"(?<=;)\s*(?=\{{)|{re.escape(_TAG)}")


def _read(text: str, start: int, schemas: Schemas) -> tuple[list[Attempt], int]:
    is_tagged = text.startswith(_TAG, start)
    at = skip_space(text, start + len(_TAG) if is_tagged else start)
    found: list[Attempt] = []
    while text.startswith(("{", "["), at) and len(found) < MOST_CALLS:
        try:
            value, end = read_json(text, at)
        except ValueError as error:
            after = max(getattr(error.__cause__, "pos", len(text)), at + 1)
            if not is_tagged and not _ATTEMPT.match(text, at):
                return found, at if found else after
            broken = Unreadable(f"the call is no JSON: {error}", after)
            mistake, end = skip_broken(text, at, broken, _AFTER_BROKEN, "")
            found.append(mistake)
        else:
            values = value if isinstance(value, list) else [value]
            if not is_tagged and not any(_is_attempt(each, schemas) for each in values):
                return found, at if found else end
            found += calls_of(values, text[at:end], _KEYS)
        at = end
        if match := _NEXT.match(text, end):
            at = match.end()
    if is_tagged and not found:
        there = f"{shown(text[at : at + 41])} after {_TAG}"
        problem = f'{there} is no {{"name": ..., "parameters": {{...}}}}'
        mistake, at = skip_broken(text, start, Unreadable(problem, at), _AFTER_BROKEN, "")
        found.append(mistake)
    return found, at


def _is_attempt(value: Any, schemas: Schemas) -> bool:
    if not isinstance(value, dict):
        return False
    name, is_function = value.get("name"), value.get("type") == "function"
    has_arguments = not value.keys().isdisjoint(_KEYS) and not value.keys().isdisjoint(_NAMES)
    return has_arguments or is_function or (isinstance(name, str) and name in schemas)


LLAMA3 = MarkedFormat(
    name="llama3_json",
    openings=(_TAG,),
    opening_pattern=rf"(?m:^[ \t]*(?:\[\s*)?\{{)|{_HEADER}",
    strays=(),
    read=_read,
    end_texts=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    stop_texts=("<|eom_id|>",),
)
