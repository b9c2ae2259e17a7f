"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

The values are JSON, but a text stands between `<|"|>` without escapes, and a key has no quotes. A
text in JSON's quotes is read too. A word without quotes is a mistake: where it ends is a guess.

The engine stops at `<tool_call|>`, which may be missing at the end of the message.
"""

import re
from typing import Any

from agent_loop.turns.call_formats.json_values import (
    Unreadable,
    read_json,
    shown,
    skip_space,
)
from agent_loop.turns.call_formats.message import ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, single_calls

_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_HEADER = re.compile(r"\s*call:([^\s<>{}\"]+)(?=\{)")
_KEY = re.compile(r"[^:,{}\[\]<>\"\s]+")


def _read_call(text: str, start: int, _: Schemas) -> tuple[ParsedCall, int]:
    begin = start + len(_OPEN)
    header = _HEADER.match(text, begin)
    if header is None:
        raise Unreadable(f"no call:NAME{{...}} follows {_OPEN}", begin)
    name = header.group(1)
    try:
        arguments, at = _read_object(text, header.end())
    except (ValueError, RecursionError) as error:
        reason = "they are nested too deeply" if isinstance(error, RecursionError) else error
        problem = f"the arguments of {shown(name)} cannot be read: {reason}"
        raise Unreadable(problem, header.end(), name) from None
    at = skip_space(text, at)
    if at < len(text) and not text.startswith(_CLOSE, at):
        raise Unreadable(f"no {_CLOSE} follows the call of {shown(name)}", at, name)
    end = min(at + len(_CLOSE), len(text))
    return ParsedCall(name=name, arguments=arguments, text=text[start:end]), end


def _read_value(text: str, at: int) -> tuple[Any, int]:
    at = skip_space(text, at)
    if text.startswith("{", at):
        return _read_object(text, at)
    if text.startswith("[", at):
        return _read_list(text, at)
    if text.startswith(_QUOTE, at):
        return _read_text(text, at)
    try:
        return read_json(text, at)
    except ValueError as error:
        raise ValueError(f"{shown(text[at : at + 41])} is no value: {error}") from None


def _read_text(text: str, at: int) -> tuple[str, int]:
    begin = at + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise ValueError(f"a text has no {_QUOTE} at its end")
    return text[begin:end], end + len(_QUOTE)


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = skip_space(text, at + 1)
    if text.startswith("}", at):
        return found, at + 1
    while True:
        key, at = _read_key(text, skip_space(text, at))
        at = skip_space(text, at)
        if not text.startswith(":", at):
            raise ValueError(f"no ':' follows the key {shown(key)}")
        found[key], at = _read_value(text, at + 1)
        is_last, at = _read_separator(text, at, "}")
        if is_last:
            return found, at


def _read_key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        return _read_text(text, at)
    if match := _KEY.match(text, at):
        return match.group(), match.end()
    raise ValueError(f"{shown(text[at : at + 41])} is no key")


def _read_list(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = skip_space(text, at + 1)
    if text.startswith("]", at):
        return found, at + 1
    while True:
        value, at = _read_value(text, at)
        found.append(value)
        is_last, at = _read_separator(text, at, "]")
        if is_last:
            return found, at


def _read_separator(text: str, at: int, closing: str) -> tuple[bool, int]:
    """Whether `closing` is there, and not a comma; and the index after it."""
    at = skip_space(text, at)
    if not text.startswith((closing, ","), at):
        raise ValueError(f"no ',' or {closing!r} follows a value")
    return text[at] == closing, at + 1


GEMMA4 = MarkedFormat(
    name="gemma4",
    openings=(_OPEN,),
    strays=(_CLOSE,),
    read=single_calls(_read_call, _OPEN, _CLOSE),
    end_texts=("<turn|>", "<|tool_response>", "<eos>"),
    stop_texts=(_CLOSE,),
    think=("<|channel>", "<channel|>"),
    think_label="thought",
    cut_late_thoughts=True,
)
