"""Calls inside a block: `<block> <call>...</call> <call>...</call> </block>`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from agent_loop.turns.call_formats.json_values import Unreadable, shown, skip_space
from agent_loop.turns.call_formats.message import (
    MOST_CALLS,
    Attempt,
    CallMistake,
    ParsedCall,
    Schemas,
)
from agent_loop.turns.call_formats.scanning import one_of, skip_broken


@dataclass(frozen=True, kw_only=True)
class BlockReader:
    """Reads the calls of a block, and the parts of a block that stand alone."""

    block: tuple[str, str]
    """Opening and closing marker of the block."""

    call: tuple[str, str]
    """The text with which a call begins, and the closing marker of a call."""

    read_call: Callable[[str, int, Schemas], tuple[Attempt, int]]
    """(text, index of the call, schemas) -> the call and the index after it. May raise
    `Unreadable`."""

    is_one_call: bool
    """Whether a block normally holds one call. Then a call without the block's closing marker is a
    mistake; else a call needs only its own closing marker."""

    may_end_early: bool = True
    """Whether a closing marker that is written too early leaves a call that can be read. Words
    after a call inside a block are then a part of the call, which is a mistake."""

    others: tuple[str, ...] = ()
    """Further texts that are a mistake outside a block."""

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        return one_of(*self.block, *self.call)

    def read(self, text: str, start: int, schemas: Schemas) -> tuple[list[Attempt], int]:
        """The calls of the block whose opening marker begins at `start`."""
        opening, closing = self.block
        if not text.startswith(opening, start):
            mistake, end = self._read_stray(text, start, schemas)
            return [mistake], end
        found: list[Attempt] = []
        call_begin = at = skip_space(text, start + len(opening))
        while at < len(text) and len(found) < MOST_CALLS and not text.startswith(self.block, at):
            begin = at
            attempt, at = self._read_one(text, at, schemas)
            is_words = isinstance(attempt, CallMistake) and not text.startswith(self.call[0], begin)
            before = found[-1] if found else None
            if is_words and isinstance(before, ParsedCall) and self.may_end_early:
                found[-1] = replace(attempt, text=text[call_begin:at], name=before.name)
            else:
                found.append(attempt)
            call_begin = begin
            at = skip_space(text, at)
        is_closed = text.startswith(closing, at)
        end = at + len(closing) if is_closed else at
        is_open = end == len(text) and not is_closed
        if not found:
            problem = f"no call follows {opening}"
            found = [CallMistake(problem=problem, text=text[start:end], is_open=is_open)]
        elif self.is_one_call and not is_closed:
            found = [
                CallMistake(
                    problem=f"no {closing} follows the call of {shown(call.name)}",
                    text=call.text,
                    is_open=is_open,
                    name=call.name,
                )
                if isinstance(call, ParsedCall)
                else call
                for call in found
            ]
        return found, end

    def _read_one(self, text: str, at: int, schemas: Schemas) -> tuple[Attempt, int]:
        """The call at `at`; a mistake if something else is there."""
        try:
            if text.startswith(self.call[0], at):
                return self.read_call(text, at, schemas)
            problem = f"inside {self.block[0]}, {shown(text[at : at + 41])} is no call"
            raise Unreadable(problem, at)
        except Unreadable as error:
            return skip_broken(text, at, error, self._markers, self.call[1])

    def _read_stray(self, text: str, start: int, schemas: Schemas) -> tuple[CallMistake, int]:
        """The mistake at a marker that stands outside a block, and the index after it."""
        opening, closing = self.block
        if text.startswith(self.call[0], start):
            attempt, end = self._read_one(text, start, schemas)
        else:
            markers = (closing, self.call[1], *self.others)
            marker = next(each for each in markers if text.startswith(each, start))
            before = self.call[0] if marker == self.call[1] else opening
            there = marker if marker in markers[:2] else shown(text[start : start + 41])
            attempt = CallMistake(problem=f"no {before} is before {there}", text=marker)
            end = start + len(marker)
        if text.startswith(closing, after := skip_space(text, end)):
            end = after + len(closing)
        if isinstance(attempt, ParsedCall):
            problem = f"no {opening} is before the call of {shown(attempt.name)}"
            attempt = CallMistake(problem=problem, text=attempt.text, name=attempt.name)
        return replace(attempt, text=text[start:end]), end
