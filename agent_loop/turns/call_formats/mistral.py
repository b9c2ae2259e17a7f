"""Mistral: calls after the token `[TOOL_CALLS]`, in the form of the tokenizer's version.

| version | calls |
| --- | --- |
| 2 to 7 | `[TOOL_CALLS][{"name": "search", "arguments": {...}, "id": "a1b2c3d4e"}, ...]` |
| 11 | `[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS]{...}`, once for each call |
| 13 and later | `[TOOL_CALLS]search[ARGS]{...}`, once for each call |

`[ARGS]` may be missing. An id counts if it has the nine letters and digits that templates ask for.

Source: mistral-common 1.13, `tokens/tokenizers/instruct.py`.
"""

import re

from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    read_arguments,
    read_calls,
    skip_space,
    sound_id,
)
from agent_loop.turns.call_formats.message import Attempt, CallMistake, ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, one_of, skip_broken

_OPEN, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_MARKERS = one_of(_OPEN)
_HEADER = re.compile(r"([^\s\[\]{}\"<>]+)\s*(?:\[CALL_ID\]([^\[{]*))?(?:\[ARGS\])?")


def _read(text: str, start: int, _: Schemas) -> tuple[list[Attempt], int]:
    if text.startswith(_ARGS, start):
        mistake = CallMistake(problem=f"no {_OPEN} is before {_ARGS}", text=_ARGS)
        return [mistake], start + len(_ARGS)
    begin = skip_space(text, start + len(_OPEN))
    found: list[Attempt]
    try:
        if text.startswith("[", begin):
            found, end = read_calls(text, begin)
        else:
            call, end = _read_named(text, start, begin)
            found = [call]
    except Unreadable as error:
        call, end = skip_broken(text, start, error, _MARKERS, "")
        found = [call]
    return found, end


def _read_named(text: str, start: int, begin: int) -> tuple[Attempt, int]:
    header = _HEADER.match(text, begin)
    if header is None:
        raise Unreadable(f"no list of calls and no name of a tool follow {_OPEN}", begin)
    name, call_id = header.group(1), sound_id((header.group(2) or "").strip())
    arguments, end = read_arguments(text, header.end(), name)
    call = ParsedCall(name=name, arguments=arguments, text=text[start:end], call_id=call_id)
    return call, end


MISTRAL = MarkedFormat(
    name="mistral",
    openings=(_OPEN,),
    opening_pattern=r"\[ARGS\](?=\{)",
    strays=(),
    read=_read,
    end_texts=("</s>",),
    think=("[THINK]", "[/THINK]"),
)
