"""LFM2: `<|tool_call_start|>[search(query='a b', limit=3), now()]<|tool_call_end|>`.

A value is JSON's or Python's, because the template writes `None` for a value and `null` inside one.
A line break in a text may stand as it is. Nothing is run: `ast.literal_eval` reads what is no JSON.
A model that is asked for JSON writes `[{"name": "search", "arguments": {...}}]` in the same place.
The block ends at its first closing marker, which may be missing at the end of the message.
"""

import ast
import json
import re
import warnings
from typing import Any

from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    read_calls,
    read_json,
    shown,
    skip_space,
)
from agent_loop.turns.call_formats.message import (
    MOST_CALLS,
    Attempt,
    CallMistake,
    ParsedCall,
    Schemas,
    too_many,
)
from agent_loop.turns.call_formats.scanning import MarkedFormat

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_WORD = r"[^\s()\[\]{}=,'\"]+"
_NAME = re.compile(rf"({_WORD})\s*\(")
_KEY = re.compile(rf"({_WORD})\s*=")
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|.""", re.DOTALL)
_PYTHON = {"true": "True", "false": "False", "null": "None"}


def _read(text: str, start: int, _: Schemas) -> tuple[list[Attempt], int]:
    if text.startswith(_CLOSE, start):
        mistake = CallMistake(problem=f"no {_OPEN} is before {_CLOSE}", text=_CLOSE)
        return [mistake], start + len(_CLOSE)
    begin, stop = start + len(_OPEN), text.find(_CLOSE, start)
    is_open = stop < 0
    block = text[begin:] if is_open else text[begin:stop]
    end = len(text) if is_open else stop + len(_CLOSE)
    found: list[Attempt] = []
    try:
        at = skip_space(block, 0)
        if not block.startswith("[", at):
            raise Unreadable(f"no list of calls follows {_OPEN}", at)
        if block.startswith("{", skip_space(block, at + 1)):
            found, at = read_calls(block, at)
        else:
            at = _read_list(block, at + 1, found)
        if rest := block[at:].strip():
            raise Unreadable(f"{shown(rest)} follows the list of calls", at)
    except Unreadable as error:
        written = text[start:end]
        found.append(
            CallMistake(problem=error.problem, text=written, is_open=is_open, name=error.name)
        )
    return found, end


def _read_list(block: str, at: int, found: list[Attempt]) -> int:
    """Adds the calls of the list that begins before `at`, and returns the index after the list."""
    while len(found) < MOST_CALLS:
        call, at = _read_call(block, skip_space(block, at))
        found.append(call)
        at = skip_space(block, at)
        if block.startswith("]", at):
            return at + 1
        if not block.startswith(",", at):
            raise Unreadable(f"no ',' or ']' follows the call of {shown(call.name)}", at)
        at += 1
    found.append(too_many(block[at:]))
    return len(block)


def _read_call(block: str, start: int) -> tuple[ParsedCall, int]:
    header = _NAME.match(block, start)
    if header is None:
        raise Unreadable(f"{shown(block[start : start + 41])} is no call NAME(KEY=VALUE)", start)
    name, at = header.group(1), skip_space(block, header.end())
    arguments: dict[str, Any] = {}
    while not block.startswith(")", at):
        key = _KEY.match(block, at)
        if key is None:
            there = shown(block[at : at + 41]) if at < len(block) else "the end"
            raise Unreadable(f"in the call of {shown(name)}, {there} is no KEY=VALUE", at, name)
        if key.group(1) in arguments:
            raise Unreadable(f"the call of {shown(name)} has {shown(key.group(1))} twice", at, name)
        arguments[key.group(1)], at = _read_value(block, key.end(), name, key.group(1))
        if block.startswith(",", at):
            at = skip_space(block, at + 1)
    end = at + 1
    return ParsedCall(name=name, arguments=arguments, text=block[start:end]), end


def _read_value(block: str, start: int, name: str, key: str) -> tuple[Any, int]:
    """The value that begins at `start`, and the index of the `,` or `)` after it."""
    depth, tokens = 0, list[str]()
    for match in _TOKEN.finditer(block, start):
        token = match.group()
        if depth == 0 and token in (",", ")"):
            break
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        tokens.append(token)
    else:
        raise Unreadable(f"the call of {shown(name)} has no ')'", start, name)
    try:
        return _value(tokens), match.start()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        there = f"{shown(key)} of {shown(name)}: {shown(''.join(tokens).strip())}"
        raise Unreadable(f"neither JSON nor Python is the value of {there}", start, name) from None


def _value(tokens: list[str]) -> Any:
    source = "".join(
        token.replace("\n", "\\n").replace("\r", "\\r")
        if token[0] in "'\""
        else _PYTHON.get(token, token)
        for token in tokens
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none, as in '\d'
        value = ast.literal_eval(source.strip())
    return read_json(json.dumps(value), 0)[0]  # a tuple is a list


LFM2 = MarkedFormat(
    name="lfm2",
    openings=(_OPEN,),
    strays=(_CLOSE,),
    read=_read,
    end_texts=("<|im_end|>", "<|endoftext|>"),
)
