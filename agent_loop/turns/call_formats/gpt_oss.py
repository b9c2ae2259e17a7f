"""gpt-oss (OpenAI's Harmony): a message is a series of parts, each with a header and a body.

    <|channel|>analysis<|message|>I need the author.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>
    {"query": "who wrote it"}<|call|>

The first `<|start|>assistant` stands in the prompt. What a part is:

| header | body |
| --- | --- |
| `to=functions.NAME`, before or after the channel | JSON arguments of a call |
| another `to=` | a call of a tool that no environment here has: a mistake |
| channel `analysis` | reasoning |
| channel `final`, or no channel | final words |
| another channel, as `commentary` | final words if no part is `final` |

The engine stops at `<|call|>`, which may be missing at the end of the message. Markers inside the
strings of the JSON are text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_loop.turns.call_formats.json_values import Unreadable, read_arguments, shown, skip_space
from agent_loop.turns.call_formats.message import (
    MOST_CALLS,
    Attempt,
    CallMistake,
    Message,
    ParsedCall,
    Schemas,
    too_many,
)
from agent_loop.turns.call_formats.scanning import one_of, without_end

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CLOSINGS = ("<|end|>", "<|call|>", "<|return|>")
_CONSTRAIN = "<|constrain|>"

_HEADER_END = one_of(_MESSAGE, _START, *_CLOSINGS)
_BODY_END = one_of(_START, _CHANNEL, *_CLOSINGS)
_CONTROL = one_of(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_CLOSINGS)
_STRAY = one_of(_MESSAGE, _CONSTRAIN)
_RECIPIENT = re.compile(r"to=([^\s<]*)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]+)")
_FUNCTIONS = "functions."


@dataclass
class _Parts:
    """What was found so far."""

    final: list[str] = field(default_factory=list)
    commentary: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Attempt] = field(default_factory=list)
    is_open: bool = False
    """Whether the last part is reasoning, or a header, that goes to the end of the text."""


@dataclass(frozen=True)
class GptOssFormat:
    name: str = "gpt-oss"
    stop_texts: tuple[str, ...] = ("<|call|>",)

    def parse(self, text: str, schemas: Schemas, *, in_reasoning: bool = False) -> Message:
        del schemas  # the arguments are JSON
        text = without_end(text, ("<|endoftext|>",))
        parts = _Parts()
        at = 0
        if in_reasoning:
            at = _read_reasoning(text, 0, parts)
        elif not _CONTROL.search(text) and not _RECIPIENT.match(text.lstrip()):
            parts.final.append(text)  # no part at all: plain words
            at = len(text)
        is_first = not in_reasoning
        while at < len(text) and len(parts.calls) < MOST_CALLS:
            at = _read_part(text, at, parts, is_first)
            is_first = False
        if at < len(text):
            parts.calls.append(too_many(text[at:]))
        return Message(
            content=_joined(parts.final) or _joined(parts.commentary),
            reasoning=_joined(parts.reasoning),
            calls=tuple(parts.calls),
            is_open=parts.is_open,
        )


def _read_part(text: str, start: int, parts: _Parts, is_first: bool) -> int:
    """Reads the part that begins at `start` and returns the index after it."""
    begin = start + len(_START) if text.startswith(_START, start) else start
    match = _HEADER_END.search(text, begin)
    header_end = match.start() if match else len(text)
    header = text[begin:header_end]
    channel = _CHANNEL_NAME.search(header)
    recipient = _RECIPIENT.search(header)
    if match is None or match.group() != _MESSAGE:
        return _read_header_only(text, start, header, match, parts)
    body = match.end()
    if recipient:
        has_start = is_first or begin > start
        problem = "" if has_start else f"no {_START}assistant is before the call"
        problem = problem or ("" if channel else f"the call has no {_CHANNEL}")
        return _read_call(text, start, body, recipient.group(1), problem, parts)
    words = header.partition(_CHANNEL)[0].strip()
    if words not in ("", "assistant"):
        parts.commentary.append(words)  # words between two parts
    if channel and channel.group(1) == "analysis":
        return _read_reasoning(text, body, parts)
    end, after = _body_end(text, body)
    if stray := _STRAY.search(text, body, end):
        problem = f"{stray.group()} is inside the words of a message"
        parts.calls.append(
            CallMistake(problem=problem, text=text[start:after], is_open=after == end == len(text))
        )
    is_final = channel is None or channel.group(1) == "final"
    (parts.final if is_final else parts.commentary).append(text[body:end])
    return after


def _read_header_only(
    text: str, start: int, header: str, match: re.Match[str] | None, parts: _Parts
) -> int:
    """Reads a header that no `<|message|>` follows."""
    end = len(text)
    if match:
        end = match.start() if match.group() == _START else match.end()
    if "to=" in header or _CONSTRAIN in header or (match and match.group() == "<|call|>"):
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1).removeprefix(_FUNCTIONS) if recipient else ""
        problem = f"no {_MESSAGE} follows the header of the call"
        parts.calls.append(
            CallMistake(problem=problem, text=text[start:end], is_open=match is None, name=name)
        )
    elif match is None and _CONTROL.search(text, start):
        parts.is_open = True  # cut inside a header
    elif header.strip() != "assistant":
        parts.commentary.append(header)
    return end


def _read_reasoning(text: str, body: int, parts: _Parts) -> int:
    end, after = _body_end(text, body)
    parts.reasoning.append(text[body:end])
    parts.is_open = after == end == len(text)
    return after


def _body_end(text: str, body: int) -> tuple[int, int]:
    """Where the body ends, and the index after its closing marker, if it has one."""
    match = _BODY_END.search(text, body)
    if match is None:
        return len(text), len(text)
    return match.start(), match.end() if match.group() in _CLOSINGS else match.start()


def _read_call(
    text: str, start: int, body: int, recipient: str, problem: str, parts: _Parts
) -> int:
    """Reads a call whose body begins at `body`; `problem` is what is wrong with its header."""
    name = recipient.removeprefix(_FUNCTIONS)
    if not recipient.startswith(_FUNCTIONS) or not name:
        problem = f"a call is written to={_FUNCTIONS}NAME, and not to={shown(recipient)}"
    try:
        arguments, at = read_arguments(text, body, name)
        at = skip_space(text, at)
        closing = [each for each in _CLOSINGS if text.startswith(each, at)]
        if at < len(text) and not closing:
            raise Unreadable(f"no <|call|> follows the arguments of {shown(name)}", at, name)
    except Unreadable as error:
        end, after = _body_end(text, error.at)
        is_open = after == end == len(text)
        parts.calls.append(
            CallMistake(
                problem=problem or error.problem,
                text=text[start:after],
                is_open=is_open,
                name=name,
            )
        )
        return after
    end = at + len(closing[0]) if closing else at
    written = text[start:end]
    parts.calls.append(
        CallMistake(problem=problem, text=written, name=name)
        if problem
        else ParsedCall(name=name, arguments=arguments, text=written)
    )
    return end


def _joined(texts: Sequence[str]) -> str:
    """The texts without control tokens, stripped, on lines of their own."""
    return "\n".join(filter(None, (_CONTROL.sub("", each).strip() for each in texts)))


GPT_OSS = GptOssFormat()
