"""Reading: the same records from every format, and a place and a reason for whatever is wrong."""

import csv
import gzip
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import samplers.rows.records
from samplers.kind import BadRecord
from samplers.rows.records import BadData, RecordFile

RECORDS: list[dict[str, Any]] = [
    {"question": "who?", "answer": "Ann\nLee", "n": "1"},
    {"question": "größe \u2028 \U0001f600", "answer": 'say "x", then\r\ny', "n": "2"},
    {"question": "", "answer": "\t", "n": "3"},
]


def arrow_file(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def arrow_stream(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def array(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records, ensure_ascii=False))


def indented(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records, indent=2))


def objects(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(record, indent=1) for record in records))


def separated(delimiter: str) -> Callable[[Path, list[dict[str, Any]]], None]:
    def write(path: Path, records: list[dict[str, Any]]) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)

    return write


FORMATS = {
    "a.parquet": parquet,
    "file.arrow": arrow_file,
    "stream.arrow": arrow_stream,
    "a.jsonl": lines,
    "lines.json": lines,
    "array.json": array,
    "indented.json": indented,
    "objects.json": objects,
    "a.csv": separated(","),
    "a.tsv": separated("\t"),
}
TEXTS = [name for name in FORMATS if not name.endswith(("parquet", "arrow"))]


def values(path: Path, start: int = 0) -> list[Mapping[str, Any] | BadRecord]:
    return [record.value for record in RecordFile(path).records(start)]


def faults(path: Path) -> list[str]:
    """Place and message of every faulty record."""
    file = RecordFile(path)
    return [
        f"{file.place(record.number, record.line)}: {record.value}".replace(f"{path} ", "")
        for record in file.records()
        if isinstance(record.value, BadRecord)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_records(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, RECORDS)

    assert values(tmp_path / name) == RECORDS


@pytest.mark.parametrize("name", TEXTS)
def test_a_gzipped_text_gives_the_same_records(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, RECORDS)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))

    assert values(packed) == RECORDS


@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](path, RECORDS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert values(path) == RECORDS


@pytest.mark.parametrize("name", FORMATS)
def test_reading_starts_anywhere_with_the_numbers_of_the_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](path, RECORDS)
    whole = list(RecordFile(path).records())

    for start in range(len(RECORDS) + 2):
        assert list(RecordFile(path).records(start)) == whole[start:]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_ends_at_the_size_of_the_file(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, RECORDS)
    file = RecordFile(tmp_path / name)

    assert file.read_bytes == 0
    assert len(list(file.records())) == len(RECORDS)
    assert file.read_bytes == file.size_bytes


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_text_has_no_records(tmp_path: Path, name: str) -> None:
    for content in ("", "\n\n"):
        (tmp_path / name).write_text(content)
        assert values(tmp_path / name) == []


def test_line_ends_may_be_mixed_and_lines_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\r\n\r\n \n{"a":\r2}\n{"a":3}')

    assert [(r.number, r.line, r.value) for r in RecordFile(path).records()] == [
        (0, 1, {"a": 1}),
        (1, 4, {"a": 2}),
        (2, 5, {"a": 3}),
    ]


def test_every_faulty_line_has_its_place_and_reason_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"a": 1}\n{"a": \n[1]\n{"a": "\xff"}\n{"a": "\\ud83d"}\n{"a": "x"} y\n'
        + b"[" * 100_000
        + b'\n{"a": '
        + b"9" * 5000
        + b'}\n{"a": 2}\n'
    )

    assert [value for value in values(path) if not isinstance(value, BadRecord)] == [
        {"a": 1},
        {"a": 2},
    ]
    told = faults(path)
    for number, words in (
        (2, "not JSON (Expecting value"),
        (3, "not an object but '[1]'"),
        (4, "not UTF-8 (byte 0xff at 7)"),
        (5, "'\\ud83d' is half of a surrogate pair"),
        (6, "not JSON (Extra data"),
        (7, "nested too deep"),
        (8, "not JSON (Exceeds the limit"),
    ):
        assert any(line.startswith(f"line {number}: ") and words in line for line in told), words
    assert len(told) == 7


def test_numbers_are_read_as_python_reads_them(tmp_path: Path) -> None:
    text = '{"a": [1, 1.0, -0.5, 1e3, NaN, Infinity, -Infinity, 123456789012345678901234567890]}'
    for name, content in (("a.jsonl", text), ("a.json", f"[{text}]")):
        (tmp_path / name).write_text(content)
        (value,) = values(tmp_path / name)
        assert repr(value) == repr(json.loads(text))


def test_a_faulty_element_of_an_array_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1},\n{"a": "\xff"}, 5,\n{"a": "\\udc00"}, {"a": "\n"},{"a": 2}]\n')

    assert [value for value in values(path) if not isinstance(value, BadRecord)] == [
        {"a": 1},
        {"a": 2},
    ]
    told = faults(path)
    assert [line.split(":")[0] for line in told] == [
        "record 1 (line 2)",
        "record 2 (line 2)",
        "record 3 (line 3)",
        "record 4 (line 3)",
    ]


@pytest.mark.parametrize(
    ("content", "records", "words"),
    [
        ('[{"a": 1}, {"a": }, {"a": 2}]', 1, "line 1: Expecting value"),
        ('[{"a": 1},\n {"a": "never closed', 1, "line 2: Unterminated string"),
        ('[{"a": 1}', 1, "']' is missing"),
        ('[{"a": 1},', 1, "']' is missing"),
        ('[{"a": 1} {"a": 2}]', 1, "',' or ']' is missing"),
        ('[{"a": 1}] {"a": 2}', 1, "text follows the end"),
        ("[", 0, "']' is missing"),
        ("[" * 100_000, 0, "nested too deep"),
    ],
)
def test_an_array_that_is_broken_itself_ends_the_reading(
    tmp_path: Path, content: str, records: int, words: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    reading = RecordFile(path).records()

    assert [next(reading).value for _ in range(records)] == [{"a": 1}] * records
    with pytest.raises(BadData, match=r"cannot read .*a.json line") as told:
        next(reading)
    assert words in str(told.value)


@given(
    records=st.lists(
        st.dictionaries(
            st.text(max_size=3),
            st.text(max_size=20) | st.integers() | st.booleans() | st.lists(st.text(max_size=3)),
            max_size=3,
        ),
        max_size=8,
    ),
    block_bytes=st.integers(1, 64),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
)
def test_an_array_is_cut_right_wherever_the_blocks_end(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, Any]],
    block_bytes: int,
    indent: int | None,
    is_ascii: bool,
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=is_ascii))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers.rows.records, "_BLOCK_BYTES", block_bytes)
        assert values(path) == records


def test_a_number_in_an_array_is_one_element_wherever_the_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text('[1234567, {"a": 1}]')

    for block_bytes in range(1, 12):
        monkeypatch.setattr(samplers.rows.records, "_BLOCK_BYTES", block_bytes)
        fault, record = values(path)
        assert "'1234567'" in str(fault)
        assert record == {"a": 1}


@pytest.mark.slow
def test_a_line_of_50_mb_is_a_record_and_one_beyond_the_limit_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * 50_000_000
    for name, content in (
        ("a.jsonl", json.dumps({"a": text})),
        ("a.json", json.dumps([{"a": text}])),
        ("a.csv", f'a\n"{text}"\n'),
    ):
        path = tmp_path / name
        path.write_text(content)
        assert values(path) == [{"a": text}]

    monkeypatch.setattr(samplers.rows.records, "MOST_RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(samplers.rows.records, "_BLOCK_BYTES", 1 << 18)
    for name in ("a.jsonl", "a.json", "a.csv"):
        with pytest.raises(BadData, match="longer than 1 MiB"):
            values(tmp_path / name)


def test_faulty_rows_of_csv_are_told_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'q,a\r\n1,"x\ny"\n2\n3,z,more\n\n"4"x,y\n\xff,5\r6,w\n7,\n')

    assert [value for value in values(path) if not isinstance(value, BadRecord)] == [
        {"q": "1", "a": "x\ny"},
        {"q": "6", "a": "w"},
        {"q": "7", "a": ""},
    ]
    told = faults(path)
    for number, words in (
        (4, "it has 1 cells, the header names 2"),
        (5, "it has 3 cells, the header names 2"),
        (7, "not CSV"),
        (8, "not UTF-8"),
    ):
        assert any(line.startswith(f"line {number}: ") and words in line for line in told), told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"q,a,q\n1,2,3\n", "header of .*: column 'q' comes twice"),
        (b"\xff,a\n1,2\n", "header of .*: it is not UTF-8"),
        (b'q,a\n1,2\n3,"never\nclosed\n', "line 3: the quoted cell that begins here is never"),
    ],
)
def test_csv_that_cannot_be_told_apart_is_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)

    with pytest.raises(BadData, match=words):
        values(path)


def test_a_truncated_gzip_says_up_to_where_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress("".join(f'{{"a": {n**9}}}\n' for n in range(99_999)).encode())
    path.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(BadData, match=r"after .*a.jsonl.gz line \d+: the gzip file is damaged"):
        values(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_is_none_or_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS["a.parquet" if name == "a.parquet" else "stream.arrow"](path, RECORDS)
    whole = path.read_bytes()
    for content in (b"", b"no table", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(BadData, match=f"cannot read .*{name}: the file is damaged"):
            values(path)


def test_damage_in_the_middle_of_a_parquet_file_is_told_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.table({"a": [f"{n:0100}" for n in range(4)]})
    pq.write_table(texts, path, row_group_size=2, compression="gzip", use_dictionary=False)
    content = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[at : at + 60] = b"\xff" * 60
    path.write_bytes(content)

    with pytest.raises(BadData, match="damaged"):
        values(path)


def test_a_text_in_a_table_that_is_not_utf_8_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    column = pa.array([b"x", b"\xff", b"y"], pa.binary()).view(pa.string())
    table = pa.table({"a": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)

    first, fault, last = values(path)
    assert (first, last) == ({"a": "x"}, {"a": "y"})
    assert isinstance(fault, BadRecord) and fault.reason == "not UTF-8"
    assert faults(path)[0].startswith("row 1: ")


def test_a_file_that_is_not_there_to_be_read_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for name, kind, words in (
        ("gone.jsonl", FileNotFoundError, "no such file"),
        ("", IsADirectoryError, "it is a folder"),
        ("a.txt", ValueError, "no format ends in '.txt'; give .parquet"),
    ):
        with pytest.raises(kind, match=words):
            RecordFile(tmp_path / name)


def test_a_gzip_file_that_ends_in_its_header_is_refused(tmp_path: Path) -> None:
    for size in (2, 10, 14):
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n')[:size])

        with pytest.raises(BadData, match=r"cannot read .*a\.jsonl\.gz: the gzip file is damaged"):
            list(RecordFile(tmp_path / "a.jsonl.gz").records())


def test_a_date_that_python_does_not_have_is_a_fault_of_its_row(tmp_path: Path) -> None:
    days = pa.array([0, 2**30, 1], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"n": [0, 1, 2], "day": days}), tmp_path / "a.parquet")

    first, second, third = (record.value for record in RecordFile(tmp_path / "a.parquet").records())

    assert isinstance(second, BadRecord) and second.reason == "Python cannot hold a value"
    assert not isinstance(first, BadRecord) and first["n"] == 0
    assert not isinstance(third, BadRecord) and third["n"] == 2


def test_damaged_offsets_in_an_arrow_file_are_told_and_do_not_end_the_process(
    tmp_path: Path,
) -> None:
    offsets = pa.py_buffer(struct.pack("<4i", 0, 1 << 30, 1 << 30, 3))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    for number, column in enumerate((texts, pa.StructArray.from_arrays([texts], ["text"]))):
        path = tmp_path / f"{number}.arrow"
        batch = pa.record_batch([column], ["a"])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

        with pytest.raises(BadData, match="damaged, or of another kind"):
            list(RecordFile(path).records())


def test_a_damaged_name_of_a_column_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"question", b"questi\xffn"))

    with pytest.raises(BadData, match=r"a\.parquet: the file is damaged"):
        list(RecordFile(tmp_path / "a.parquet").records())


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["question", "question"])
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)

    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(BadData, match=r"'question' comes twice"):
            list(RecordFile(tmp_path / name).records())


def test_few_rows_are_read_at_a_time_whatever_the_file_tells_of_their_size(
    tmp_path: Path,
) -> None:
    once = pa.array(["x" * (1 << 19)])  # a dictionary: the file has it once, each row has it
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), once)
    pq.write_table(pa.table({"text": same}), tmp_path / "a.parquet", store_schema=False)

    before = pa.total_allocated_bytes()
    records = RecordFile(tmp_path / "a.parquet").records()
    most = max(pa.total_allocated_bytes() for _ in zip(range(500), records, strict=True))

    assert most - before < 100 << 20


def test_a_pipe_is_told_from_a_file_that_is_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")

    with pytest.raises(FileNotFoundError, match="not a regular file"):
        RecordFile(tmp_path / "a.jsonl")


def test_utf_16_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}', encoding="utf-16")

    with pytest.raises(BadData, match="UTF-16; save it as UTF-8"):
        values(tmp_path / "a.jsonl")
