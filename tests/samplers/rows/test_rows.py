"""Rows and their names, what a data file must hold, and that it is told however many rows there
are."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.rows.schema import (
    SCHEMA,
    Row,
    columns_of,
    read_sources,
    row_id,
    row_id_problems,
    write_rows,
)


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


@pytest.mark.slow
def test_a_million_ids_take_about_a_second(tmp_path: Path) -> None:
    rows = 1_000_000
    path = write(tmp_path / "a.parquet", ["math"] * rows, names(rows))

    began = time.process_time()
    (file,) = read_sources([path])
    problems = row_id_problems([path])
    took_s = time.process_time() - began

    assert (file.rows_by_source, problems) == ({"math": rows}, [])
    assert took_s < 5  # a second on one core; busy machines are slower


# --- names --------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)
RECORDS = st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4)


@given(RECORDS)
def test_a_name_is_the_hash_of_the_record_as_json(record: dict[str, Any]) -> None:
    text = json.dumps(record, sort_keys=True, ensure_ascii=False)

    assert row_id("nq", record) == f"nq:{hashlib.sha1(text.encode()).hexdigest()[:16]}"


@given(RECORDS)
def test_a_name_does_not_depend_on_the_order_of_keys(record: dict[str, Any]) -> None:
    assert row_id("nq", record) == row_id("nq", dict(reversed(list(record.items()))))


def deep(bottom: object) -> Any:
    value: Any = bottom
    for _ in range(20_000):
        value = [value]
    return value


ODD: list[Any] = [
    *(b"a", b"b", Decimal("1"), Decimal("1.0"), float("nan"), float("inf"), "\ud800", "\udc00"),
    *(date(2024, 1, 1), datetime(2024, 1, 1, 12), {1: "a"}, {1: "b"}, {(1, 2): "a", "x": "b"}),
    *(np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500), np.float32(0.5), 1 + 2j),
    *(deep(1), deep(2), deep([1, 2]), {1, 2}, {"a": {None: deep(1)}}, {"a": {None: [1]}}, object),
]


def test_any_value_has_a_name_and_another_value_another() -> None:
    names = [row_id("x", {"value": value}) for value in ODD]

    assert len(set(names)) == len(ODD)
    assert names == [row_id("x", {"value": value}) for value in ODD]


def test_what_numpy_holds_has_the_name_of_what_lists_hold() -> None:
    plain = {"a": [[1, 2], [3, 4]], "b": 5, "c": [{"role": "user"}]}
    held = {"a": np.array([[1, 2], [3, 4]]), "b": np.int64(5), "c": np.array([{"role": "user"}])}

    assert row_id("x", held) == row_id("x", plain)


def test_a_name_is_the_same_in_every_process() -> None:
    program = (
        "from samplers.rows.schema import row_id; "
        "print(row_id('x', {'s': set('abcdef'), 'b': b'1'}))"
    )

    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(told) == 1


# --- columns ------------------------------------------------------------------------------------


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "data_source": "nq",
        "agent_name": "search_agent",
        "question": "who?",
        "ability": "qa",
        "ground_truth": {"target": ["Ann"]},
        "split": "train",
        "index": 0,
        "row_id": "nq:0000000000000000",
        "extras": {},
    }
    return Row(**fields | changes)


def test_rows_become_columns_in_their_order() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}]

    table = columns_of([row(), row(question="é?", messages=messages, index=7, extras={"é": None})])

    table.validate(full=True)
    assert table.schema.equals(SCHEMA)
    first, second = table.to_pylist()
    assert first["prompt"] == [{"role": "user", "content": "who?"}]
    assert second["prompt"] == messages
    assert second["extra_info"] == {
        "split": "train",
        "index": 7,
        "row_id": "nq:0000000000000000",
        "extras": '{"é": null}',
    }
    assert first["reward_model"] == {"style": "rule", "ground_truth": '{"target": ["Ann"]}'}


def test_no_rows_are_a_table_too() -> None:
    table = columns_of([])

    assert (table.num_rows, table.schema.equals(SCHEMA)) == (0, True)


def test_half_a_surrogate_pair_is_written_as_jsons_escape() -> None:
    table = columns_of([row(ground_truth={"target": ["é\ud800"]}, extras={"\udfff": 1})])

    (read,) = table.to_pylist()
    assert json.loads(read["reward_model"]["ground_truth"]) == {"target": ["é\ud800"]}
    assert json.loads(read["extra_info"]["extras"]) == {"\udfff": 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"question": "\ud800"}, "not Unicode"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not Unicode"),
        ({"extras": {"day": date(2024, 1, 1)}}, "extras is not JSON .*date"),
        ({"ground_truth": {"answer": float("nan")}}, "ground_truth is not JSON"),
        ({"extras": {"deep": deep(1)}}, "extras is not JSON"),
    ],
)
def test_a_row_that_cannot_be_written_is_named_and_leaves_no_file(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"row_id='nq:the bad one'.*{why}"):
        write_rows(tmp_path / "a.parquet", [row(), row(row_id="nq:the bad one", **changes)])

    assert not list(tmp_path.iterdir())
