"""Kimi K2: a section of calls, each with an id `functions.NAME:INDEX` and JSON arguments.

The tool's name is the id without `functions.` and without the index. A call is complete with its
own end marker: the end marker of the section may be missing.
"""

import re

from agent_loop.turns.call_formats.blocks import BlockReader
from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    read_arguments,
    shown,
    skip_space,
)
from agent_loop.turns.call_formats.message import Attempt, ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?([^\s<>{}\":][^\s<>{}\"]*?)(?::[0-9]+)?")


def _read_call(text: str, start: int, _: Schemas) -> tuple[Attempt, int]:
    begin = start + len(_CALL[0])
    id_end = text.find("<", begin)
    if id_end < 0 or not text.startswith(_ARGUMENTS, id_end):
        raise Unreadable(f"no {_ARGUMENTS} follows {_CALL[0]} and the id of the call", begin)
    call_id = text[begin:id_end].strip()
    match = _ID.fullmatch(call_id)
    if match is None:
        raise Unreadable(f"the id {shown(call_id)} is not functions.NAME:INDEX", begin)
    name = match.group(1)
    arguments, at = read_arguments(text, id_end + len(_ARGUMENTS), name)
    if not text.startswith(_CALL[1], at := skip_space(text, at)):
        raise Unreadable(f"no {_CALL[1]} follows the arguments of {shown(name)}", at, name)
    end = at + len(_CALL[1])
    call = ParsedCall(name=name, arguments=arguments, text=text[start:end], call_id=call_id)
    return call, end


_READER = BlockReader(
    block=_SECTION, call=_CALL, read_call=_read_call, is_one_call=False, may_end_early=False
)

KIMI = MarkedFormat(
    name="kimi",
    openings=_SECTION[:1],
    strays=(_SECTION[1], *_CALL),
    read=_READER.read,
    end_texts=("<|im_end|>", "[EOS]"),
    stop_texts=("<|im_end|>",),
)
