"""Hermes and Qwen: `<tool_call>{"name": "search", "arguments": {...}}</tool_call>`.

A missing `arguments` is an empty object, as in the package `renderers`, but only if the call has no
other key than `name`: with `parameters` in its place the arguments would be lost. Markers inside
the strings of the JSON are text.
"""

from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    read_call,
    read_json,
    shown,
    skip_space,
)
from agent_loop.turns.call_formats.message import ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, single_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_call(text: str, start: int, _: Schemas) -> tuple[ParsedCall, int]:
    begin = start + len(_OPEN)
    try:
        value, at = read_json(text, begin)
    except ValueError as error:
        raise Unreadable(f"the call is no JSON: {error}", begin) from None
    name, arguments = read_call(value, begin)
    if not text.startswith(_CLOSE, at := skip_space(text, at)):
        raise Unreadable(f"no {_CLOSE} follows the call of {shown(name)}", at, name)
    end = at + len(_CLOSE)
    return ParsedCall(name=name, arguments=arguments, text=text[start:end]), end


HERMES = MarkedFormat(
    name="hermes",
    openings=(_OPEN,),
    strays=(_CLOSE,),
    read=single_calls(_read_call, _OPEN, _CLOSE),
    end_texts=("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"),
)
