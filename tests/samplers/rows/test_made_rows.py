"""Kinds that make their records: distinct, disjoint, deterministic, in exact proportion."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samplers.rows.made_records import MadeRecords
from samplers.rows.prepare import Choice, prepare
from samplers.rows.sources import KINDS, kind_of, makes_records, reasoning_gym, seeds
from samplers.rows.tagged_json import untagged
from tests.fakes.toy_reasoning_gym import install_toy

TASKS = KINDS["reasoning_gym"]
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    install_toy(monkeypatch)


def made(split: str, **options: Any) -> list[tuple[str, str]]:
    """(task, question) of each record."""
    found = reasoning_gym.records(split=split, **options)
    return [(record["task"], record["entry"]["question"]) for record in found]


@QUICK
@given(
    weights=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sizes=st.tuples(st.integers(10, 120), st.integers(10, 60)),
    seed=st.integers(0, 2**40),
)
def test_rows_are_distinct_disjoint_deterministic_and_in_proportion(
    toy: None, weights: tuple[int, int], sizes: tuple[int, int], seed: int
) -> None:
    tasks = {"sums": {"weight": weights[0]}, "differences": {"weight": weights[1]}}
    options: dict[str, Any] = {"tasks": tasks, "size": sizes[0], "val_size": sizes[1], "seed": seed}

    train, validation = made("train", **options), made("validation", **options)

    assert (len(train), len(validation)) == sizes
    assert len({*train, *validation}) == sum(sizes)
    assert train == made("train", **options)
    for rows, size in zip((train, validation), sizes, strict=True):
        share = sum(task == "sums" for task, _ in rows) - size * weights[0] / sum(weights)
        assert abs(share) < 1


def test_another_number_of_training_rows_leaves_the_validation_rows(toy: None) -> None:
    few, many = (made("validation", task="sums", size=size, val_size=20) for size in (5, 500))

    assert few == many


def test_neighbouring_seeds_share_no_rows(toy: None) -> None:
    rows = [
        {*made("train", task="sums", size=300, seed=seed, config={"most": 10**9})}
        for seed in (0, 1)
    ]

    assert not rows[0] & rows[1]


def test_a_small_task_gives_all_questions_that_validation_leaves(toy: None) -> None:
    options: dict[str, Any] = {"task": "sums", "config": {"most": 4}, "val_size": 5}

    assert len({*made("train", size=20, **options), *made("validation", **options)}) == 25
    with pytest.raises(ValueError, match=r"task='sums' .* only 20 new questions .* 21 are wanted"):
        made("train", size=21, **options)


def test_level_and_config_are_the_tasks_own(toy: None) -> None:
    def longest(**options: Any) -> int:
        return max(len(question) for _, question in made("train", task="sums", size=50, **options))

    assert longest(level=0) == len("99 + 99") < longest(level=3)
    assert longest(level=3, config={"most": 9}) == len("9 + 9")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "task=None and tasks=None .* give one of them"),
        ({"task": "sum"}, "no task='sum' .* correct it to one of sums"),
        ({"task": "composite"}, "task='composite' .* name those in tasks"),
        ({"task": "sums", "config": {"mots": 3}}, "no key 'mots' .* did you mean most"),
        ({"task": "sums", "config": {"most": 0}}, "most must be positive; its config is most=1000"),
        ({"task": "sums", "config": {"seed": 1}}, "seed=1 .* the source's own size"),
        ({"task": "differences", "level": 1}, "has no curriculum; leave the level out"),
        ({"task": "sums", "size": 0}, "size=0 .* whole number >= 1"),
        ({"tasks": {"sums": {"weigt": 1}}}, r"tasks.sums.weigt .* weight, level, config, question"),
        ({"tasks": ["sums"], "level": 1}, "level=1 .* of a single task"),
        ({"task": "sums", "question": "{a}"}, "KeyError.'a'.; its items have pair_text, question"),
        ({"task": "sums", "question": "{"}, "its items have pair_text, question"),
        ({"tasks": {"sums": {"weight": 99}, "differences": {}}, "size": 9}, "none of 4 rows"),
        ({"tasks": 3}, "tasks=3 .* list of names"),
    ],
)
def test_wrong_options_are_refused_in_words(toy: None, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made("train", **{"val_size": 4} | options)


def test_a_question_in_other_words_is_the_prompt_and_decides_what_is_distinct(toy: None) -> None:
    options: dict[str, Any] = {"task": "sums", "config": {"most": 4}, "size": 20, "val_size": 5}

    found = list(reasoning_gym.records(split="train", question="What is {pair_text}?", **options))

    assert {record["question"] for record in found} == {
        f"What is {record['entry']['metadata']['pair_text']}?" for record in found
    }
    assert len({record["question"] for record in found}) == 20
    assert all(" + " in record["entry"]["question"] for record in found)
    options |= {"val_size": 1, "question": "What is it?"}
    with pytest.raises(ValueError, match="has only 0 new questions"):
        list(reasoning_gym.records(split="train", **options))


def test_rows_hold_what_the_scorer_needs(toy: None, tmp_path: Path) -> None:
    prepare(TASKS, [], tmp_path / "rows.parquet", options={"task": "sums", "size": 9}, source="s")

    (first, *_) = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    truth = json.loads(first["reward_model"]["ground_truth"])
    entry = untagged(truth["entry"])

    assert (first["data_source"], first["agent_name"], truth["task"]) == ("s", "math_agent", "sums")
    assert isinstance(entry["metadata"]["pair"], tuple)
    assert {*entry["metadata"]["counts"]} == {entry["metadata"]["pair"][0]}


def test_rows_are_made_once_for_options_and_a_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_there(**options: Any) -> bool:
        given = {"task": "sums", "size": 9, **options}
        return prepare(TASKS, [], tmp_path / "rows.parquet", options=given).was_there

    install_toy(monkeypatch)
    assert [is_there(), is_there(), is_there(seed=1), is_there(seed=1)] == [False, True] * 2
    install_toy(monkeypatch, version="1.1")
    assert not is_there(seed=1)
    code = tmp_path / "reasoning_tasks.py"
    code.write_text("")
    monkeypatch.setattr("samplers.rows.sources.reasoning_tasks.__file__", str(code))
    assert [is_there(seed=1), is_there(seed=1)] == [False, True]


def test_an_interrupted_preparation_continues_to_the_same_rows(
    toy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"task": "sums", "size": 1000}
    prepare(TASKS, [], tmp_path / "whole.parquet", options=options)
    monkeypatch.setattr("samplers.rows.prepare.PART_RECORDS", 256)
    starts: list[int] = []
    records = MadeRecords.records

    def cut_once(self: MadeRecords, start: int = 0) -> Any:
        starts.append(start)
        for record in records(self, start):
            if len(starts) == 1 and record.number == 700:
                raise KeyboardInterrupt
            yield record

    monkeypatch.setattr(MadeRecords, "records", cut_once)
    with pytest.raises(KeyboardInterrupt):
        prepare(TASKS, [], tmp_path / "cut.parquet", options=options)
    prepare(TASKS, [], tmp_path / "cut.parquet", options=options)

    assert starts == [0, 512]
    assert pq.read_table(tmp_path / "cut.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_files_for_a_kind_that_makes_its_records_are_refused(toy: None, tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_text("[]")

    with pytest.raises(ValueError, match=r"raw\.json: it makes its records and reads no file"):
        prepare(TASKS, [tmp_path / "raw.json"], tmp_path / "rows.parquet", options={"task": "sums"})
    with pytest.raises(ValueError, match="no input is named"):
        prepare(KINDS["json"], [], tmp_path / "rows.parquet")


def test_a_missing_package_is_told_with_its_extra(tmp_path: Path) -> None:
    from dataclasses import replace

    kind = replace(TASKS, package="no-such-package-at-all")
    with pytest.raises(ValueError, match=r"pip install 'verl-mixed-agent-loop\[reasoning\]'"):
        prepare(kind, [], tmp_path / "rows.parquet", options={"task": "sums"})


def test_which_kinds_make_their_records() -> None:
    assert [name for name in KINDS if makes_records(name)] == ["reasoning_gym", "seeds"]
    assert not makes_records(None) and not makes_records("no_such.py")


# --- seeds ----------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**40))
def test_seeds_are_consecutive_and_disjoint(size: int, val_size: int, first: int) -> None:
    options: dict[str, Any] = {"size": size, "val_size": val_size, "first": first}
    train, validation = (
        [record["seed"] for record in seeds.records(split=split, **options)]
        for split in ("train", "validation")
    )

    assert validation + train == list(range(first, first + val_size + size))
    assert len(validation) == val_size


def test_a_row_of_a_seed(tmp_path: Path) -> None:
    prepare(kind_of("seeds"), [], tmp_path / "a.parquet", options={"size": 3, "val_size": 2})
    prepare(
        kind_of("seeds"),
        [],
        tmp_path / "b.parquet",
        options={"size": 40, "val_size": 2, "question": "Play."},
        choice=Choice(limit=2),
        source="game",
    )
    named, asked = (pq.read_table(tmp_path / f"{n}.parquet").to_pylist() for n in "ab")

    assert [row["prompt"][0]["content"] for row in named] == ["episode 2", "episode 3", "episode 4"]
    assert [json.loads(row["extra_info"]["extras"]) for row in asked] == [{"seed": 2}, {"seed": 3}]
    assert {row["prompt"][0]["content"] for row in asked} == {"Play."}
    assert len({row["extra_info"]["row_id"] for row in asked}) == 2
    assert named[0]["agent_name"] == "environment" and named[0]["data_source"] == "seeds"
    assert named[0]["reward_model"]["ground_truth"] == "{}"


@pytest.mark.parametrize("wrong", [{"size": 0}, {"val_size": True}, {"first": -1}, {"question": 3}])
def test_wrong_options_of_seeds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        list(seeds.records(split="train", **wrong))
