"""The plan as verl's dataloader: the plan's prompts with their columns."""

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.mixed_sampler import PlanStream, rows_by_source
from samplers.mixture_plan import MixturePlan, PlannedPrompt

COLUMN = ["nq", "math", "nq", "taco", "math", "math", "taco", "nq", "math"]
RATIOS = {"nq": 0.5, "math": 0.3, "taco": 0.2}


class Dataset:
    """Rows that say where they stand; counts the reads of its own process."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = sources
        self.reads = 0

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, item: int, /) -> dict[str, Any]:
        self.reads += 1
        return {"data_source": self.sources[item], "number": item}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in ("data_source", "number")}


def stream(seed: int = 0, on_change: str = "refuse") -> PlanStream:
    index = rows_by_source(COLUMN)
    plan = MixturePlan(
        sizes={name: len(rows) for name, rows in index.items()},
        ratios=RATIOS,
        batch_size=10,
        seed=seed,
    )
    return PlanStream(Dataset(COLUMN), plan, index, collate, on_change=on_change)


Taken = tuple[list[PlannedPrompt], dict[str, Any]]


def use(taken: PlanStream, parts: Sequence[tuple[str, int]]) -> list[Taken]:
    """Take, replace or give back; what came of it."""
    results: list[Taken] = []
    for what, prompts in parts:
        if what == "take":
            results.append(taken.take(prompts))
        elif what == "replace":
            results.append(taken.replace({"nq": prompts, "taco": 1}))
        else:
            drawn = taken.plan.drawn
            taken.plan.give_back({"nq": max(0, drawn["nq"] - prompts)})
    return results


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


# --- the stream -----------------------------------------------------------------------------------


@given(chunks=st.lists(st.integers(1, 13), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_prompts_taken_in_any_chunks_are_the_plans_stream(chunks: list[int], seed: int):
    taken = stream(seed)
    planned: list[PlannedPrompt] = []
    numbers: list[int] = []
    for chunk in chunks:
        prompts, columns = taken.take(chunk)
        planned += prompts
        numbers += columns["number"]
        assert columns["data_source"] == [prompt.source for prompt in prompts]
    index = rows_by_source(COLUMN)
    assert [(p.source, p.row) for p in planned] == [
        taken.plan.prompt(i) for i in range(sum(chunks))
    ]
    assert numbers == [int(index[prompt.source][prompt.row]) for prompt in planned]
    whole, columns = stream(seed).take(sum(chunks))
    assert (planned, numbers) == (whole, columns["number"])


@given(PARTS)
def test_what_is_read_is_the_row_of_what_the_plan_drew(parts: list[tuple[str, int]]):
    taken, plan, index = stream(), stream().plan, rows_by_source(COLUMN)
    for what, prompts in parts:
        if what == "give_back":
            use(taken, [(what, prompts)])
            plan.give_back({"nq": max(0, plan.drawn["nq"] - prompts)})
            continue
        [(planned, columns)] = use(taken, [(what, prompts)])
        expected = (
            plan.take(prompts) if what == "take" else plan.replace({"nq": prompts, "taco": 1})
        )
        assert planned == expected
        assert columns["number"] == [int(index[p.source][p.row]) for p in planned]
    assert taken.state_dict() == plan.state_dict()


def test_draws_given_back_are_read_again():
    taken = stream()
    taken.take(10)
    first = taken.replace({"nq": 3})
    taken.plan.give_back({"nq": 5})
    assert taken.replace({"nq": 3}) == first


def test_no_row_is_read_before_it_is_asked_for():
    taken = stream()
    assert isinstance(taken.dataset, Dataset)
    taken.take(7)
    assert taken.dataset.reads == 7
    assert len(taken) == len(COLUMN)


@given(PARTS, PARTS)
def test_a_stream_resumed_from_its_state_goes_on_where_it_was(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
):
    through, resumed = stream(), stream()
    use(through, before)
    resumed.load_state_dict(json.loads(json.dumps(through.state_dict())))
    assert use(resumed, after) == use(through, after)


def test_a_stream_goes_back_to_a_state():
    taken = stream()
    taken.take(17)
    state = taken.state_dict()
    ahead = taken.take(9)
    taken.load_state_dict(state)
    assert taken.take(9) == ahead


def test_a_state_of_another_mixture_is_refused_unless_it_may_change():
    state = stream(seed=0).state_dict()
    with pytest.raises(ValueError, match="seed"):
        stream(seed=1).load_state_dict(state)
    changed = stream(seed=1, on_change="continue")
    changed.load_state_dict({**state, "position": 20, "drawn": {"nq": 10, "math": 6, "taco": 4}})
    assert [prompt.draw for prompt in changed.replace({"nq": 1, "taco": 1})[0]] == [10, 4]
