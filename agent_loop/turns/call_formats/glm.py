"""GLM: `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`.

A value has no quotes: the tool's schema says whether it is text or JSON. A text is kept exactly,
with the white space at its ends. A value ends at its first closing marker.
"""

import re
from typing import Any

from agent_loop.turns.call_formats.json_values import Unreadable, shown, skip_space
from agent_loop.turns.call_formats.message import Attempt, CallMistake, ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, one_of, skip_broken
from agent_loop.turns.call_formats.untyped import read_untyped, schemas_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")
_MARKERS = one_of(_OPEN, _CLOSE)
_ARGUMENT_MARKERS = one_of(*_KEY, *_VALUE)
_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<|$)")


def _read(text: str, start: int, schemas: Schemas) -> tuple[list[Attempt], int]:
    try:
        if not text.startswith(_OPEN, start):
            raise Unreadable(f"no {_OPEN} is before the call", start)
        call, end = _read_call(text, start, schemas)
    except Unreadable as error:
        call, end = skip_broken(text, start, error, _MARKERS, _CLOSE)
    return [call], end


def _read_call(text: str, start: int, schemas: Schemas) -> tuple[Attempt, int]:
    begin = start + len(_OPEN)
    header = _NAME.match(text, begin)
    if header is None:
        raise Unreadable(f"no name of a tool follows {_OPEN}", begin)
    name, at = header.group(1), header.end()
    arguments: dict[str, Any] = {}
    problem = ""
    while not text.startswith(_CLOSE, at):
        key, at = _read_part(text, at, _KEY, name)
        value, at = _read_part(text, skip_space(text, at), _VALUE, name)
        key = key.strip()
        try:
            arguments[key] = read_untyped(value, schemas_of(schemas, name, key), {})
        except ValueError as error:
            problem = problem or f"the value of {shown(key)} of {shown(name)} is no JSON: {error}"
        at = skip_space(text, at)
    end = at + len(_CLOSE)
    if problem:
        return CallMistake(problem=problem, text=text[start:end], name=name), end
    return ParsedCall(name=name, arguments=arguments, text=text[start:end]), end


def _read_part(text: str, at: int, part: tuple[str, str], name: str) -> tuple[str, int]:
    """The text between the markers `part`, of which the first is at `at`."""
    if not text.startswith(part[0], at):
        there = shown(text[at : at + 41]) if at < len(text) else "the end"
        raise Unreadable(f"in the call of {shown(name)}, {there} is not {part[0]}", at, name)
    begin = at + len(part[0])
    match = _ARGUMENT_MARKERS.search(text, begin)
    if match is None or match.group() != part[1]:
        raise Unreadable(f"in the call of {shown(name)}, a {part[0]} has no {part[1]}", begin, name)
    return text[begin : match.start()], match.end()


GLM = MarkedFormat(
    name="glm",
    openings=(_OPEN,),
    strays=(_CLOSE, *_KEY, *_VALUE),
    read=_read,
    end_texts=("<|observation|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    stop_texts=("<|observation|>",),
    cut_late_thoughts=True,
)
