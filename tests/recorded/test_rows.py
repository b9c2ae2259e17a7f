"""`verl-mixed prepare` makes the rows that are recorded: some always, all of them at night."""

import pytest

from tests.recorded.compare import changed, recorded_blocks
from tests.recorded.rows import FILE, blocks

SAMPLE = (
    "format a.jsonl",
    "values of JSON",
    "lines whose keys and types differ",
    "types of columns in a.parquet",
    "broken lines are skipped",
    "taco: counted",
    "nq: rows of verl without row_id",
    "math: a parquet file",
    "own kind",
)


def test_some_records_become_the_recorded_rows() -> None:
    found = changed(FILE, recorded_blocks(FILE), blocks(SAMPLE))
    assert not found, found


@pytest.mark.nightly
def test_every_record_becomes_the_recorded_row() -> None:
    found = changed(FILE, recorded_blocks(FILE), blocks())
    assert not found, found


def test_every_format_has_the_same_rows() -> None:
    found = {
        name: body.partition("rows.parquet:\n")[2]
        for name, body in recorded_blocks(FILE).items()
        if name.startswith("format ") and "line ends" not in name
    }

    assert len(found) > 20
    assert {name for name in found if found[name] != found["format a.jsonl"]} == set()
