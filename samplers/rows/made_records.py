"""The records of a kind that makes them itself, in the shape of a file of records."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from samplers.kind import Kind, Maker
from samplers.rows.records import Record

PROJECT = "verl-mixed-agent-loop"


class MadeRecords:
    """The input of a preparation that reads no file, with the methods of `RecordFile`.

    Args:
        kind: a kind with `records`.
        split: `train` or `validation`.
        options: the values of all options of the kind, by name.

    Raises:
        ValueError: the package that makes the records is not installed.
    """

    def __init__(self, kind: Kind, split: str, options: Mapping[str, Any]) -> None:
        assert kind.records is not None, kind.name
        self.maker: Maker = kind.records
        self.version: str = installed_version(kind)
        self._kind, self._split, self._options = kind, split, options
        self.read_bytes: int = 0
        self.size_bytes: int = 0
        """Unknown; progress is shown without an end."""

    def __str__(self) -> str:
        return f"kind={self._kind.name}"

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yield the records from position `start` on."""
        made = self.maker(split=self._split, **self._options)
        for number, value in enumerate(islice(made, start, None), start):
            yield Record(number, 0, value)

    def place(self, number: int, line: int) -> str:
        """The place of a record in a message, by its `number`."""
        return f"{self} record {number}"


def installed_version(kind: Kind) -> str:
    """Version of the package that makes a kind's records; empty without a package.

    Raises:
        ValueError: it is not installed.
    """
    if kind.package is None:
        return ""
    try:
        return importlib.metadata.version(kind.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"kind={kind.name!r} needs the package {kind.package}, which is not installed; "
            f"`pip install '{PROJECT}[{kind.extra}]'`, or `pip install {kind.package}`"
        ) from error
