"""Several byte strings in one file: a line of JSON with their names and sizes, then their bytes.

Programs and their files pass between the server and a run in this form, because text in JSON
would have to be escaped and copied several times.
"""

import json
from collections.abc import Iterable, Iterator
from typing import BinaryIO

NOT_IMPORTED = "cannot import"
"""Begins the last line of a zygote that cannot import a package."""


def write_parts(file: BinaryIO, header: dict, parts: "Iterable[tuple[str, bytes]]") -> None:
    """Write `header` (JSON) and named byte strings; names may repeat."""
    parts = list(parts)
    sizes = [(name, len(content)) for name, content in parts]
    file.write(json.dumps(header | {"sizes": sizes}).encode() + b"\n")
    for _, content in parts:
        file.write(content)


def read_parts(file: BinaryIO) -> "tuple[dict, Iterator[tuple[str, bytes]]]":
    """The header, and the parts, which are read one after the other when they are asked for."""
    header = json.loads(file.readline())
    sizes = header.pop("sizes")
    return header, ((name, file.read(size)) for name, size in sizes)
