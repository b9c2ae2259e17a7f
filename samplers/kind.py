"""What a kind of data is: how one raw record of it becomes a row, and what can be asked of that.

One file a kind, in `samplers.rows.sources` or anywhere else: it holds a `KIND`. Reading files is
left to `samplers.rows.records`, everything around single records to `samplers.rows.prepare`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from samplers.rows.schema import Row


class UnusableRecord(ValueError):
    """A record of the right form that no reward can judge: a gap of the dataset itself, as a TACO
    problem without tests. It is left out and counted. The message is the reason, the same for all
    such records."""


class BadRecord(ValueError):
    """A record that is not of its schema: a column is missing, a value has another type, a cell
    holds broken JSON. It ends the preparation unless `skip_bad`. The message names field, value and
    rule; file and record are added by who reads the file.

    Args:
        message: for people.
        reason: the same for all records with this fault; what `skip_bad` counts by.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Reader(Protocol):
    """One raw record in, one row out: `to_row(record, split=..., index=...)`."""

    def __call__(self, record: Mapping[str, Any], *args: Any, **options: Any) -> Row:
        """Turn a record into a row. All that follows `record` is given by keyword.

        Args:
            record: as the file holds it; never changed.
            split: `train` or `validation`.
            index: position of the record in its file, from 0.
            source: `data_source` of the row, and the first part of its `row_id`: the kind's name
                unless the user gives another. A preparation always tells it, and `agent`.
            agent: `agent_name` of the row: the kind's unless the user gives another.
            options: the values of the kind's `options`, by name; those left out have their default.

        Raises:
            UnusableRecord, BadRecord: see there.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something that a kind can be told, on the command line and by keyword."""

    name: str
    """As the reader's keyword; `max_tests` is `--max-tests` on the command line."""

    type: Callable[[str], Any]
    """Reads the word of the command line; raises ValueError."""

    default: Any
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of data."""

    name: str
    """Of the kind, and of the source (`data_source`) that its rows belong to unless told."""

    agent: str
    """`agent_name` of its rows; a run's `mixed.sources.<name>.agent` goes before it."""

    to_row: Reader
    help: str
    """One line: which files it reads."""

    options: tuple[Option, ...] = ()
