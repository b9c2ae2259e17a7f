"""One pass over a message: thoughts, final words, and the markers at which calls begin.

A format is a `MarkedFormat`: its markers, and a function that reads the calls at a marker. Every
marker outside a thought gives a call or a mistake. The time is linear in the text: no part of the
text is searched again after a broken call.

A thought begins where the prompt or the message opens it, and ends at its closing marker. If there
is none in the rest of the message, the thought ends at the next marker that begins a call: models
forget the closing marker before a call. Calls before a closing marker are drafts and do not count.

The rules for thoughts are those of the package `renderers` 0.1.12, with one difference: in GLM's
and DeepSeek's formats, `renderers` ends a thought at a call even if a closing marker follows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from agent_loop.turns.call_formats.json_values import Unreadable
from agent_loop.turns.call_formats.message import (
    MOST_CALLS,
    Attempt,
    CallMistake,
    Message,
    Schemas,
    too_many,
)

ReadCalls = Callable[[str, int, Schemas], tuple[list[Attempt], int]]
"""(text, index of a marker, schemas) -> the calls there, at least one, and the index after them.
There may be none at an `opening_pattern`: then the index is that after words of the message."""

_LEAST_OF_A_MARKER = 6
"""Characters of a cut marker by which it is recognized, as `<tool_`. A `<` alone is no attempt."""


@dataclass(frozen=True, kw_only=True)
class MarkedFormat:
    """A format whose calls stand between markers, in any place of the message."""

    name: str

    openings: tuple[str, ...]
    """Markers that begin calls."""

    opening_pattern: str = ""
    """Regular expression of a further beginning, at which `read` may find that there is no call."""

    strays: tuple[str, ...]
    """Further markers, which are a mistake outside a call."""

    read: ReadCalls

    end_texts: tuple[str, ...]
    """Control tokens that end a message."""

    stop_texts: tuple[str, ...] = ()

    think: tuple[str, str] = ("<think>", "</think>")

    think_label: str = ""
    """Text that follows the opening of a thought, as Gemma's `thought`."""

    cut_late_thoughts: bool = False
    """Whether a thought after the beginning of the message may be unclosed. If not, an opening
    marker without a closing one is a part of the final words."""

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        return one_of(*self.openings, *self.strays, *self.think, pattern=self.opening_pattern)

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        return one_of(*self.openings, pattern=self.opening_pattern)

    def parse(self, text: str, schemas: Schemas, *, in_reasoning: bool = False) -> Message:
        text = without_end(text, self.end_texts)
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[Attempt] = []
        begin, close = self.think
        last_close = text.rfind(close)
        at, is_open = 0, False
        first = len(text) - len(text.lstrip())
        if in_reasoning or text.startswith(begin, first):
            at = first + len(begin) if text.startswith(begin, first) else 0
            at, is_open = self._read_thought(text, at, last_close, thoughts)
        while not is_open and (match := self._markers.search(text, at)):
            if len(calls) >= MOST_CALLS:
                calls.append(too_many(text[at:]))
                at = len(text)
                break
            content.append(text[at : match.start()])
            at = match.end()
            if match.group() == begin:
                if at <= last_close or self.cut_late_thoughts:
                    at, is_open = self._read_thought(text, at, last_close, thoughts)
                else:
                    content.append(begin)
            elif match.group() != close:
                found, at = self.read(text, match.start(), schemas)
                calls += found
                if not found:
                    content.append(text[match.start() : at])
        if not is_open:
            rest = text[at:]
            if cut := self._cut_marker(rest):
                problem = f"the marker {repr(cut)[1:-1]} is not complete"  # no quotes
                calls.append(CallMistake(problem=problem, text=cut, is_open=True))
                rest = rest[: -len(cut)]
            content.append(rest)
        return Message(
            content="".join(content).strip(),
            reasoning="\n".join(filter(None, map(str.strip, thoughts))),
            calls=tuple(calls),
            is_open=is_open,
        )

    def _read_thought(
        self, text: str, at: int, last_close: int, thoughts: list[str]
    ) -> tuple[int, bool]:
        """Index after the thought that begins at `at`, and whether the message ends in it."""
        close = self.think[1]
        end = after = len(text)
        is_open = True
        if at <= last_close:
            end = text.find(close, at)
            after, is_open = end + len(close), False
        elif call := self._opening.search(text, at):
            end = after = call.start()
            is_open = False
        thoughts.append(text[at:end].lstrip().removeprefix(self.think_label))
        return after, is_open

    def _cut_marker(self, text: str) -> str:
        """The beginning of a marker at the end of `text`."""
        at = max(text.rfind(marker[0]) for marker in self.openings)
        cut = text[at:] if at >= 0 else ""
        is_marker = any(marker.startswith(cut) for marker in (*self.openings, *self.strays))
        return cut if len(cut) >= _LEAST_OF_A_MARKER and is_marker else ""


def single_calls(
    read_call: Callable[[str, int, Schemas], tuple[Attempt, int]], opening: str, closing: str
) -> ReadCalls:
    """Reads calls each of which has its own two markers.

    Args:
        read_call: (text, index of the opening marker, schemas) -> the call and the index after its
            closing marker. May raise `Unreadable`.
    """
    markers = one_of(opening, closing)

    def read(text: str, start: int, schemas: Schemas) -> tuple[list[Attempt], int]:
        try:
            if not text.startswith(opening, start):
                there = closing if text.startswith(closing, start) else "the call"
                raise Unreadable(f"no {opening} is before {there}", start)
            call, end = read_call(text, start, schemas)
        except Unreadable as error:
            call, end = skip_broken(text, start, error, markers, closing)
        return [call], end

    return read


def skip_broken(
    text: str, start: int, error: Unreadable, markers: re.Pattern[str], closing: str
) -> tuple[CallMistake, int]:
    """The mistake of a broken call, and the index after it.

    The call goes up to the next marker, and includes the marker if it is `closing`.
    """
    match = markers.search(text, error.at)
    end = len(text)
    if match:
        end = match.end() if match.group() == closing else match.start()
    mistake = CallMistake(
        problem=error.problem, text=text[start:end], is_open=match is None, name=error.name
    )
    return mistake, end


def one_of(*markers: str, pattern: str = "") -> re.Pattern[str]:
    return re.compile("|".join(filter(None, (*map(re.escape, markers), pattern))))


def without_end(text: str, end_texts: Sequence[str]) -> str:
    """The text without the control tokens at its end. Halves of surrogate pairs become `?`."""
    text = text.encode(errors="replace").decode()
    at = end = len(text)
    while True:
        while at and text[at - 1].isspace():
            at -= 1
        token = next((each for each in end_texts if text.endswith(each, 0, at)), None)
        if token is None:
            return text[:end]
        at = end = at - len(token)
