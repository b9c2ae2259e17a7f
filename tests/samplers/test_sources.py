"""Rows: one schema for all sources, stable names, and readers of the public schemas."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.prepare import READERS, prepare_source
from samplers.rows import SCHEMA, UnusableRecord, read_sources, row_id, write_rows
from samplers.sources import taco
from samplers.sources.demo import VALIDATION_ROWS, make_demo, write_demo
from samplers.sources.math import boxed_answer

RECORDS = {
    "taco": dict.fromkeys(taco.COLUMNS)
    | {
        "question": "Add one.",
        "input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "x"]}),
    },
    "nq": {"question": "who wrote it", "answer": ["Ann Lee", "A. Lee"]},
    "math": {
        "problem": "What is 1+1?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "So \\boxed{1} or $\\boxed{\\frac{4}{2}}$.",
    },
}
TRUTHS = {
    "taco": {"inputs": ["1\n", "2\n3"], "outputs": ["2\n", "x"]},
    "nq": {"target": ["Ann Lee", "A. Lee"]},
    "math": {"answer": "\\frac{4}{2}"},
}


@pytest.mark.parametrize("source", sorted(RECORDS))
def test_a_public_record_becomes_a_row_of_the_one_schema(source, tmp_path):
    row = READERS[source](RECORDS[source], split="train", index=3)
    write_rows(tmp_path / "rows.parquet", [row])
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.equals(SCHEMA)
    (read,) = table.to_pylist()
    assert read["data_source"] == source
    assert json.loads(read["reward_model"]["ground_truth"]) == TRUTHS[source]
    assert read["extra_info"]["row_id"] == row_id(source, RECORDS[source])
    assert read["extra_info"]["index"] == 3


@pytest.mark.parametrize(
    ("source", "change", "why"),
    [
        ("taco", {"input_output": ""}, "as many outputs"),
        ("taco", {"input_output": "{"}, "not JSON"),
        ("taco", {"question": " "}, "question is empty"),
        ("math", {"solution": "no box"}, "boxed"),
        ("math", {"problem": ""}, "problem is empty"),
    ],
)
def test_a_record_that_cannot_be_judged_is_refused_with_its_reason(source, change, why):
    with pytest.raises(UnusableRecord, match=why):
        READERS[source](RECORDS[source] | change, split="train", index=0)


@given(st.dictionaries(st.text(max_size=5), st.integers(), min_size=1, max_size=4))
def test_a_row_id_does_not_depend_on_the_order_of_keys(record):
    backwards = dict(reversed(list(record.items())))
    assert row_id("nq", record) == row_id("nq", backwards)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{7}", "7"),
        ("a \\boxed{1} b \\boxed{\\sqrt{2}}", "\\sqrt{2}"),
        ("\\boxed 9$ is", "9"),
        ("\\boxed{unclosed", None),
        ("none", None),
    ],
)
def test_the_answer_is_the_last_balanced_box(solution, answer):
    assert boxed_answer(solution) == answer


def test_unusable_records_are_counted_by_reason(tmp_path):
    raw = tmp_path / "raw.jsonl"
    records = [RECORDS["math"], RECORDS["math"] | {"solution": "none"}]
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = prepare_source(
        "math", raw, tmp_path / "out.parquet", split="train", progress=lambda line: None
    )
    assert (done.rows, sum(done.skipped.values())) == (1, 1)


def test_every_wrong_file_is_named_at_once(tmp_path):
    pq.write_table(pa.table({"data_source": pa.array([], pa.string())}), tmp_path / "thin.parquet")
    write_rows(tmp_path / "empty.parquet", [])
    (tmp_path / "text.parquet").write_text("no")
    names = ["gone.parquet", "thin.parquet", "empty.parquet", "text.parquet"]
    with pytest.raises(ValueError) as caught:
        read_sources([tmp_path / name for name in names])
    assert all(name in str(caught.value) for name in names)


@pytest.fixture(scope="module")
def demo():
    return make_demo(0)


def test_the_demo_shares_no_question_and_no_fact_between_its_halves(demo):
    for source, validation in demo.validation.items():
        assert len(validation) == VALIDATION_ROWS >= 60
        train = demo.train[source]
        rows = [
            {READERS[source](t.record, split="x", index=0).question for t in tasks}
            for tasks in (train, validation)
        ]
        assert not rows[0] & rows[1]
        assert not {t.fact for t in train} & {t.fact for t in validation}


def test_another_seed_is_another_demo_and_the_same_seed_the_same(demo):
    assert make_demo(0) == demo
    assert make_demo(1) != demo


def test_the_demos_files_concatenate(demo, tmp_path):
    write_demo(demo, tmp_path)
    files = sorted(tmp_path.glob("*.parquet"))
    whole = pa.concat_tables([pq.read_table(file) for file in files])
    assert whole.num_rows == sum(sum(file.rows_by_source.values()) for file in read_sources(files))
    assert {file.name.split("_")[0] for file in files} == {"taco", "nq", "math"}


def test_copies_of_a_record_become_one_row(tmp_path: Path):
    record = {"problem": "1+1?", "solution": r"\boxed{2}", "level": "1", "type": "Algebra"}
    other = record | {"problem": "1+2?", "solution": r"\boxed{3}"}
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(each) + "\n" for each in (record, other, record)))
    told: list[str] = []
    out = prepare_source(
        "math", raw, tmp_path / "math.parquet", split="train", progress=told.append
    )
    assert (out.rows, out.skipped) == (2, {"it is a copy of an earlier record": 1})
