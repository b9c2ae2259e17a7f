"""What a data file must hold, and that it is told fast however many rows there are."""

import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.rows import SCHEMA, read_sources, row_id_problems


def write(path: Path, sources: Sequence[str | None], ids: Sequence[str | None]) -> Path:
    """A file in our schema of which only `data_source` and `row_id` matter."""
    rows = len(ids)
    extra_info = {
        "split": pa.array(["train"] * rows, pa.string()),
        "index": pa.array(range(rows), pa.int64()),
        "row_id": pa.array(ids, pa.string()),
        "extras": pa.array(["{}"] * rows, pa.string()),
    }
    columns: dict[str, pa.Array] = {
        field.name: pa.nulls(rows, field.type)  # type: ignore[call-overload]
        for field in SCHEMA
    }
    columns["data_source"] = pa.array(sources, pa.string())
    columns["extra_info"] = pa.StructArray.from_arrays(
        list(extra_info.values()), fields=list(SCHEMA.field("extra_info").type)
    )
    pq.write_table(pa.table(columns, schema=SCHEMA), path)
    return path


def names(count: int, start: int = 0) -> list[str]:
    return [f"math:{number:016x}" for number in range(start, start + count)]


def test_rows_are_counted_by_source_in_the_order_of_first_appearance(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["nq", "math", "nq", "nq"], names(4))

    (file,) = read_sources([path])

    assert list(file.rows_by_source.items()) == [("nq", 3), ("math", 1)]


def test_every_unusable_file_is_told_with_rule_and_remedy(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("no table")
    wrong = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"data_source": [1], "prompt": ["?"]}), wrong)
    empty = write(tmp_path / "empty.parquet", [], [])
    nameless = write(tmp_path / "nameless.parquet", ["math", None], names(2))

    with pytest.raises(ValueError) as told:
        read_sources([tmp_path / "gone.parquet", text, wrong, empty, nameless])

    lines = str(told.value).splitlines()
    for path, words in (
        ("gone.parquet", "no such file"),
        ("text.parquet", "not a parquet file"),
        ("wrong.parquet", "column 'data_source' is int64, the rule is string"),
        ("wrong.parquet", "column 'agent_name' is missing, the rule is string"),
        ("empty.parquet", "it holds 0 rows, at least 1 is needed"),
        ("nameless.parquet", "1 rows have data_source=null"),
    ):
        assert any(f"{path}: {words}" in line for line in lines), (path, words)
    assert all("write it with `verl-mixed prepare`" in line for line in lines)


def test_an_id_on_two_rows_is_told_with_its_places(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", ["math"] * 3, names(3))
    second = write(tmp_path / "b.parquet", ["math"] * 3, [*names(1, 7), *names(2, 1)])
    third = write(tmp_path / "c.parquet", ["math"] * 2, names(2, 100))

    (problem,) = row_id_problems([first, second, third])

    assert problem == (
        "2 values of extra_info.row_id are each on more than one row, on 4 together "
        f"({first}, {second}), first 'math:0000000000000001' ({first} row 1, {second} row 1): "
        "the ledger names one prompt by each; leave the copies out"
    )


def test_only_the_first_places_are_spelled_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["math"] * 9, ["math:same"] * 9)

    (problem,) = row_id_problems([path])

    assert f"{path} row 4 and 4 more" in problem


def test_rows_without_an_id_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["math"] * 3, [names(1)[0], None, None])

    (problem,) = row_id_problems([path])

    assert problem.startswith(f"2 rows have no extra_info.row_id ({path}), first {path} row 1")


@given(ids=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), min_size=1, max_size=4))
def test_ids_are_refused_exactly_when_one_comes_twice(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    files = [
        write(folder / f"{number}.parquet", ["math"] * len(own), own)
        for number, own in enumerate(ids)
    ]
    every = [name for own in ids for name in own]

    assert bool(row_id_problems(files)) == (len(set(every)) < len(every))


def test_a_million_ids_take_about_a_second(tmp_path: Path) -> None:
    rows = 1_000_000
    path = write(tmp_path / "a.parquet", ["math"] * rows, names(rows))

    began = time.process_time()
    (file,) = read_sources([path])
    problems = row_id_problems([path])
    took_s = time.process_time() - began

    assert (file.rows_by_source, problems) == ({"math": rows}, [])
    assert took_s < 5  # a second on one core; busy machines are slower
