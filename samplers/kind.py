"""A kind of data: how one raw record becomes a row, and the options of this conversion.

Each kind is a file with a `KIND`, in `samplers.rows.sources` or anywhere else.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samplers.rows.schema import Row


class UnusableRecord(ValueError):
    """A valid record that no reward can judge. It is counted by its message, and left out."""


class BadRecord(ValueError):
    """A record that breaks its schema: a missing column, a value of another type, broken JSON.

    It ends the preparation unless `skip_bad`.

    Args:
        message: names field, value and rule; the reader of the file adds file and record.
        reason: the same text for all records with this fault; `skip_bad` counts by it.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


Reader = Callable[..., Row]
"""Converts one raw record to one row: `to_row(record, *, split, index, source, agent, **options)`.

Args:
    record: the record of the file, a mapping; it is not changed.
    split: `train` or `validation`.
    index: position of the record in its file, from 0.
    source: `data_source` of the row and the first part of its `row_id`; the kind's name unless
        the user gives another.
    agent: `agent_name` of the row; the kind's agent unless the user gives another.
    options: the values of the kind's `options`, by name.

Raises:
    UnusableRecord: no reward can judge the record.
    BadRecord: the record breaks its schema.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a kind, on the command line and as keyword argument."""

    name: str
    """The reader's keyword; `max_tests` is `--max-tests` on the command line."""

    type: Callable[[str], Any]
    """Converts the text of the command line; may raise ValueError."""

    default: Any
    help: str


Maker = Callable[..., Iterable[Mapping[str, Any]]]
"""Makes the records of a kind without files: `records(*, split, **options)`.

The same split and options give the same records in the same order, because an interrupted
preparation skips the records that it has.

Args:
    split: `train` or `validation`; no question is in both.
    options: the values of the kind's `options`, by name.

Raises:
    ValueError: an option is wrong, or a package is missing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    """Name of the kind, and default `data_source` of its rows."""

    agent: str
    """Default `agent_name` of its rows; a run's `mixed.sources.<name>.agent` has priority."""

    to_row: Reader
    help: str
    """One line about the files that it reads, or the records that it makes."""

    options: tuple[Option, ...] = ()

    records: Maker | None = None
    """Makes the records, for a kind without files; None: records are read from files."""

    package: str | None = None
    """The PyPI package that makes the records. Its version is part of the rows' fingerprint,
    because another version may make other records."""

    modules: tuple[str, ...] = ()
    """Other modules of this project whose code decides the rows, beside that of `to_row` and of
    `records`. Their code is part of the rows' fingerprint."""

    extra: str = ""
    """This project's extra that installs the package."""
