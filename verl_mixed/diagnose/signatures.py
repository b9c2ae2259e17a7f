"""The known failures: signatures.ini, read and checked. Standard library only."""

import re
from collections.abc import Mapping
from configparser import Error as IniError
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FILE = Path(__file__).with_name("signatures.ini")

_REQUIRED = {"title", "cause", "remedy"}
_OPTIONAL = {"severity", "follows", "mends", "storm", "cues", "pattern"}
_STORM = re.compile(r"(\d+) events in (\d+) seconds or (\d+) lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """How many events must be how close together to be a finding."""

    events: int
    seconds: float
    lines: int
    """Counts instead of `seconds` where a log has no times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known failure; signatures.ini says what each field means."""

    id: str
    title: str
    cause: str
    remedy: str
    severity: Literal["fatal", "warning"] = "fatal"
    cues: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    """None: the numbers of steps show this failure, and no line of a log."""

    follows: bool = False
    mends: bool = True
    """Whether a resume may mend it."""

    storm: Storm | None = None


def parse_signatures(text: str) -> tuple[Signature, ...]:
    """The signatures of an INI file, in its order.

    Raises:
        ValueError: a section breaks a rule; the message names the section and the rule.
    """
    parser = RawConfigParser(
        delimiters=("=",), comment_prefixes=("#",), empty_lines_in_values=False
    )
    try:
        parser.read_string(text, source=FILE.name)
    except IniError as error:
        raise ValueError(f"cannot read {FILE.name}: {error}") from error
    return tuple(_signature(name, parser[name]) for name in parser.sections())


def _signature(name: str, section: Mapping[str, str]) -> Signature:
    """One section of the file."""
    place = f"cannot read {FILE.name} [{name}]"
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"{place}: an id is small letters, digits and hyphens")
    texts = {key: " ".join(section.get(key, "").split()) for key in _REQUIRED | _OPTIONAL}
    missing = sorted(key for key in _REQUIRED if not texts[key])
    unknown = sorted(section.keys() - _REQUIRED - _OPTIONAL)
    if missing or unknown:
        raise ValueError(f"{place}: missing {missing}, unknown {unknown}; correct the keys")
    severity, follows = texts["severity"] or "fatal", texts["follows"] or "no"
    mends = texts["mends"] or "yes"
    if severity not in ("fatal", "warning") or not {follows, mends} <= {"yes", "no"}:
        raise ValueError(f"{place}: severity is fatal or warning, follows and mends are yes or no")
    storm = _STORM.fullmatch(texts["storm"])
    if texts["storm"] and storm is None:
        raise ValueError(f"{place}: storm={texts['storm']!r} is not of the form {_STORM.pattern}")
    cues, alternatives = (section.get(key, "").strip().splitlines() for key in ("cues", "pattern"))
    if bool(cues) != bool(alternatives):
        raise ValueError(f"{place}: a pattern needs cues, and cues need a pattern")
    try:
        pattern = re.compile("|".join(alternatives)) if alternatives else None
    except re.error as error:
        raise ValueError(f"{place}: the pattern is not a regular expression: {error}") from error
    return Signature(
        id=name,
        title=texts["title"],
        cause=texts["cause"],
        remedy=texts["remedy"],
        severity=severity,
        cues=tuple(cues),
        pattern=pattern,
        follows=follows == "yes",
        mends=mends == "yes",
        storm=storm and Storm(events=int(storm[1]), seconds=float(storm[2]), lines=int(storm[3])),
    )


SIGNATURES = parse_signatures(FILE.read_text(encoding="utf-8"))

BY_ID: Mapping[str, Signature] = {signature.id: signature for signature in SIGNATURES}

IN_LINES: tuple[Signature, ...] = tuple(s for s in SIGNATURES if s.pattern is not None)
