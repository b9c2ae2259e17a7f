"""What a scan of logs finds: places, errors, and how far the run came. Standard library only."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from verl_mixed.diagnose.signatures import Signature


@dataclass(frozen=True, slots=True)
class Place:
    """A line's place in a file, and its text."""

    file: str
    line: int
    """From 1; newlines end lines."""

    offset: int
    """Bytes from the beginning; for a compressed file, of the unpacked text."""

    time: str | None
    text: str


Kind = Literal["driver", "worker", "line", "warned"]
"""A traceback of a process without and with Ray's prefix, a single line, a traceback below a
warning."""

Moment = tuple[float | None, int, int]  # (seconds, line, count) of an event


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """An error that no signature knows, or whose known part is no cause."""

    place: Place
    """Of the first exception of its traceback, or of its line."""

    last: Place
    """Of the last exception of its traceback."""

    kind: Kind

    start: int
    step: int
    """Number of steps of the file before the error."""

    line: int
    """Of its last line."""

    signature: Signature
    """The known warning that the error is an example of, else `unknown-error`."""


@dataclass(slots=True)
class Progress:
    """How far the run of one file came."""

    starts: int = 0
    steps: int = 0
    lines: int = 1
    is_complete: bool = False
    unknown: dict[str, Unknown] = field(default_factory=dict)
    """By kind: of the workers the first since a step, of the others the last, or the one that led
    to it."""


@dataclass(slots=True)
class Finding:
    """All events of one signature."""

    signature: Signature
    first: Place
    file_index: int
    """Of the first event."""

    count: int = 0
    of: Counter[str] = field(default_factory=Counter)
    """Events by what the pattern's group `of` matched."""

    last_start: int = 0
    """Number, within the file, of the run's start that the last event followed."""

    recent: deque[Moment] = field(default_factory=deque)
    """The events that may be one storm."""

    is_storm: bool = False

    is_mild: bool = True
    """Whether every event is a line that its writer calls a warning, or tries again after, or came
    after the run was complete."""

    shows_mild: bool = False
    """Whether `first` is such a line."""

    last_step: int = 0
    """Number of steps of the file before the last event."""

    then: Place | None = None
    """Of an unknown error: the exception that it led to."""

    severity: Literal["fatal", "warning"] = "warning"
    """Set by `Scan.ordered`: a fatal failure that the run survived is a warning."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line, or one traceback, that a signature matches."""

    signature: Signature
    of: str
    count: int
    place: Place
    is_mild: bool = False
