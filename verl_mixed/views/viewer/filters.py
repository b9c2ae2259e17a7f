"""Filters of trajectories. page/filter.js has the same rules, for a page without a server."""

import math
import re
import unicodedata
from dataclasses import dataclass

_STEPS = re.compile(r"[ ]*([0-9]{1,15})[ ]*(?:-[ ]*([0-9]{1,15})[ ]*)?")
_NUMBER = re.compile(r"[ ]*[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)(e[+-]?[0-9]+)?[ ]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which trajectories to show; None and empty strings choose all.

    A session of several rows is chosen if one of its rows is.
    """

    source: str = ""
    steps: tuple[int, int] | None = None
    """(first, last)"""

    outcome: str = ""
    """One of `OUTCOMES` or a stop reason."""

    reward_min: float | None = None
    reward_max: float | None = None
    text: str = ""
    """The response has all of these words; the last may be the beginning of a word."""

    group: str = ""
    """uid"""

    session: str | None = None
    """The page has no field for it."""

    def __str__(self) -> str:
        steps = self.steps and f"{self.steps[0]}-{self.steps[1]}"
        named = {
            "source": self.source,
            "step": steps,
            "outcome": self.outcome,
            "reward >=": self.reward_min,
            "reward <=": self.reward_max,
            "text": self.text,
        }
        return ", ".join(f"{name} {value}" for name, value in named.items() if value or value == 0)


def parse_steps(text: str) -> tuple[int, int] | None:
    """`3`, `3-7`, or nothing.

    Raises:
        ValueError: the text has another form, or the last step is before the first.
    """
    if not text:
        return None
    if match := _STEPS.fullmatch(text):
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return first, last
    raise ValueError(f"cannot filter by step={text!r}: want one step, 3, or a range, 3-7")


def parse_rewards(low: str, high: str) -> tuple[float | None, float | None]:
    """(least, most); an empty text gives None.

    Raises:
        ValueError: a text is not a finite number, or the first number is larger.
    """
    least, most = _number(low), _number(high)
    if least is not None and most is not None and least > most:
        raise ValueError(f"cannot filter by reward from {low} to {high}: want the lower one first")
    return least, most


def _number(text: str) -> float | None:
    if not text:
        return None
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(f"cannot filter by reward={text!r}: want a number, 0.5")
    return float(text)


def bare(text: str) -> str:
    """Text in the form that is searched: small letters, no accents, NFKD."""
    if not text.isascii():
        text = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text))
    return text.lower().replace("\u03c2", "\u03c3")


def words_of(text: str) -> tuple[list[str], list[str]]:
    """(words with a letter or digit, other words); blanks divide words."""
    parts = re.findall(r"[^ \t\n\r\f\v]+", bare(text))
    words = [part for part in parts if any(map(str.isalnum, part))]
    return words, [part for part in parts if part not in words]
