"""What can be placed on which nodes, held against trying every placement there is."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.placement import (
    Need,
    Node,
    Pool,
    fits,
    need_of,
    own_node,
    placement_problems,
    storage_units,
)
from verl_mixed.run.compose import compose_config, resolve


@cache
def _laptop() -> dict[str, Any]:
    return resolve(compose_config(["mixed.run_dir=/runs/x"]), complete=False)


def config_of(**changed: Any) -> dict[str, Any]:
    """The laptop profile, with `a__b=1` for `a.b=1`."""
    config = deepcopy(_laptop())
    for path, value in changed.items():
        *parents, last = path.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    return config


def need_from(**changed: Any) -> Need:
    need = need_of(config_of(**changed))
    assert need is not None
    return need


def every_placement(need: Need, nodes: Sequence[Node]) -> Iterator[list[tuple[float, float]]]:
    """(GPUs, CPUs) left on each node, for every placement of all groups, units and controller."""
    groups = [
        (pool.processes, pool.processes * pool.cpus_per_process)
        for pool in need.pools
        for _ in range(pool.groups)
    ]
    for order in permutations(range(len(nodes))):
        for places in product(range(len(nodes)), repeat=len(groups) + need.controller_cpus):
            left = [[node.gpus, node.cpus] for node in nodes]
            for unit in range(need.storage_units):
                left[order[unit % len(nodes)]][1] -= 1
            taken = [*groups, *[(0, 1)] * need.controller_cpus]
            for place, (gpus, cpus) in zip(places, taken, strict=True):
                left[place][0] -= gpus
                left[place][1] -= cpus
            yield [(gpus, cpus) for gpus, cpus in left]


def some_placement(need: Need, nodes: Sequence[Node]) -> bool:
    return any(
        all(gpus >= 0 and cpus >= 0 for gpus, cpus in left) for left in every_placement(need, nodes)
    )


POOLS = st.builds(
    Pool,
    keys=st.just("some.pool"),
    groups=st.integers(1, 2),
    processes=st.integers(1, 3),
    cpus_per_process=st.sampled_from([2, 3]),
)
NEEDS = st.builds(
    Need, pools=st.lists(POOLS, max_size=2).map(tuple), storage_units=st.integers(0, 5)
)
NODES = st.lists(
    st.builds(Node, cpus=st.sampled_from([0, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 17, 20]),
              gpus=st.integers(0, 5)),
    min_size=1,
    max_size=3,
)  # fmt: skip


CROSSED = Need(
    pools=(Pool(keys="large", groups=1, processes=3), Pool(keys="small", groups=2, processes=2)),
    storage_units=1,
)
"""Fits where the larger node does not take the larger group."""


@given(need=NEEDS, nodes=NODES)
@example(need=CROSSED, nodes=[Node(cpus=20, gpus=4), Node(cpus=20, gpus=3)])
def test_a_need_has_problems_exactly_where_no_placement_meets_it(need: Need, nodes: list[Node]):
    assert (placement_problems(need, nodes) == []) == some_placement(need, nodes)


@given(need=NEEDS, nodes=NODES, order=st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_pools_means_nothing(need: Need, nodes: list[Node], order: Any):
    shuffled, pools = list(nodes), list(need.pools)
    order.shuffle(shuffled)
    order.shuffle(pools)

    other = Need(pools=tuple(pools), storage_units=need.storage_units)

    assert fits(need, nodes) == fits(other, shuffled)


def test_the_laptop_profile_needs_five_logical_cpus():
    need = need_from()

    assert (need.cpus, need.gpus) == (5, 1)
    assert placement_problems(need, [Node(cpus=5, gpus=1)]) == []
    (problem,) = placement_problems(need, [Node(cpus=4, gpus=1)])
    assert "5 CPUs in all" in problem and "ray_kwargs.ray_init.num_cpus" in problem


def test_a_process_that_only_generates_takes_two_cpus():
    need = need_from(
        trainer__v1__trainer_mode="mixed_separate_async",
        actor_rollout_ref__rollout__nnodes=1,
        actor_rollout_ref__rollout__n_gpus_per_node=4,
        actor_rollout_ref__rollout__tensor_model_parallel_size=2,
    )

    assert [(pool.groups, pool.processes, pool.cpus) for pool in need.pools] == [
        (1, 1, 3),
        (2, 2, 4),
    ]
    assert need.cpus == 3 + 2 * 4 + 1 + 1


def test_a_replica_larger_than_a_node_is_a_group_on_each_of_its_nodes():
    need = need_from(
        trainer__v1__trainer_mode="mixed_separate_async",
        actor_rollout_ref__rollout__nnodes=2,
        actor_rollout_ref__rollout__n_gpus_per_node=8,
        actor_rollout_ref__rollout__tensor_model_parallel_size=16,
    )

    assert (need.pools[1].groups, need.pools[1].processes) == (2, 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer__nnodes": "two"},
        {"trainer__n_gpus_per_node": 0},
        {"transfer_queue__backend__SimpleStorage__num_data_storage_units": "two"},
    ],
)
def test_a_number_that_is_none_is_left_to_preflight(changed: dict[str, Any]):
    assert need_of(config_of(**changed)) is None


def test_gpus_that_no_node_has_together_are_named_with_the_numbers():
    need = need_from(trainer__n_gpus_per_node=8, trainer__nnodes=2)
    nodes = [Node(cpus=96, gpus=8, name="10.0.0.1"), Node(cpus=96, gpus=4, name="10.0.0.2")]

    (problem,) = placement_problems(need, nodes)

    assert "trainer.nnodes=2 x n_gpus_per_node=8 takes 2 x 8 GPUs, each on one node" in problem
    assert "room for 1 (10.0.0.1 of 8 GPUs and 96 CPUs, 10.0.0.2 of 4 GPUs and 96 CPUs)" in problem


def test_too_few_cpus_for_the_gpus_are_named_as_that():
    need = need_from(trainer__n_gpus_per_node=8)

    (problem,) = placement_problems(need, [Node(cpus=16, gpus=8)])

    assert "with 24 logical CPUs (3 a process)" in problem


def test_a_node_without_a_cpu_cannot_take_its_storage_unit():
    need = need_from(transfer_queue__backend__SimpleStorage__num_data_storage_units=2)

    assert placement_problems(need, [Node(cpus=20, gpus=1), Node(cpus=0, gpus=0)])
    assert not placement_problems(need, [Node(cpus=20, gpus=1), Node(cpus=1, gpus=0)])


@pytest.mark.parametrize(
    ("mode", "nodes", "engines", "units"),
    [
        ("mixed_sync", 1, 0, 8),
        ("mixed_sync", 6, 9, 12),
        ("mixed_separate_async", 6, 2, 16),
        ("mixed_separate_async", 6, "two", None),
    ],
)
def test_storage_units_grow_with_the_nodes(mode: str, nodes: int, engines: Any, units: int | None):
    config = config_of(
        transfer_queue__backend__SimpleStorage__num_data_storage_units=None,
        trainer__v1__trainer_mode=mode,
        trainer__nnodes=nodes,
        actor_rollout_ref__rollout__nnodes=engines,
    )

    assert storage_units(config) == units


def test_no_node_and_no_replica_are_named():
    need = Need(pools=(Pool(keys="p", groups=0, processes=2),), storage_units=1)

    assert "no node is alive" in placement_problems(need, [])[0]
    assert "fewer GPUs than one replica" in placement_problems(need, [Node(cpus=9, gpus=9)])[0]


def test_a_large_cluster_is_answered():
    pools = (
        Pool(keys="trainer", groups=64, processes=8),
        Pool(keys="rollout", groups=256, processes=2, cpus_per_process=2),
    )
    need = Need(pools=pools, storage_units=256)

    assert not placement_problems(need, [Node(cpus=96, gpus=8)] * 128)
    assert placement_problems(need, [Node(cpus=96, gpus=8)] * 127)


def test_a_run_of_ones_own_has_what_the_config_says_or_what_the_machine_has():
    assert own_node(config_of(), lambda: 3) == Node(cpus=16, gpus=1, name="this machine")

    node = own_node(config_of(ray_kwargs__ray_init={}), lambda: 3)

    assert node.gpus == 3 and node.cpus >= 1
