"""Preparing: what is kept, counted and drawn, and that a cut or failed preparation does no harm."""

import json
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import samplers.rows.prepare
import samplers.rows.row_files
from samplers.kind import BadRecord, Kind, Option, UnusableRecord
from samplers.rows.draft import open_draft
from samplers.rows.draws import SeenIds
from samplers.rows.prepare import Choice, Prepared, Tokenizer, prepare
from samplers.rows.records import BadData
from samplers.rows.schema import SCHEMA, Row, read_sources, row_id, row_id_problems

interrupt_at: list[int] = []
"""Numbers of calls of `to_row` at which the user interrupts, smallest last."""

calls = Counter[str]()


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = "toy",
    agent: str = "toy_agent",
    suffix: str = "",
) -> Row:
    calls["to_row"] += 1
    if interrupt_at and calls["to_row"] == interrupt_at[-1]:
        interrupt_at.pop()
        raise KeyboardInterrupt
    if "question" not in record:
        raise BadRecord(f"column question is missing: {dict(record)}", reason="no question")
    if not record["question"]:
        raise UnusableRecord("question is empty")
    return Row(
        data_source=source,
        agent_name=agent,
        question=str(record["question"] + suffix),
        ability="test",
        ground_truth={"target": [record.get("answer")]},
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras={"all": dict(record)},
    )


TOY = Kind(
    name="toy",
    agent="toy_agent",
    to_row=to_row,
    help="questions",
    options=(Option(name="suffix", type=str, default="", help="after each question"),),
)


def toys(numbers: Sequence[int]) -> list[dict[str, Any]]:
    return [{"question": f"question {number}", "answer": number} for number in numbers]


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def questions(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()]


@contextmanager
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers.rows.prepare, "PART_RECORDS", 4)
        patch.setattr(samplers.rows.prepare, "_BATCH_RECORDS", 2)
        patch.setattr(samplers.rows.row_files, "GROUP_ROWS", 5)
        yield


def test_usable_records_become_rows_in_their_order_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    raw = write(tmp_path / "a.jsonl", [*toys([1, 2, 1]), {"question": ""}])
    more = write(tmp_path / "b.jsonl", [{"question": ""}, *toys([2, 3])])

    done = prepare(TOY, [raw, more], tmp_path / "out.parquet")

    assert done == Prepared(
        files={str(tmp_path / "out.parquet"): 3},
        read=7,
        dropped={"it is a copy of an earlier record": 2, "question is empty": 2},
        unit="characters",
        lengths={"p50": 10, "p90": 10, "p99": 10, "max": 10},
    )
    rows = pq.read_table(tmp_path / "out.parquet")
    assert rows.schema.equals(SCHEMA)
    assert [row["extra_info"]["index"] for row in rows.to_pylist()] == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out.parquet"]


def test_files_with_other_metadata_concatenate(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in ("a", "b")]
    for number, path in enumerate(paths):
        prepare(TOY, [write(tmp_path / f"{number}.jsonl", toys([number]))], path, source=path.stem)
    tables = [pq.read_table(path) for path in paths]
    assert pq.read_metadata(paths[0]).metadata != pq.read_metadata(paths[1]).metadata

    assert pa.concat_tables(tables).column("data_source").to_pylist() == ["a", "b"]
    read = [datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path)) for path in paths]
    assert datasets.concatenate_datasets(read)["data_source"][:] == ["a", "b"]  # type: ignore[arg-type]
    assert [file.rows_by_source for file in read_sources(paths)] == [{"a": 1}, {"b": 1}]
    assert row_id_problems(paths) == []


def test_a_kinds_options_and_the_names_of_source_and_agent_reach_the_rows(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))

    out = tmp_path / "out.parquet"
    prepare(TOY, [raw], out, options={"suffix": "?"}, source="mine", agent="my_agent")

    (row,) = pq.read_table(out).to_pylist()
    assert (row["data_source"], row["agent_name"]) == ("mine", "my_agent")
    assert row["prompt"][0]["content"] == "question 1?"
    assert row["extra_info"]["row_id"].startswith("mine:")


@pytest.mark.parametrize(
    ("bad", "words", "reason"),
    [
        ('{"answer": 1}', r"a\.jsonl line 2: column question is missing", "no question"),
        ("{", r"a\.jsonl line 2: not JSON", "not JSON"),
        ('{"question": "x", "answer": NaN}', r"a\.jsonl line 2: .*not JSON", None),
        ('{"question": "\\ud800"}', r"a\.jsonl line 2: .*surrogate", "half of a surrogate pair"),
    ],
)
def test_a_bad_record_ends_it_and_leaves_nothing_or_is_skipped_and_counted(
    tmp_path: Path, bad: str, words: str, reason: str | None
) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1, 2]))
    first, second = raw.read_text().splitlines()
    raw.write_text(f"{first}\n{bad}\n{second}\n")
    out = tmp_path / "out.parquet"

    with pytest.raises(BadData, match=words) as told:
        prepare(TOY, [raw], out)
    assert "--skip-bad" in str(told.value)
    assert os.listdir(tmp_path) == ["a.jsonl"]

    done = prepare(TOY, [raw], out, skip_bad=True)
    assert questions(out) == ["question 1", "question 2"]
    ((counted, times),) = done.dropped.items()
    assert times == 1
    assert reason is None or counted == f"bad record: {reason}"


def test_a_file_damaged_in_the_middle_leaves_nothing_even_when_bad_records_are_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(toys(range(9)))[:-20])

    with pytest.raises(BadData, match=r"a\.json line 1"):
        prepare(TOY, [tmp_path / "a.json"], tmp_path / "out.parquet", skip_bad=True)

    assert os.listdir(tmp_path) == ["a.json"]


def test_no_usable_record_is_an_error_that_counts_the_reasons(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [{"question": ""}, {"question": ""}, {}])

    with pytest.raises(BadData, match=r"no usable record \(2 x question is empty; 1 x bad"):
        prepare(TOY, [raw], tmp_path / "out.parquet", skip_bad=True)
    with pytest.raises(BadData, match=r"no usable record \(there is none at all\)"):
        prepare(TOY, [write(raw, [])], tmp_path / "out.parquet")

    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_fault_in_a_kinds_own_code_is_told_with_its_record(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [*toys([1]), {"question": 5}])

    with pytest.raises(BadData, match=r"a\.jsonl line 2: kind='toy' failed with TypeError"):
        prepare(TOY, [raw], tmp_path / "out.parquet")

    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"question": 5}, "int"),
        ({"messages": [{"role": "user"}]}, "content"),
        (None, "gave None, which is no Row"),
    ],
)
def test_what_a_kinds_own_code_gives_that_is_no_row_is_told_with_its_record(
    tmp_path: Path, changes: dict[str, Any] | None, why: str
) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1, 2]))

    def wrong(record: Mapping[str, Any], **words: Any) -> Any:
        row = to_row(record, **words)
        if record["answer"] == 1:
            return row
        return None if changes is None else replace(row, **changes)

    with pytest.raises(BadData, match=rf"a\.jsonl line 2: kind='toy' failed with .*{why}"):
        prepare(replace(TOY, to_row=wrong), [raw], tmp_path / "out.parquet")

    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_reader_may_be_any_callable_and_what_is_bound_to_it_counts(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))
    out = tmp_path / "out.parquet"

    class Loud:
        def __call__(self, record: Mapping[str, Any], **words: Any) -> Row:
            return to_row(record, **words)

    def run(reader: Any) -> Prepared:
        return prepare(replace(TOY, to_row=reader, options=()), [raw], out)

    assert not run(partial(to_row, suffix="?")).was_there
    assert run(partial(to_row, suffix="?")).was_there
    assert not run(partial(to_row, suffix="!")).was_there
    assert questions(out) == ["question 1!"]
    assert not run(Loud()).was_there
    assert questions(out) == ["question 1"]


def test_rows_are_of_the_kinds_source_and_agent_whatever_its_reader_is_written_for(
    tmp_path: Path,
) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))

    prepare(replace(TOY, name="mine", agent="my_agent"), [raw], tmp_path / "out.parquet")

    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["data_source"], row["agent_name"]) == ("mine", "my_agent")
    assert row["extra_info"]["row_id"].startswith("mine:")


def test_nothing_is_judged_beyond_the_limit(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [*toys([1, 1, 2, 3]), "bad"])
    out = tmp_path / "out.parquet"

    done = prepare(TOY, [raw], out, choice=Choice(limit=3))

    assert (questions(out), done.read) == ([f"question {n}" for n in (1, 2, 3)], 4)
    with pytest.raises(BadData, match="line 5"):
        prepare(TOY, [raw], out, choice=Choice(limit=4))


def test_long_prompts_are_left_out_and_lengths_are_those_of_written_rows(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [{"question": "word " * n} for n in range(1, 101)])
    words = Tokenizer(name="words", lengths=lambda texts: [len(text.split()) for text in texts])

    choice = Choice(max_prompt_tokens=50)
    done = prepare(TOY, [raw], tmp_path / "out.parquet", choice=choice, tokenizer=words)

    assert done.dropped == {"its prompt is longer than max_prompt_tokens=50": 50}
    assert (done.unit, done.lengths) == ("tokens", {"p50": 25, "p90": 45, "p99": 50, "max": 50})


# --- draws ---------------------------------------------------------------------------------------


def drawn(
    folder: Path, records: Sequence[object], choice: Choice
) -> tuple[dict[str, int], frozenset[str], frozenset[str]]:
    """What was dropped, and the questions in the two files."""
    out, validation = folder / "train.parquet", folder / "validation.parquet"
    for path in (out, validation):
        path.unlink(missing_ok=True)
    second = validation if choice.validation is not None else None
    raw = write(folder / "raw.jsonl", records)
    done = prepare(TOY, [raw], out, choice=choice, validation_output=second)
    if second:
        splits = [
            {row["extra_info"]["split"] for row in pq.read_table(path).to_pylist()}
            for path in (out, second)
        ]
        assert splits == [{"train"}, {"validation"}]
    return (
        done.dropped,
        frozenset(questions(out)),
        frozenset(questions(validation) if second else []),
    )


@given(
    numbers=st.permutations(range(40)),
    sample=st.none() | st.integers(20, 50),
    validation=st.none() | st.sampled_from([0.5, 0.4]) | st.integers(1, 15),
    seed=st.integers(0, 3),
)
def test_what_is_drawn_does_not_depend_on_the_order_of_the_records(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    sample: int | None,
    validation: float | int | None,
    seed: int,
) -> None:
    choice = Choice(sample=sample, validation=validation, seed=seed)
    folder = tmp_path_factory.mktemp("drawn")

    dropped, train, held = drawn(folder, toys(range(40)), choice)
    with small_parts():
        assert drawn(folder, toys(numbers), choice) == (dropped, train, held)

    assert not train & held
    assert len(train) + len(held) == min(sample or 40, 40)
    assert validation is None or isinstance(validation, float) or len(held) == validation


def test_with_a_share_a_rows_side_does_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    choice = Choice(validation=0.3)
    _, train, held = drawn(tmp_path, toys(range(400)), choice)
    _, some_train, some_held = drawn(tmp_path, toys(range(100, 250)), choice)

    assert some_train < train and some_held < held
    assert 80 < len(held) < 160  # 120 expected, 9 standard deviation


def test_another_seed_draws_other_rows(tmp_path: Path) -> None:
    draws = [
        drawn(tmp_path, toys(range(60)), Choice(sample=20, validation=5, seed=seed))
        for seed in (0, 1)
    ]

    assert draws[0][1] != draws[1][1] and draws[0][2] != draws[1][2]


def test_a_draw_that_leaves_a_file_empty_is_refused(tmp_path: Path) -> None:
    for validation in (3, 0.0001):
        with pytest.raises(BadData, match="none of 3 rows falls to it"):
            drawn(tmp_path, toys(range(3)), Choice(validation=validation))
    assert os.listdir(tmp_path) == ["raw.jsonl"]


@given(
    batches=st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=12), cut=st.integers(0, 9)
)
def test_seen_ids_are_a_set_that_survives_saving(batches: list[list[int]], cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplers.rows.draws._LEAST_MERGED", 5)
        seen, known = SeenIds(np.empty(0, np.uint64)), set[int]()
        saved: list[Any] = []
        for number, batch in enumerate(batches):
            expected: list[bool] = []
            for digest in batch:
                expected.append(digest not in known)
                known.add(digest)
            assert seen.add(np.array(batch, np.uint64)) == expected
            if number == cut:
                saved.append(seen.take_new())
                seen = SeenIds(np.concatenate(saved))


@given(
    numbers=st.lists(st.integers(-2, 12), min_size=1, max_size=40),
    limit=st.none() | st.integers(1, 12),
    sample=st.none() | st.integers(1, 12),
    shortest=st.booleans(),
)
def test_every_record_that_was_read_was_kept_or_dropped_for_a_reason(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    limit: int | None,
    sample: int | None,
    shortest: bool,
) -> None:
    folder = tmp_path_factory.mktemp("law")
    special: dict[int, object] = {-1: {"question": ""}, -2: "bad"}
    records = [special.get(number, {"question": "?" * number}) for number in numbers]
    raw = write(folder / "a.jsonl", [{"question": "first"}, *records])
    choice = Choice(limit=limit, sample=sample, max_prompt_tokens=6 if shortest else None)
    tokenizer = Tokenizer(name="letters", lengths=lambda texts: [len(text) for text in texts])

    with small_parts():
        done = prepare(
            TOY,
            [raw],
            folder / "out.parquet",
            choice=choice,
            tokenizer=tokenizer,
            skip_bad=True,
        )

    kept = len(questions(folder / "out.parquet"))
    assert list(done.files.values()) == [kept]
    assert done.read == kept + sum(done.dropped.values())
    assert done.read == len(numbers) + 1 or limit is not None
    assert 0 not in done.dropped.values()


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    cuts=st.lists(st.integers(1, 60), max_size=4),
    choice=st.sampled_from(
        [Choice(), Choice(limit=17), Choice(sample=9), Choice(validation=0.4), Choice(validation=6)]
    ),
)
def test_however_often_it_is_interrupted_the_files_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], choice: Choice
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    numbers = [*range(15), *range(5), *range(15, 28)]
    inputs = [
        write(folder / "a.jsonl", [*toys(numbers), {}, {"question": ""}]),
        write(folder / "b.jsonl", toys(range(20, 35))),
    ]

    def run(name: str) -> list[bytes]:
        out, second = folder / f"{name}.parquet", folder / f"{name}_validation.parquet"
        validation = second if choice.validation is not None else None
        while True:
            try:
                prepare(
                    TOY, inputs, out, choice=choice, validation_output=validation, skip_bad=True
                )
            except KeyboardInterrupt:
                continue
            return [path.read_bytes() for path in (out, second) if path.exists()]

    with small_parts():
        whole = run("whole")
        calls.clear()
        interrupt_at[:] = sorted(cuts, reverse=True)
        try:
            assert run("cut") == whole
        finally:
            interrupt_at.clear()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_preparation_goes_on_where_it_was(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(20)))
    with small_parts():
        calls.clear()
        interrupt_at[:] = [15]
        with pytest.raises(KeyboardInterrupt):
            prepare(TOY, [raw], tmp_path / "out.parquet")
        assert not (tmp_path / "out.parquet").exists()
        calls.clear()

        done = prepare(TOY, [raw], tmp_path / "out.parquet")

    assert (calls["to_row"], done.read) == (8, 20)  # three parts of four were saved


def test_ids_that_a_killed_process_wrote_without_their_state_do_not_count(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([*range(12), *range(12)]))
    out = tmp_path / "out.parquet"
    with small_parts():
        calls.clear()
        interrupt_at[:] = [16, 7]
        with pytest.raises(KeyboardInterrupt):
            prepare(TOY, [raw], out)
        with (tmp_path / ".out.parquet.draft" / "seen.u64").open("ab") as file:
            file.write(b"12345678")
        with pytest.raises(KeyboardInterrupt):
            prepare(TOY, [raw], out)

        done = prepare(TOY, [raw], out)

    assert done.dropped == {"it is a copy of an earlier record": 12}
    assert questions(out) == [f"question {n}" for n in range(12)]


def test_an_interrupt_while_the_files_are_renamed_costs_no_second_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(20)))

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(samplers.rows.prepare, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(TOY, [raw], tmp_path / "out.parquet")
    assert sorted(os.listdir(tmp_path)) == [".out.parquet.draft", "a.jsonl"]
    calls.clear()

    prepare(TOY, [raw], tmp_path / "out.parquet")

    assert calls["to_row"] == 0
    assert len(questions(tmp_path / "out.parquet")) == 20


@pytest.mark.parametrize("what", ["option", "input", "part", "state", "null"])
def test_a_draft_of_something_else_or_a_damaged_one_is_begun_anew(
    tmp_path: Path, what: str
) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(20)))
    out, draft = tmp_path / "out.parquet", tmp_path / ".out.parquet.draft"
    calls.clear()
    interrupt_at[:] = [15]
    with small_parts(), pytest.raises(KeyboardInterrupt):
        prepare(TOY, [raw], out)
    options: dict[str, str] = {}
    if what == "option":
        options = {"suffix": "!"}
    elif what == "input":
        os.utime(raw, ns=(1, 1))
    elif what == "part":
        part = draft / "part-000001.arrow"
        part.write_bytes(part.read_bytes()[:-30])
    else:
        (draft / "state.json").write_text("{" if what == "state" else what)
    calls.clear()

    with small_parts():
        prepare(TOY, [raw], out, options=options)

    assert calls["to_row"] == 20
    assert questions(out) == [f"question {n}{options.get('suffix', '')}" for n in range(20)]
    assert not draft.exists()


def test_what_is_there_already_is_not_done_again(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [*toys(range(20)), *toys([0])])
    out, second = tmp_path / "out.parquet", tmp_path / "second.parquet"

    def run(seed: int = 0) -> Prepared:
        choice = Choice(validation=4, seed=seed)
        return prepare(TOY, [raw], out, choice=choice, validation_output=second)

    first = run()
    inode = out.stat().st_ino
    again = run()
    assert again.was_there and not first.was_there
    assert (again.files, again.dropped, again.lengths) == (
        first.files,
        first.dropped,
        first.lengths,
    )
    assert out.stat().st_ino == inode

    assert not run(seed=1).was_there
    second.unlink()
    assert not run(seed=1).was_there


def test_metadata_that_are_not_ours_say_nothing(tmp_path: Path) -> None:
    raw, out = write(tmp_path / "a.jsonl", toys([1])), tmp_path / "out.parquet"
    table = pa.table({"a": [1]})

    for words in (b"{}", b"[]", b"5", b"not JSON", b'{"fingerprint": 1}'):
        with pq.ParquetWriter(out, table.schema) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({b"verl_mixed.prepare": words})
        assert not prepare(TOY, [raw], out).was_there
        assert len(questions(out)) == 1


def test_a_draft_whose_process_was_killed_after_its_last_rename_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, out = write(tmp_path / "a.jsonl", toys([1])), tmp_path / "out.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(samplers.rows.prepare, "_remove", lambda _: None)  # pyright: ignore
        prepare(TOY, [raw], out)
    assert ".out.parquet.draft" in os.listdir(tmp_path)

    assert prepare(TOY, [raw], out).was_there

    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out.parquet"]


def test_two_that_share_a_second_file_do_not_mix(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(9)))
    held = tmp_path / "held.parquet"

    with open_draft(held, "one"):
        with pytest.raises(BlockingIOError, match=r"held\.parquet: another process prepares"):
            prepare(
                TOY,
                [raw],
                tmp_path / "out.parquet",
                choice=Choice(validation=3),
                validation_output=held,
            )
        assert sorted(os.listdir(tmp_path)) == [".held.parquet.draft", "a.jsonl"]

    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))
    out = tmp_path / "out.parquet"

    with open_draft(out, "one"), pytest.raises(BlockingIOError, match="another process prepares"):
        prepare(TOY, [raw], out)

    assert prepare(TOY, [raw], out).read == 1


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(3)))

    with pytest.raises(BadData, match=r"a\.jsonl changed while it was read"):
        prepare(TOY, [raw], tmp_path / "out.parquet", progress=lambda _: os.utime(raw, ns=(1, 1)))

    assert os.listdir(tmp_path) == ["a.jsonl"]


# --- outputs -------------------------------------------------------------------------------------


def test_a_bad_place_for_the_second_file_is_told_before_anything_is_read(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(9)))
    calls.clear()

    with pytest.raises(OSError, match=r"cannot write .*held\.parquet"):
        prepare(
            TOY,
            [raw],
            tmp_path / "out.parquet",
            choice=Choice(validation=3),
            validation_output=raw / "held.parquet",
        )

    assert calls["to_row"] == 0
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_pipe_is_no_place_for_rows(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))
    os.mkfifo(tmp_path / "out.parquet")

    with pytest.raises(ValueError, match="what is there is no parquet file"):
        prepare(TOY, [raw], tmp_path / "out.parquet")


def test_rows_go_where_a_link_leads(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out.parquet"
    link.symlink_to("disk/real.parquet")

    for _ in range(2):
        prepare(TOY, [raw], link, choice=Choice(seed=1))

    assert link.is_symlink()
    assert len(questions(tmp_path / "disk" / "real.parquet")) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"output": "folder.parquet"}, "it is a folder"),
        ({"output": "rows.json"}, r"ends in \.parquet"),
        ({"output": "text.parquet"}, "no parquet file"),
        ({"output": "in.parquet"}, "it is an input as well"),
        ({"choice": Choice(validation=1)}, "go together"),
        ({"validation_output": "v.parquet"}, "go together"),
        (
            {"choice": Choice(validation=1), "validation_output": "out.parquet"},
            "a file of their own",
        ),
        (
            {
                "choice": Choice(validation=1),
                "validation_output": "v.parquet",
                "split": "validation",
            },
            "validation rows already",
        ),
        ({"choice": Choice(max_prompt_tokens=1)}, "needs a tokenizer"),
        ({"options": {"prefix": 1}}, "no option 'prefix' in kind='toy': known are suffix"),
        ({"inputs": []}, "no input"),
    ],
)
def test_contradictions_are_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.parquet").mkdir()
    Path("text.parquet").write_text("mine")
    pq.write_table(pa.table({"question": ["x"]}), "in.parquet")
    calls.clear()

    with pytest.raises(ValueError, match=why) as told:
        prepare(TOY, **{"inputs": ["in.parquet"], "output": "out.parquet"} | words)

    assert not isinstance(told.value, BadData)
    assert calls["to_row"] == 0
    assert sorted(os.listdir()) == ["folder.parquet", "in.parquet", "text.parquet"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"sample": -1},
        {"max_prompt_tokens": 0},
        {"validation": 1.5},
        {"validation": 0},
    ],
)
def test_a_choice_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot prepare with"):
        Choice(**wrong)


def test_folders_of_the_outputs_are_made(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(9)))
    out, second = tmp_path / "new" / "train" / "x.parquet", tmp_path / "new" / "val" / "x.parquet"

    prepare(TOY, [raw], out, choice=Choice(validation=2), validation_output=second)

    assert (len(questions(out)), len(questions(second))) == (7, 2)


def test_a_validation_output_below_a_file_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(9)))
    out, second = tmp_path / "out.parquet", raw / "x.parquet"

    with pytest.raises(OSError, match=r"cannot write .*a.jsonl/x.parquet: .*choose another"):
        prepare(TOY, [raw], out, choice=Choice(validation=2), validation_output=second)

    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_an_output_below_a_file_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", toys([1]))

    with pytest.raises(OSError, match=r"cannot write .*a.jsonl/out.parquet: .*choose another"):
        prepare(TOY, [raw], raw / "out.parquet")

    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("most_bytes", [100, 20_000, 60_000])
def test_a_disk_that_takes_no_more_is_told_and_nothing_is_left(
    tmp_path: Path, most_bytes: int
) -> None:
    noise = random.Random(0)
    raw = write(
        tmp_path / "a.jsonl", [{"question": noise.randbytes(200).hex()} for _ in range(400)]
    )
    out = tmp_path / "out.parquet"
    prepare(TOY, [raw], out, choice=Choice(limit=1))
    before = out.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*out.parquet: File too large; make room"):
            prepare(TOY, [raw], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out.parquet"]


def test_a_second_rename_that_fails_says_that_the_first_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "a.jsonl", toys(range(9)))
    out, second = tmp_path / "out.parquet", tmp_path / "second.parquet"
    rename = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target == out:
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"out.parquet in its place \(but .*second.parquet is new\)"):
        prepare(TOY, [raw], out, choice=Choice(validation=3), validation_output=second)

    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "second.parquet"]
