"""The known failures: the files in `known/`, read and checked. Standard library only.

`known/mixed.ini` says what each field of a signature means.
"""

import re
from collections.abc import Mapping
from configparser import Error as IniError
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).with_name("known")

FILES = (
    "mixed",
    "scheduler",
    "config",
    "engine",
    "model",
    "gpu",
    "network",
    "ray",
    "host",
    "common",
    "steps",
)
"""The files in the order in which their signatures are tried on a line."""

_REQUIRED = {"title", "cause", "remedy"}
_OPTIONAL = {"severity", "follows", "mends", "storm", "pattern", "source"}
_STORM = re.compile(r"(\d+) events in (\d+) seconds or (\d+) lines")
_NOT_LOWERED = re.compile(r"\\.|\(\?P[<=>]|[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """How many events must be how close together to be a finding."""

    events: int
    seconds: float
    lines: int
    """Counts instead of `seconds` where a log has no times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known failure."""

    id: str
    title: str
    cause: str
    remedy: str
    severity: Literal["fatal", "warning"] = "fatal"
    patterns: tuple[re.Pattern[str], ...] = ()
    """They search a line in small letters. Empty: no pattern shows this failure, but the numbers of
    steps or the exceptions of a log."""

    follows: bool = False
    mends: bool = True
    """Whether a resume may mend it."""

    storm: Storm | None = None
    source: str = ""
    """The threads, manuals or lines of code, with versions, that the message is from."""


def parse_signatures(text: str, file: str = "known/mixed.ini") -> tuple[Signature, ...]:
    """The signatures of an INI file, in its order.

    Raises:
        ValueError: a section breaks a rule; the message names the section and the rule.
    """
    parser = RawConfigParser(
        delimiters=("=",), comment_prefixes=("#",), empty_lines_in_values=False
    )
    try:
        parser.read_string(text, source=file)
    except IniError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    return tuple(_signature(name, parser[name], file) for name in parser.sections())


def _signature(name: str, section: Mapping[str, str], file: str) -> Signature:
    """One section of a file."""
    place = f"cannot read {file} [{name}]"
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
    try:
        patterns = tuple(
            re.compile(lower_pattern(line))
            for line in section.get("pattern", "").strip().splitlines()
        )
    except re.error as error:
        raise ValueError(f"{place}: the pattern is not a regular expression: {error}") from error
    return Signature(
        id=name,
        title=texts["title"],
        cause=texts["cause"],
        remedy=texts["remedy"],
        severity=severity,
        patterns=patterns,
        follows=follows == "yes",
        mends=mends == "yes",
        storm=storm and Storm(events=int(storm[1]), seconds=float(storm[2]), lines=int(storm[3])),
        source=texts["source"],
    )


def lower_pattern(pattern: str) -> str:
    r"""The pattern for a line in small letters. `\S` and the names of groups stay as they are."""
    return _NOT_LOWERED.sub(lambda m: m[0].lower() if len(m[0]) == 1 else m[0], pattern)


def _read_all() -> tuple[Signature, ...]:
    signatures: dict[str, Signature] = {}
    for name in FILES:
        path = FOLDER / f"{name}.ini"
        for signature in parse_signatures(path.read_text(encoding="utf-8"), f"known/{path.name}"):
            if signature.id in signatures:
                raise ValueError(f"cannot read known/{path.name}: [{signature.id}] exists already")
            signatures[signature.id] = signature
    return tuple(signatures.values())


SIGNATURES = _read_all()

BY_ID: Mapping[str, Signature] = {signature.id: signature for signature in SIGNATURES}

IN_LINES: tuple[Signature, ...] = tuple(s for s in SIGNATURES if s.patterns)
