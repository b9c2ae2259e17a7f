"""Messages with tool calls, generated from a seed, and the ways in which a model breaks them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fakes.call_writers import WRITERS, Call, Writer

MARKERS = sorted(
    {
        *("<think>", "</think>", "<|im_end|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>"),
        *("<channel|>", "</seed:think>"),
        *(marker for each in WRITERS.values() for marker in (*each.before, *each.after)),
        *(marker for each in WRITERS.values() for marker in each.forbidden),
    }
)
"""Markers of all formats."""

_PIECES = (
    *("a", "word", " ", "  ", "\n", "\t", '"', "'", "\\", "\\n", "{", "}", "[", "]", ",", ":", "<"),
    *("/", ">", "1", "null", "true", "3.5", "\u00e9", "\u65e5\u672c", "\U0001f600", "\u2028"),
)
_WORDS = ("it is", "caf\u00e9", "so:", "1 + 1", "\U0001f600", "a\nb", "{", "done.")


@dataclass(frozen=True)
class Written:
    """A message and what it says."""

    text: str
    calls: list[Call]
    content: str
    reasoning: str

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Tool name -> a schema under which the message has one meaning."""
        return {
            name: {"properties": {key: {"type": type_of(value)} for key, value in values.items()}}
            for name, values in self.calls
        }


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return kinds.get(type(value), "array" if isinstance(value, list) else "object")


def messages(format_name: str, seed: int, *, with_markers: bool = True) -> Iterator[Written]:
    """Endless messages of a format, each with one to three calls.

    Args:
        with_markers: whether values may hold markers, and texts may begin or end with white space.
    """
    rng = random.Random(f"{format_name} {seed}")
    writer = WRITERS[format_name]
    while True:
        # Each tool is called once in a message: a parameter has one type.
        names = rng.sample(["search", "a_b-2", "x", "mcp__run"], rng.randint(1, 3))
        calls = [(name, _arguments(rng, writer, with_markers)) for name in names]
        content = rng.choice(["", " ".join(rng.choices(_WORDS, k=3))])
        reasoning = rng.choice(["", " ".join(rng.choices(_WORDS, k=2))])
        draft = f"\nI could write {writer.calls(calls).strip()} here."
        has_draft = with_markers and format_name != "gpt-oss" and rng.random() < 0.5
        if reasoning and has_draft and writer.thought[1].strip() not in draft:
            reasoning += draft
        text = writer.message(calls, content, reasoning)
        yield Written(text, calls, content, reasoning)


def _arguments(rng: random.Random, writer: Writer, with_markers: bool) -> dict[str, Any]:
    keys = rng.sample(["query", "n", "\u00fc", "a.b", "x-1"], rng.randint(0, 3))
    return {key: _value(rng, writer, with_markers, 3) for key in keys}


def _value(rng: random.Random, writer: Writer, with_markers: bool, depth: int) -> Any:
    kind = rng.randrange(12 if depth else 8)
    if kind < 4:
        return _text(rng, writer, with_markers)
    if kind < 8:
        numbers = [0, -7, 10**18, 0.5, -1e-9, 1e300]
        return rng.choice([None, True, False, *numbers])
    inner = [_value(rng, writer, with_markers, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind < 10:
        return inner
    if writer.has_plain_keys:
        return {f"k{index}": each for index, each in enumerate(inner)}
    return {f"{index}{_text(rng, writer, with_markers)}": each for index, each in enumerate(inner)}


def _text(rng: random.Random, writer: Writer, with_markers: bool) -> str:
    pieces = (*_PIECES, *MARKERS) if with_markers else ("a", "b c", "\u65e5", "'", "\n")
    text = "".join(rng.choices(pieces, k=rng.randint(0, 6)))
    while found := [each for each in writer.forbidden if each in text]:
        text = text.replace(found[0], "")
    return text if with_markers else f"a{text}b"


BROKEN = "broken"
"""Name of the tool whose call is broken."""


def broken(format_name: str, seed: int) -> Iterator[tuple[str, Written]]:
    """Endless messages in which the call of `BROKEN` is broken, each after how it was broken.

    The values of the calls hold no markers: then a marker in the text is one of the message's own.
    """
    rng = random.Random(f"{format_name} {seed}")
    writer = WRITERS[format_name]
    while True:
        calls: list[Call] = [
            (name, _arguments(rng, writer, with_markers=False))
            for name in rng.sample(["search", "a_b-2", BROKEN], 3)
        ][rng.randrange(3) :]
        calls = [
            (name, {**arguments, "n": 4242, "o": {"q": [77]}} if name == BROKEN else arguments)
            for name, arguments in calls
        ]
        content = rng.choice(["", " ".join(rng.choices(_WORDS, k=3))])
        text = writer.message(calls, content).removesuffix(writer.end)
        at = text.find(BROKEN)
        if at >= 0:
            how, text = _break(rng, writer, text, at)
            yield how, Written(text, calls, content, "")


def _break(rng: random.Random, writer: Writer, text: str, at: int) -> tuple[str, str]:
    """How the call whose name is at `at` was broken, and the text."""
    end = text.find(writer.after[-1], at)
    how = rng.choice(["cut", "words", "value", "marker", "marker"])
    if how == "cut":
        last = text.rfind("}", at, end) if writer.may_lack_end else end + len(writer.after[-1]) - 1
        return how, text[: rng.randint(at, last)]
    if how == "words":
        last = text.find(writer.innermost_end, at)
        return how, f"{text[:last]} and so on {text[last:]}"
    if how == "value":
        comma = "[77,,]" if writer.takes_python else "[77,]"
        old, new = rng.choice(
            [("[77]", "[77"), ("[77]", comma), ("4242", "4242x"), ("4242", "NaN"), ("4242", "")]
        )
        return f"{old} is {new}", text.replace(old, new)
    marker = rng.choice(writer.before + writer.after)
    # In place of a parameter, the end of the call would end it early: a call that can be read.
    others = [each for each in writer.before + writer.after[:-1] if each not in marker]
    new = rng.choice(["", *others[:1], rng.choice(others or [""])])
    place = text.rfind(marker, 0, at) if marker in writer.before else text.find(marker, at)
    is_last = text.endswith(marker) and place == len(text) - len(marker)
    is_prompt = place == 0 and marker in writer.prompt_markers
    if is_prompt or (is_last and writer.may_lack_end):
        return _break(rng, writer, text, at)  # that marker may be missing
    return f"{marker} is {new}", text[:place] + new + text[place + len(marker) :]
