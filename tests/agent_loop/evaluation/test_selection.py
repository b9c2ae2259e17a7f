"""Which rows an evaluation takes."""

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.evaluation.selection import Selection

ROWS = [(source, f"{source}:{i}") for i in range(10) for source in ("math", "nq")]


def chosen(**options) -> list[tuple[str, str]]:
    return [ROWS[place] for place in Selection(samples=1, **options).of(ROWS)]


def test_all_rows_are_taken_in_their_order():
    assert chosen() == ROWS


def test_a_limit_takes_the_first_rows_of_each_source():
    assert chosen(limit=2) == [row for row in ROWS if row[1][-1] in "01"]


def test_sources_are_chosen_by_name():
    assert {source for source, _ in chosen(sources=("nq",))} == {"nq"}


@given(st.integers(1, 12), st.integers(0, 5))
def test_drawn_rows_are_the_same_each_time_and_grow_with_their_number(count: int, seed: int):
    rows = chosen(sample=count, seed=seed)
    assert rows == chosen(sample=count, seed=seed)
    assert len(rows) == 2 * min(count, 10)
    assert set(rows) <= set(chosen(sample=count + 1, seed=seed))


def test_another_seed_draws_others():
    assert len({tuple(chosen(sample=3, seed=seed)) for seed in range(5)}) > 1
