r"""Words that a line must hold before a pattern can find it: a fast first search of a log.

Each pattern is taken apart once. Of the texts that every line with a match holds, one is chosen as
its cue. `error[:,] .*custom code which must be executed` has the cue ` which must be executed`.
Most cues begin with a space: one regular expression, which looks at spaces only, finds all of them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

try:  # Python 3.11 and later
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover
    import sre_constants as codes
    import sre_parse as parser

_LEAST = 7
"""Characters of a cue that begins with a space, with the space."""

_PLAIN = ("error", "exception", "failed", "timeout", "timed out", "mismatch", "unable", "invalid")
"""Words that many patterns share; each costs one search through the log."""

Choice = frozenset[str]
"""Texts of which a line must hold one."""


class Cues:
    """The cues of many patterns, and which patterns a line may match.

    Args:
        patterns: in small letters.
        words: texts that are looked for besides, in small letters.
    """

    def __init__(self, patterns: Sequence[str], words: Iterable[str] = ()) -> None:
        choices = [cues_of(pattern) for pattern in patterns]
        every = sorted({*words, *(cue for choice in choices for cue in choice)}, key=len)
        kept: dict[str, str] = {}  # cue -> the shortest cue that it holds
        for cue in every:
            kept[cue] = next((k for k in dict.fromkeys(kept.values()) if k in cue), cue)
        self._patterns: dict[bytes, list[int]] = {cue.encode(): [] for cue in kept.values()}
        for number, choice in enumerate(choices):
            for cue in choice:
                self._patterns[kept[cue].encode()].append(number)
        spaced = sorted(cue[1:] for cue in self._patterns if cue[:1] == b" ")
        self._spaced = re.compile(b" (?=(" + _trie(spaced) + b"))")
        self._plain = tuple(cue for cue in self._patterns if cue[:1] != b" ")

    def lines(self, block: bytes) -> dict[int, int]:
        """Start -> end of the lines with a cue; the block is in small letters.

        Carriage returns end a line too, because progress bars write them.
        """
        lines: dict[int, int] = {}
        end = -1
        for match in self._spaced.finditer(block):
            if match.end() > end:
                end = _add_line(block, match.end(), lines)
        for cue in self._plain:
            at = block.find(cue)
            while at >= 0:
                at = block.find(cue, _add_line(block, at, lines))
        return lines

    def patterns_for(self, line: bytes) -> list[int]:
        """Numbers of the patterns that may find the line, which is in small letters."""
        numbers: set[int] = set()
        for match in self._spaced.finditer(line):
            numbers.update(self._patterns[b" " + match[1]])
        for cue in self._plain:
            if cue in line:
                numbers.update(self._patterns[cue])
        return sorted(numbers)


def cues_of(pattern: str) -> Choice:
    """Texts of which every line that the pattern finds holds one.

    Raises:
        ValueError: the pattern has no text of at least five characters.
    """
    choices = _choices(cast("Iterable[tuple[Any, Any]]", parser.parse(pattern)))
    spaced = [c for c in (_spaced(choice) for choice in choices) if c]
    plain = [
        frozenset(next(word for word in _PLAIN if word in text) for text in choice)
        for choice in choices
        if all(any(word in text for word in _PLAIN) for text in choice)
    ]
    best = _best(spaced) or _best(plain) or _best(choices)
    if best is None or min(map(len, best)) < 5:
        raise ValueError(f"pattern={pattern!r} has no text of five characters that is always there")
    return best


def _spaced(choice: Choice) -> Choice | None:
    """The choice with each text cut to begin with a space; None if a text is too short for it."""
    cut: set[str] = set()
    for text in choice:
        tails = [text[i:] for i, c in enumerate(text) if c == " " and len(text) - i >= _LEAST]
        if not tails:
            return None
        cut.add(max(tails, key=lambda tail: (tail[1] not in "etaoins", len(tail))))
    return frozenset(cut)


def _best(choices: Iterable[Choice]) -> Choice | None:
    return max(choices, key=lambda choice: (min(map(len, choice)), -len(choice)), default=None)


def _choices(parts: Iterable[tuple[Any, Any]]) -> list[Choice]:
    """For each part of a parsed pattern that must match: the texts of which it matches one."""
    choices: list[Choice] = []
    run = ""
    for code, value in parts:
        if code is codes.LITERAL:
            run += chr(value)
            continue
        if run and code is not codes.AT:
            choices, run = [*choices, frozenset({run})], ""
        if code is codes.SUBPATTERN:
            choices += _choices(value[-1])
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[0] >= 1:
            choices += _choices(value[2])
        elif code is codes.BRANCH:
            best = [_best(_choices(branch)) for branch in value[1]]
            if all(best):
                choices.append(frozenset().union(*(choice for choice in best if choice)))
    return [*choices, frozenset({run})] if run else choices


def _add_line(block: bytes, at: int, lines: dict[int, int]) -> int:
    """Add the line that holds `at`; returns its end."""
    start = block.rfind(b"\n", 0, at) + 1
    start = max(start, block.rfind(b"\r", start, at) + 1)
    end = lines.get(start)
    if end is None:
        end = lines[start] = end_of_line(block, at)
    return end


def end_of_line(block: bytes, start: int) -> int:
    """The end of the line that holds `start`."""
    end = block.find(b"\n", start)
    end = len(block) if end < 0 else end
    cut = block.find(b"\r", start, end)
    return end if cut < 0 else cut


def _trie(words: Iterable[bytes]) -> bytes:
    """A regular expression that finds each word; none of them begins with another."""
    branches: dict[bytes, list[bytes]] = {}
    for word in words:
        if not word:
            return b""
        branches.setdefault(word[:1], []).append(word[1:])
    parts = [re.escape(first) + _trie(rests) for first, rests in branches.items()]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
