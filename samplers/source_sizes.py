"""Counts the rows of each source in training files, as verl's `RLHFDataset` reads them."""

# pyarrow comes with partial types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from samplers.mixture_rows import rows_by_source


def source_sizes(files: Sequence[str]) -> dict[str, int]:
    """Source -> rows of files in the formats of verl's `RLHFDataset`: Parquet, JSON and JSONL.

    Raises:
        ValueError: a file cannot be read, or a row has no source.
        OSError: as `open`.
    """
    sizes = Counter[str]()
    for file in files:
        try:
            rows = rows_by_source(_data_sources(file))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"cannot count the sources in {file}: {error}") from error
        sizes.update({name: len(own) for name, own in rows.items()})
    return dict(sizes)


def _data_sources(file: str) -> Any:
    if file.endswith(".parquet"):
        with pq.ParquetFile(file) as parquet:
            return parquet.read(columns=["data_source"])["data_source"]
    if not file.endswith((".json", ".jsonl")):
        raise ValueError("verl reads .parquet, .json and .jsonl")
    with open(file, encoding="utf-8") as lines:
        is_list = next(filter(str.strip, lines), "").lstrip().startswith("[")
        lines.seek(0)
        records = json.load(lines) if is_list else map(json.loads, filter(str.strip, lines))
        return [record.get("data_source") for record in records]
