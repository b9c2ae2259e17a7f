"""Records of a validation, and their file across kills."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.evaluation_records import (
    RecordsFile,
    in_order,
    line_of,
    read_record,
    read_records,
    write_records,
)
from tests.fakes.records import of_policy, record


def test_a_record_is_the_same_after_it_was_written(tmp_path: Path):
    records = [record(row="é", lost=True), record(source="math", sample=1)]
    write_records(tmp_path / "0.jsonl", records)
    assert read_records(tmp_path / "0.jsonl")[0] == in_order(records)


def test_keys_of_a_newer_release_are_left_out():
    assert read_record(json.dumps({**line_of(record()), "newer": 1}).encode()) == record()


@given(data=st.data())
def test_an_evaluation_killed_at_any_byte_goes_on_to_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    folder = tmp_path_factory.mktemp("killed")
    records = of_policy([0.2, 0.8, 0.5], 2, 0)
    whole, killed = folder / "whole.jsonl", folder / "records.jsonl"
    write_records(whole, records)
    done = data.draw(st.permutations(records))[: data.draw(st.integers(0, len(records)))]
    first = RecordsFile(killed)
    first.rewrite()
    first.append(done)
    cut = data.draw(st.integers(0, len(killed.read_bytes())))
    killed.write_bytes(killed.read_bytes()[:cut])

    second = RecordsFile(killed)
    second.rewrite()
    assert set(second.records) <= {each.key for each in done}
    second.append([each for each in records if each.key not in second.records])
    assert {each.key for each in read_records(killed)[0]} == {each.key for each in records}
    second.rewrite()

    assert killed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ('{"step": 1}', "missing required field"),
        (json.dumps(line_of(record()) | {"reward": "high"}), r"Expected `float`, got `str`"),
        (json.dumps(line_of(record()))[:90], "Invalid control character"),
    ],
)
def test_a_damaged_line_is_named_and_the_rest_is_read(
    damaged: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "2.jsonl"
    line = json.dumps(line_of(record()))
    path.write_text(f"{line}\n{damaged}\n{line}\n")
    assert read_records(path)[0] == [record()] * 2
    (said,) = caplog.messages
    assert said.startswith(f"{path} line 2 is left out: ") and re.search(why, said)


def test_a_file_that_is_absent_has_no_records(tmp_path: Path):
    assert read_records(tmp_path / "none.jsonl")[0] == []
