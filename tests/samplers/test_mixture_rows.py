"""The rows of a dataset in the order of a plan: each drawn prompt with its row, at any point."""

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.mixture_plan import MixturePlan, PlannedPrompt
from samplers.mixture_rows import MixtureRows, rows_by_source
from samplers.row_names import row_id

COLUMN = ["nq", "math", "nq", "taco", "math", "math", "taco", "nq", "math"]
RATIOS = {"nq": 0.5, "math": 0.3, "taco": 0.2}


class Rows:
    """Rows that say where they stand; counts the reads of its own process."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(COLUMN)

    def __getitem__(self, item: int, /) -> dict[str, Any]:
        self.reads += 1
        return {"data_source": COLUMN[item], "number": item}


class Drawn(MixtureRows, Rows):
    """Rows that are drawn by a plan."""


def plan_of(rows: Drawn) -> MixturePlan:
    assert rows.plan is not None
    return rows.plan


def dataset(seed: int = 0, on_change: str = "refuse") -> Drawn:
    rows = Drawn()
    index = rows.sources()
    sizes = {name: len(own) for name, own in index.items()}
    rows.follow(MixturePlan(sizes, RATIOS, batch_size=10, seed=seed), index)
    rows.on_change, rows.reads = on_change, 0
    return rows


Draws = list[tuple[list[PlannedPrompt], list[dict[str, Any]]]]
WANTED = {
    "take": lambda prompts: prompts,
    "replace": lambda prompts: {"nq": prompts, "taco": 1},
}


def use(rows: Drawn, parts: Sequence[tuple[str, int]]) -> Draws:
    """Take, replace or give back; what came of it."""
    draws: Draws = []
    for what, prompts in parts:
        if what == "give_back":
            plan = plan_of(rows)
            plan.give_back({"nq": max(0, plan.drawn["nq"] - prompts)})
        else:
            draws.append(rows.draw(WANTED[what](prompts)))
    return draws


def number_of(prompt: PlannedPrompt) -> int:
    """The row of a prompt in the dataset."""
    return int(rows_by_source(COLUMN)[prompt.source][prompt.row])


PARTS = st.lists(
    st.tuples(st.sampled_from(["take", "replace", "give_back"]), st.integers(0, 13)), max_size=8
)


# --- rows of a column -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        COLUMN,
        tuple(COLUMN),
        np.array(COLUMN),
        pa.array(COLUMN),
        pa.chunked_array([COLUMN]),
        pa.chunked_array([COLUMN[:2], [], COLUMN[2:3], COLUMN[3:]]),
        pa.chunked_array([COLUMN[:4], COLUMN[4:]], type=pa.large_string()),
        pa.chunked_array([pa.array(COLUMN[:4]), pa.array(COLUMN[4:])]).dictionary_encode(),
    ],
    ids=["list", "tuple", "numpy", "array", "chunk", "chunks", "large", "dictionary"],
)
def test_rows_are_counted_within_their_source_in_file_order(column: Any):
    rows = rows_by_source(column)
    assert list(rows) == ["nq", "math", "taco"]
    assert {name: own.tolist() for name, own in rows.items()} == {
        "nq": [0, 2, 7],
        "math": [1, 4, 5, 8],
        "taco": [3, 6],
    }
    assert {own.dtype for own in rows.values()} == {np.dtype(np.int64)}


@given(st.lists(st.sampled_from(["b", "a", "d", "c"]), min_size=1), st.integers(1, 7))
def test_every_row_is_with_its_source_once(column: list[str], chunk: int):
    pieces = [column[start : start + chunk] for start in range(0, len(column), chunk)]
    rows = rows_by_source(pa.chunked_array(pieces))
    assert list(rows) == list(dict.fromkeys(column))
    assert {name: own.tolist() for name, own in rows.items()} == {
        name: [row for row, source in enumerate(column) if source == name] for name in rows
    }


def test_a_million_rows_are_never_strings_of_python():
    sources = pa.array(["nq", "math", "taco"])
    codes = np.random.default_rng(0).integers(0, 3, 1_000_000)
    column = pa.chunked_array(
        [sources.take(pa.array(part)) for part in np.split(codes, range(50_000, 1_000_000, 50_000))]
    )
    tracemalloc.start()
    try:
        rows = rows_by_source(column)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for name, code in (("nq", 0), ("math", 1), ("taco", 2)):
        assert np.array_equal(rows[name], np.flatnonzero(codes == code))
    assert peak_bytes < 40 * len(column)  # a list of strings takes 60 bytes a row


@pytest.mark.parametrize("column", [[], pa.chunked_array([], type=pa.string())])
def test_a_dataset_without_rows_has_no_sources(column: Any):
    assert rows_by_source(column) == {}


# --- draws ----------------------------------------------------------------------------------------


@given(chunks=st.lists(st.integers(1, 13), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_prompts_drawn_in_any_chunks_are_the_plans_stream(chunks: list[int], seed: int):
    chunked, whole = dataset(seed), dataset(seed)
    prompts = [prompt for chunk in chunks for prompt in chunked.draw(chunk)[0]]
    assert prompts == whole.draw(sum(chunks))[0]
    stream = [plan_of(chunked).prompt(i) for i in range(sum(chunks))]
    assert [(prompt.source, prompt.row) for prompt in prompts] == stream


@given(PARTS)
def test_what_is_read_is_the_row_of_what_the_plan_drew(parts: list[tuple[str, int]]):
    rows, plan = dataset(), plan_of(dataset())
    draws = iter(use(rows, parts))
    for what, prompts in parts:
        if what == "give_back":
            plan.give_back({"nq": max(0, plan.drawn["nq"] - prompts)})
            continue
        drawn, read = next(draws)
        wanted = WANTED[what](prompts)
        assert drawn == (plan.take(wanted) if what == "take" else plan.replace(wanted))
        assert [row["number"] for row in read] == [*map(number_of, drawn)]
    assert rows.state_dict() == plan.state_dict()


def test_draws_given_back_are_read_again():
    rows = dataset()
    rows.draw(10)
    first = rows.draw({"nq": 3})
    plan_of(rows).give_back({"nq": 5})
    assert rows.draw({"nq": 3}) == first


def test_no_row_is_read_before_it_is_asked_for():
    rows = dataset()
    rows.draw(7)
    assert rows.reads == 7


@given(PARTS, PARTS)
def test_a_dataset_resumed_from_its_state_goes_on_where_it_was(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
):
    through, resumed = dataset(), dataset()
    use(through, before)
    resumed.load_state_dict(json.loads(json.dumps(through.state_dict())))
    assert use(resumed, after) == use(through, after)


def test_a_dataset_goes_back_to_a_state():
    rows = dataset()
    rows.draw(17)
    state = rows.state_dict()
    ahead = rows.draw(9)
    rows.load_state_dict(state)
    assert rows.draw(9) == ahead


def test_a_state_of_another_mixture_is_refused_unless_it_may_change():
    state = dataset(seed=0).state_dict()
    with pytest.raises(ValueError, match="seed"):
        dataset(seed=1).load_state_dict(state)
    changed = dataset(seed=1, on_change="continue")
    changed.load_state_dict({**state, "position": 20, "drawn": {"nq": 10, "math": 6, "taco": 4}})
    assert [prompt.draw for prompt in changed.draw({"nq": 1, "taco": 1})[0]] == [10, 4]


def test_a_dataset_without_a_plan_has_no_state():
    rows = Drawn()
    rows.load_state_dict(dataset().state_dict())
    assert rows.state_dict() == {} and rows.plan is None


class Table(list[Any]):
    """As much of a `datasets.Dataset` as a name needs."""

    with_format = None


@pytest.mark.parametrize("has_table", [False, True])
def test_a_row_has_the_name_of_its_file_or_of_its_content(has_table: bool):
    rows = dataset()
    stored: list[dict[str, Any]] = [rows[at] for at in range(len(rows))]
    stored[2]["extra_info"] = {"row_id": 17}
    if has_table:
        rows.dataframe = Table(stored)  # whose rows have no prompt in tokens
        assert rows.row_id("nq", 1) == "17"
    assert rows.row_id("nq", 0) == row_id("nq", stored[0]) != rows.row_id("nq", 2)
