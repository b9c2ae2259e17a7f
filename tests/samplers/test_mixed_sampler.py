"""The plan as verl's dataloader."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.mixed_sampler import PlanStream, rows_by_source
from samplers.mixture_plan import MixturePlan

COLUMN = ["nq", "math", "nq", "taco", "math", "math", "taco", "nq", "math"]
ROWS = [{"data_source": source, "number": number} for number, source in enumerate(COLUMN)]


def collate(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def stream(seed: int = 0) -> PlanStream:
    index = rows_by_source(COLUMN)
    plan = MixturePlan(
        sizes={name: len(rows) for name, rows in index.items()},
        ratios={"nq": 0.5, "math": 0.3, "taco": 0.2},
        batch_size=10,
        seed=seed,
    )
    return PlanStream(ROWS, plan, index, collate)


def test_rows_are_counted_within_their_source_in_file_order():
    assert {name: rows.tolist() for name, rows in rows_by_source(COLUMN).items()} == {
        "nq": [0, 2, 7],
        "math": [1, 4, 5, 8],
        "taco": [3, 6],
    }


@given(chunks=st.lists(st.integers(1, 13), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_prompts_taken_in_any_chunks_are_the_plans_stream(chunks, seed):
    taken = stream(seed)
    planned, numbers = [], []
    for chunk in chunks:
        prompts, columns = taken.take(chunk)
        planned += prompts
        numbers += columns["number"]
        assert columns["data_source"] == [prompt.source for prompt in prompts]
    assert [p.position for p in planned] == list(range(sum(chunks)))
    assert [(p.source, p.row) for p in planned] == [
        taken.plan.prompt(i) for i in range(sum(chunks))
    ]
    whole, columns = stream(seed).take(sum(chunks))
    assert (planned, numbers) == (whole, columns["number"])


def test_a_stream_resumed_from_its_state_goes_on_where_it_was():
    first = stream()
    first.take(17)
    state = first.state_dict()
    resumed = stream()
    resumed.load_state_dict(state)
    assert resumed.take(9) == first.take(9)
    assert len(json.dumps(state)) < 1000


def test_a_state_of_another_mixture_is_refused():
    with pytest.raises(ValueError, match="seed"):
        stream(seed=1).load_state_dict(stream(seed=0).state_dict())
