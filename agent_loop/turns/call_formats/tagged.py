"""Calls whose parameters are tags, with values that have no quotes.

| format | block | call | parameter |
| --- | --- | --- | --- |
| qwen3_coder | `<tool_call>` | `<function=NAME>` | `<parameter=KEY>` |
| seed | `<seed:tool_call>` | `<function=NAME>` | `<parameter=KEY>` |
| minimax | `<minimax:tool_call>` | `<invoke name="NAME">` | `<parameter name="KEY">` |
| deepseek_v4 | `<+tool_calls>` | `<+invoke name="NAME">` | `<+parameter name="KEY" string=...>` |

In DeepSeek's tags the `+` stands for its token DSML, and `...` for `"true"` or `"false"`.

A value ends at the first closing tag of its parameter, and may hold every other closing tag. If a
parameter begins inside a value, the closing tag of the value was forgotten: that is a mistake.

DeepSeek's tag says whether a value is text. In the other formats the tool's schema does. A text is
kept exactly; in qwen3_coder without the line break at each end, which the template writes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agent_loop.turns.call_formats.blocks import BlockReader
from agent_loop.turns.call_formats.json_values import Unreadable, shown, skip_space
from agent_loop.turns.call_formats.message import Attempt, CallMistake, ParsedCall, Schemas
from agent_loop.turns.call_formats.scanning import MarkedFormat, one_of
from agent_loop.turns.call_formats.untyped import JSON, TEXT, read_untyped, schemas_of


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A tag with a name in it."""

    begin: str
    """The text before the name."""

    header: re.Pattern[str]
    """The whole opening tag, with the groups `name` and, in DeepSeek's parameters, `is_text`."""

    end: str


@dataclass(frozen=True, kw_only=True)
class TagReader:
    """Reads one call."""

    call: Tag

    parameter: Tag

    has_line_breaks: bool = False
    """Whether the template writes a line break before and after each value."""

    words: Mapping[str, Any] = field(default_factory=dict)
    """Values that are not written as JSON."""

    others: tuple[str, ...] = ()
    """Further markers that no value has in it."""

    @cached_property
    def _value_end(self) -> re.Pattern[str]:
        return one_of(self.parameter.end, self.parameter.begin, *self.others)

    def read_call(self, text: str, start: int, schemas: Schemas) -> tuple[Attempt, int]:
        header = self.call.header.match(text, start)
        if header is None:
            begin = self.call.begin
            raise Unreadable(f"no name of a tool follows {begin}", start + len(begin))
        name, at = header["name"], skip_space(text, header.end())
        arguments: dict[str, Any] = {}
        problem = ""
        while not text.startswith(self.call.end, at):
            key, is_text, value, at = self._read_parameter(text, at, name)
            places = schemas_of(schemas, name, key) if is_text is None else _TYPED[is_text]
            try:
                arguments[key] = read_untyped(value, places, self.words)
            except ValueError as error:
                reason = f"the value of {shown(key)} of {shown(name)} is no JSON: {error}"
                problem = problem or reason
            at = skip_space(text, at)
        end = at + len(self.call.end)
        if problem:
            return CallMistake(problem=problem, text=text[start:end], name=name), end
        return ParsedCall(name=name, arguments=arguments, text=text[start:end]), end

    def _read_parameter(self, text: str, at: int, name: str) -> tuple[str, str | None, str, int]:
        """Key, `is_text`, value, and the index after the parameter that begins at `at`."""
        if not text.startswith(self.parameter.begin, at):
            there = shown(text[at : at + 41]) if at < len(text) else "the end"
            ends = f"{self.parameter.begin} nor {self.call.end}"
            problem = f"in the call of {shown(name)}, {there} is neither {ends}"
            raise Unreadable(problem, at, name)
        header = self.parameter.header.match(text, at)
        if header is None:
            problem = f"in the call of {shown(name)}, {shown(text[at : at + 41])} is no parameter"
            raise Unreadable(problem, at + len(self.parameter.begin), name)
        match = self._value_end.search(text, header.end())
        if match is None or match.group() != self.parameter.end:
            key = shown(header["name"])
            problem = f"the parameter {key} of {shown(name)} has no {self.parameter.end}"
            raise Unreadable(problem, header.end(), name)
        value = text[header.end() : match.start()]
        if self.has_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        return header["name"].strip(), header.groupdict().get("is_text"), value, match.end()


_TYPED = {"true": TEXT, "false": JSON}
"""What DeepSeek's `string="true"` and `string="false"` say."""


def _equals_tag(word: str) -> Tag:
    """`<function=NAME>`."""
    header = re.compile(rf"<{word}=(?P<name>[^<>\n]+)>")
    return Tag(begin=f"<{word}=", header=header, end=f"</{word}>")


def _name_tag(word: str, *, begin: str = "", more: str = "") -> Tag:
    """`<invoke name="NAME">`."""
    header = re.compile(rf'<{word} name="(?P<name>[^"<>\n]+)"{more}>')
    return Tag(begin=begin or f'<{word} name="', header=header, end=f"</{word}>")


def _tagged(
    name: str,
    block: str,
    reader: TagReader,
    *,
    is_one_call: bool,
    others: tuple[str, ...] = (),
    **options: Any,
) -> MarkedFormat:
    pair = (f"<{block}>", f"</{block}>")
    call = (reader.call.begin, reader.call.end)
    blocks = BlockReader(
        block=pair,
        call=call,
        others=others,
        read_call=reader.read_call,
        is_one_call=is_one_call,
    )
    return MarkedFormat(
        name=name, openings=pair[:1], strays=(pair[1], *call, *others), read=blocks.read, **options
    )


QWEN3_CODER = _tagged(
    "qwen3_coder",
    "tool_call",
    TagReader(
        call=_equals_tag("function"),
        parameter=_equals_tag("parameter"),
        has_line_breaks=True,
        # The template of Qwen3-Coder and Qwen3.5 writes these values as Python does.
        words={"True": True, "False": False, "None": None},
    ),
    is_one_call=True,
    end_texts=("<|im_end|>", "<|endoftext|>"),
)

SEED = _tagged(
    "seed",
    "seed:tool_call",
    TagReader(call=_equals_tag("function"), parameter=_equals_tag("parameter")),
    is_one_call=True,
    end_texts=("<seed:eos>",),
    think=("<seed:think>", "</seed:think>"),
)

MINIMAX = _tagged(
    "minimax",
    "minimax:tool_call",
    TagReader(call=_name_tag("invoke", begin="<invoke"), parameter=_name_tag("parameter")),
    is_one_call=False,
    end_texts=("[e~[",),
)

_DSML = "\uff5cDSML\uff5c"  # between fullwidth vertical lines

DEEPSEEK_V4 = _tagged(
    "deepseek_v4",
    f"{_DSML}tool_calls",
    TagReader(
        call=_name_tag(f"{_DSML}invoke", begin=f"<{_DSML}invoke"),
        parameter=_name_tag(f"{_DSML}parameter", more=' string="(?P<is_text>true|false)"'),
    ),
    is_one_call=False,
    others=(f"<{_DSML}", f"</{_DSML}"),  # misspelled tags: no other text has this token
    end_texts=("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    cut_late_thoughts=True,
)
