"""Groups are dealt by quota, and rows spread evenly over the ranks."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.balance import deal_groups, imbalance, rows_per_update, spread_rows
from samplers.mixture_plan import MixturePlan

WORKLOAD = st.one_of(st.integers(0, 100), st.floats(0, 1e6))


def verl_workloads(lengths: np.ndarray) -> list[int]:
    """verl's cost of trajectories of so many tokens (`calculate_workload`)."""
    return [24576 * length + length**2 for length in lengths.tolist()]


LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "uniform": lambda random, rows: random.integers(10, 8192, rows),
    "lognormal": lambda random, rows: random.lognormal(7, 1, rows).clip(1, 16384).astype(int),
    "exponential": lambda random, rows: random.exponential(2000, rows).clip(1, 16384).astype(int),
    "two kinds": lambda random, rows: np.where(
        random.random(rows) < 0.2,
        random.integers(6000, 8192, rows),
        random.integers(100, 900, rows),
    ),
    "equal": lambda random, rows: np.full(rows, 500),
}


def loads_of(parts: Sequence[Sequence[int]], workloads: Sequence[float]) -> list[float]:
    return [sum(workloads[row] for row in rows) for rows in parts]


# --- groups to updates ----------------------------------------------------------------------------


@given(
    quotas=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(0, 6)), min_size=1, max_size=5
    ),
    data=st.data(),
)
def test_every_update_holds_exactly_its_quotas(quotas: list[dict[str, int]], data: st.DataObject):
    total = Counter[str]()
    for quota in quotas:
        total.update(quota)
    sources = data.draw(st.permutations(sorted(total.elements())))
    workloads = data.draw(st.lists(WORKLOAD, min_size=len(sources), max_size=len(sources)))
    dealt = deal_groups(sources, workloads, quotas)
    assert sorted(group for update in dealt for group in update) == list(range(len(sources)))
    for update, quota in zip(dealt, quotas, strict=True):
        assert Counter(sources[group] for group in update) == +Counter(quota)


@given(
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from("abc"),
    st.data(),
)
def test_equal_updates_of_one_source_differ_by_its_heaviest_group_at_most(
    updates: int, groups: int, source: str, data: st.DataObject
):
    rows = updates * groups
    workloads = data.draw(st.lists(st.integers(0, 1000), min_size=rows, max_size=rows))
    dealt = deal_groups([source] * rows, workloads, [{source: groups}] * updates)
    loads = loads_of(dealt, workloads)
    assert max(loads) - min(loads) <= max(workloads)


def worst_of_planned_batches(groups: int) -> float:
    """The largest imbalance of four updates, over batches of all kinds of lengths."""
    worst = 0.0
    for seed in range(10):
        plan = MixturePlan(dict.fromkeys("abc", 99), {"a": 5, "b": 3, "c": 2}, groups, seed)
        sources = [prompt.source for prompt in plan.take(groups)]
        size = groups // 4
        quotas = [plan.counts_between(first, first + size) for first in range(0, groups, size)]
        for make in LENGTHS.values():
            workloads = verl_workloads(make(np.random.default_rng(seed), groups))
            dealt = deal_groups(sources, workloads, quotas)
            worst = max(worst, imbalance(dealt, workloads))
    return worst


def test_the_updates_of_a_large_planned_batch_have_about_equal_loads():
    assert worst_of_planned_batches(256) <= 0.06


def test_the_updates_of_a_small_planned_batch_have_about_equal_loads():
    assert worst_of_planned_batches(80) <= 0.05  # 0.39; 0.02 when all sources are dealt together


def test_heavy_groups_of_a_source_are_dealt_first_each_to_the_lightest_update():
    dealt = deal_groups("aaaa", [9, 1, 8, 3], [{"a": 2}, {"a": 2}])
    assert dealt == [[0, 1], [2, 3]]


def test_the_same_groups_are_dealt_alike():
    quotas = [{"a": 3}, {"a": 3}]
    assert deal_groups("a" * 6, [1.0] * 6, quotas) == deal_groups("a" * 6, [1.0] * 6, quotas)
    assert deal_groups("", [], [{}, {}]) == [[], []]


@pytest.mark.parametrize(
    "quotas",
    [[{"a": 1}], [{"a": 2}, {"b": 2}], [{"a": 2, "b": 1, "c": 1}], [{}], [{"a": 3}], []],
)
def test_quotas_that_are_not_those_of_the_groups_are_refused(quotas: list[dict[str, int]]):
    with pytest.raises(ValueError, match=r"cannot deal groups=\{'a': 2, 'b': 1\} to updates"):
        deal_groups("aba", [1.0, 1.0, 1.0], quotas)


# --- rows to ranks --------------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_every_rank_gets_as_many_rows_of_each_update_in_the_order_of_updates(
    ranks: int, per_rank: list[int], data: st.DataObject
):
    count = ranks * sum(per_rank)
    rows = iter(data.draw(st.permutations(range(count))))
    updates = [[next(rows) for _ in range(ranks * own)] for own in per_rank]
    workloads = data.draw(st.lists(WORKLOAD, min_size=count, max_size=count))
    of_ranks = spread_rows(updates, workloads, ranks)
    assert len(of_ranks) == ranks
    for number, own in enumerate(per_rank):
        start = sum(per_rank[:number])
        parts = [rows_of_rank[start : start + own] for rows_of_rank in of_ranks]
        assert sorted(row for part in parts for row in part) == sorted(updates[number])
    assert {len(rows_of_rank) for rows_of_rank in of_ranks} == {sum(per_rank)}


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_within_an_update_ranks_differ_by_the_heaviest_row_at_most(
    ranks: int, per_rank: int, data: st.DataObject
):
    count = ranks * per_rank
    workloads = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    loads = loads_of(spread_rows([list(range(count))], workloads, ranks), workloads)
    assert max(loads) - min(loads) <= max(workloads) - min(workloads)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.data())
def test_over_all_updates_ranks_differ_by_the_heaviest_row_at_most(
    ranks: int, per_rank: int, updates: int, data: st.DataObject
):
    size = ranks * per_rank
    count = size * updates
    workloads = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    parts = [list(range(first, first + size)) for first in range(0, count, size)]
    loads = loads_of(spread_rows(parts, workloads, ranks), workloads)
    assert max(loads) - min(loads) <= max(workloads) - min(workloads)


@pytest.mark.parametrize("kind", sorted(LENGTHS))
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_busiest_rank_has_at_most_a_twentieth_more_than_under_verls_own_balancing(
    kind: str, ranks: int
):
    balancing = pytest.importorskip("verl.utils.seqlen_balancing")
    random = np.random.default_rng(ranks)
    for per_rank in (4, 8, 16, 32):
        for _ in range(4):
            rows = ranks * per_rank
            workloads = verl_workloads(LENGTHS[kind](random, rows))
            theirs = balancing.get_seqlen_balanced_partitions(workloads, ranks, equal_size=True)
            ours = spread_rows([range(rows)], workloads, ranks)
            assert max(loads_of(ours, workloads)) <= 1.05 * max(loads_of(theirs, workloads))


@pytest.mark.parametrize("kind", sorted(LENGTHS))
def test_the_totals_over_several_updates_are_about_as_even_as_verls_over_the_whole_batch(kind: str):
    balancing = pytest.importorskip("verl.utils.seqlen_balancing")
    random = np.random.default_rng(0)
    for _ in range(10):
        workloads = verl_workloads(LENGTHS[kind](random, 512))
        updates = [range(first, first + 128) for first in range(0, 512, 128)]
        ours = spread_rows(updates, workloads, 8)
        theirs = balancing.get_seqlen_balanced_partitions(workloads, 8, equal_size=True)
        assert max(loads_of(ours, workloads)) <= 1.05 * max(loads_of(theirs, workloads))


def test_verls_cost_of_a_length_is_ours():
    balancing = pytest.importorskip("verl.utils.seqlen_balancing")
    torch = pytest.importorskip("torch")
    lengths = [1, 500, 16384]
    theirs = balancing.calculate_workload(torch.tensor(lengths)).tolist()
    assert verl_workloads(np.array(lengths)) == theirs


def test_rows_go_out_in_rounds_heavy_ones_first():
    assert spread_rows([[0, 1, 2, 3]], [10, 7, 2, 1], ranks=2) == [[0, 3], [1, 2]]


def test_the_heaviest_part_of_an_update_goes_to_the_rank_with_the_least_so_far():
    workloads = [9, 1, 10, 6, 5, 0]
    of_ranks = spread_rows([[0, 1], [2, 3, 4, 5]], workloads, ranks=2)
    assert of_ranks == [[0, 3, 5], [1, 2, 4]]  # 0 and 1, then 10+0 and 6+5, then 10 for 6
    assert loads_of(of_ranks, workloads) == [15, 16]


def test_rows_change_places_while_that_evens_the_ranks():
    workloads = [10, 10, 10, 5, 5, 0]
    assert loads_of(spread_rows([range(6)], workloads, ranks=2), workloads) == [20, 20]


@pytest.mark.parametrize("updates", [[[0, 1, 2]], [[0, 1], [2]]])
def test_an_update_that_cannot_be_shared_evenly_is_refused(updates: list[list[int]]):
    with pytest.raises(ValueError, match=r"cannot spread \d rows over 2 ranks: no even share"):
        spread_rows(updates, [1.0] * 3, ranks=2)


# --- measure --------------------------------------------------------------------------------------


def test_imbalance_is_how_much_the_busiest_has_above_the_mean():
    assert imbalance([[0], [1]], [3.0, 1.0]) == 0.5
    assert imbalance([[0, 1], [2, 3]], [1.0, 1.0, 2.0, 0.0]) == 0.0
    assert imbalance([[0], [1]], [0.0, 0.0]) == 0.0


# --- rows of an update ----------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_updates_are_filled_up_to_the_least_number_that_divides_everywhere(
    rows: list[int], ranks: int, update_unit: int, batch_unit: int
):
    def is_legal(size: int) -> bool:
        whole_batch = size * len(rows)
        return size % (ranks * update_unit) == 0 and whole_batch % (ranks * batch_unit) == 0

    size = rows_per_update(rows, ranks, update_unit, batch_unit)
    assert is_legal(size)
    assert not any(is_legal(smaller) for smaller in range(max(rows), size))


def test_an_update_that_divides_already_is_not_filled_up():
    assert rows_per_update([80, 80], ranks=2, update_unit=10, batch_unit=80) == 80
