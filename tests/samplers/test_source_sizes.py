"""Rows of each source in files of the formats that verl reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samplers.source_sizes import source_sizes

ROWS: list[dict[str, Any]] = [
    {"data_source": "code", "prompt": [{"role": "user", "content": "x\u2028y"}]},
    {"data_source": "openai/gsm8k", "prompt": []},
    {"data_source": "code", "prompt": []},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return str(path)


def test_rows_are_counted_over_files_of_all_formats(tmp_path: Path) -> None:
    files = [write(tmp_path / f"rows.{kind}", ROWS) for kind in ("parquet", "json", "jsonl")]
    assert source_sizes(files) == {"code": 6, "openai/gsm8k": 3}


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
@pytest.mark.parametrize("bad", [{"data_source": None}, {"prompt": "x"}])
def test_a_row_without_a_source_is_refused(tmp_path: Path, kind: str, bad: dict[str, Any]) -> None:
    file = write(tmp_path / f"rows.{kind}", [bad, bad])
    with pytest.raises(ValueError, match=f"cannot count the sources in {file}: .*data_source"):
        source_sizes([file])


@pytest.mark.parametrize(
    ("name", "text"),
    [("rows.csv", "a,b"), ("rows.parquet", "a"), ("rows.jsonl", "{"), ("a.json", "3")],
)
def test_a_file_that_verl_cannot_read_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"cannot count the sources in .*{name}: "):
        source_sizes([str(tmp_path / name)])
