"""The files of all kinds together: one schema, whatever the records, that verl's own dataset reads.
And the generated demo."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from samplers.rows.sources import KINDS, json_qa, taco
from samplers.rows.sources.demo import (
    DEMO_SOURCES,
    VALIDATION_ROWS,
    DemoData,
    make_demo,
    write_demo,
)
from tests.fakes.real_tokenizers import real_tokenizer

RECORDS: dict[str, dict[str, Any]] = {
    "taco": dict.fromkeys(taco.COLUMNS)
    | {"question": "Add one.", "input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'},
    "nq": {"question": "who wrote it", "answer": ["Ann Lee", "A. Lee"]},
    "math": {
        "problem": "What is 1+1?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "So \\boxed{1} or $\\boxed{\\frac{4}{2}}$.",
    },
    "json": {"question": "how many?", "answer": 72, "task_id": 7, "board": [[1, None]]},
}
TRUTHS: dict[str, dict[str, Any]] = {
    "taco": {"inputs": ["1\n"], "outputs": ["2\n"]},
    "nq": {"target": ["Ann Lee", "A. Lee"]},
    "math": {"answer": "\\frac{4}{2}"},
    "json": {"answer": "72", "target": ["72"]},
}


def rows_of(kind: str, records: Sequence[dict[str, Any]]) -> list[Row]:
    to_row = KINDS[kind].to_row
    return [to_row(record, split="train", index=i) for i, record in enumerate(records)]


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_a_public_record_becomes_a_row_of_the_one_schema(kind: str, tmp_path: Path) -> None:
    to_row = KINDS[kind].to_row
    write_rows(tmp_path / "rows.parquet", [to_row(RECORDS[kind], split="train", index=3)])

    table = pq.read_table(tmp_path / "rows.parquet")

    assert table.schema.equals(SCHEMA)
    (read,) = table.to_pylist()
    assert read["data_source"] == kind
    assert read["agent_name"] == KINDS[kind].agent
    assert json.loads(read["reward_model"]["ground_truth"]) == TRUTHS[kind]
    assert read["extra_info"]["row_id"] == row_id(kind, RECORDS[kind])
    assert read["extra_info"]["index"] == 3


TEXT = st.text(min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "assistant"]), "content": TEXT}),
    max_size=2,
)


@st.composite
def valid_records(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    if kind == "taco":
        count = draw(st.integers(1, 3))
        tests: dict[str, Any] = {"inputs": [draw(TEXT) for _ in range(count)]}
        tests["outputs"] = [draw(TEXT) for _ in range(count)]
        if draw(st.booleans()):
            tests = {"inputs": [[draw(JSON_VALUES)]], "outputs": [draw(JSON_VALUES)]}
            tests["fn_name"] = "solve"
        extra = {"tags": draw(st.none() | TEXT), "time_limit": draw(st.none() | TEXT)}
        return RECORDS["taco"] | extra | {"question": draw(TEXT), "input_output": json.dumps(tests)}
    if kind == "nq":
        return {"question": draw(TEXT), "golden_answers": draw(st.lists(TEXT, min_size=1))}
    if kind == "math":
        return {"problem": draw(TEXT), "solution": "\\boxed{" + draw(st.sampled_from("123")) + "}"}
    user = {"role": "user", "content": draw(TEXT)}
    more = draw(st.dictionaries(st.sampled_from(["id", "board", "task"]), JSON_VALUES))
    return more | {"messages": [*draw(MESSAGES), user], "answer": draw(TEXT | st.integers())}


@given(st.data())
def test_every_file_concatenates_with_every_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files: list[Path] = []
    wanted: list[Row] = []
    for kind in data.draw(st.lists(st.sampled_from(sorted(RECORDS)), min_size=1, max_size=5)):
        rows = rows_of(kind, data.draw(st.lists(valid_records(kind), max_size=3)))
        files.append(folder / f"{len(files)}.parquet")
        write_rows(files[-1], rows)
        wanted += rows

    whole = pa.concat_tables([pq.read_table(file) for file in files])

    assert whole.schema.equals(SCHEMA)
    for read, row in zip(whole.to_pylist(), wanted, strict=True):
        assert json.loads(read["reward_model"]["ground_truth"]) == row.ground_truth
        assert json.loads(read["extra_info"]["extras"]) == row.extras
        assert read["prompt"][-1] == {"role": "user", "content": row.question}
        assert read["extra_info"]["row_id"] == row.row_id
    assert whole.equals(columns_of(wanted))


@pytest.fixture(scope="module")
def demo() -> DemoData:
    return make_demo(0)


def test_verls_own_dataset_reads_the_files_of_all_kinds(demo: DemoData, tmp_path: Path) -> None:
    dataset = pytest.importorskip("verl.utils.dataset.rl_dataset")
    from omegaconf import OmegaConf

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>?"}]
    records = RECORDS | {"json": RECORDS["json"] | {"messages": messages}}
    files: list[str] = []
    for kind, record in records.items():
        files.append(str(tmp_path / f"{kind}.parquet"))
        write_rows(files[-1], rows_of(kind, [record]))
    write_demo(demo, tmp_path / "demo")
    files += [str(tmp_path / "demo" / f"{source}_val.parquet") for source in DEMO_SOURCES]
    tokenizer = real_tokenizer("pieces")
    config = OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 10_000})

    read = dataset.RLHFDataset(data_files=files, tokenizer=tokenizer, config=config)

    assert len(read) == len(records) + VALIDATION_ROWS * len(DEMO_SOURCES)
    prompts = {read[i]["data_source"]: read[i]["raw_prompt"] for i in range(len(records))}
    assert prompts["math"] == [{"role": "user", "content": "What is 1+1?"}]
    rendered = tokenizer.apply_chat_template(
        prompts["json"], add_generation_prompt=True, tokenize=False
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert json.loads(read[0]["reward_model"]["ground_truth"]) == TRUTHS["taco"]
    assert {read[i]["agent_name"] for i in range(4)} == {KINDS[kind].agent for kind in RECORDS}


def test_the_demo_shares_no_question_and_no_fact_between_its_halves(demo: DemoData) -> None:
    for source, validation in demo.validation.items():
        assert len(validation) == VALIDATION_ROWS >= 60
        train = demo.train[source]
        questions = [
            {row.question for row in rows_of(source, [task.record for task in tasks])}
            for tasks in (train, validation)
        ]
        assert not questions[0] & questions[1]
        assert not {task.fact for task in train} & {task.fact for task in validation}


def test_another_seed_is_another_demo_and_the_same_seed_the_same(demo: DemoData) -> None:
    assert make_demo(0) == demo
    assert make_demo(1) != demo


def test_the_demos_files_concatenate_and_name_every_row_once(
    demo: DemoData, tmp_path: Path
) -> None:
    write_demo(demo, tmp_path)
    files = sorted(tmp_path.glob("*.parquet"))

    whole = pa.concat_tables([pq.read_table(file) for file in files])

    assert whole.num_rows == sum(sum(file.rows_by_source.values()) for file in read_sources(files))
    assert tuple(sorted({file.name.split("_")[0] for file in files})) == DEMO_SOURCES
    assert row_id_problems(files) == []


@pytest.mark.parametrize(
    ("record", "truth", "extras"),
    [
        (
            {"answer": "48/2 = <<48/2=24>>24\n#### 1,072"},
            {"answer": "1,072", "target": ["1,072"]},
            {"answer": "48/2 = <<48/2=24>>24\n#### 1,072"},
        ),
        (
            {"answer": "It is 72. #### 72"},
            {"answer": "72", "target": ["72"]},
            {"answer": "It is 72. #### 72"},
        ),
        ({"answer": "a ##### b"}, {"answer": "a ##### b", "target": ["a ##### b"]}, {}),
        (
            {"inputs": ["1\n"], "outputs": ["2\n"]},
            {"inputs": ["1\n"], "outputs": ["2\n"]},
            {"inputs": ["1\n"], "outputs": ["2\n"]},
        ),
        (
            {"input_output": '{"inputs": [[1]], "outputs": [2], "fn_name": "f"}', "answer": "x"},
            {"inputs": [[1]], "outputs": [2], "fn_name": "f", "answer": "x", "target": ["x"]},
            {"input_output": '{"inputs": [[1]], "outputs": [2], "fn_name": "f"}'},
        ),
    ],
)
def test_json_reads_worked_solutions_and_hidden_tests(
    record: dict[str, Any], truth: dict[str, Any], extras: dict[str, Any]
):
    row = json_qa.to_row({"question": "q", **record}, split="train", index=0)

    assert row.ground_truth == truth
    assert row.extras == extras
