"""Whether Ray can place a run's actors on given nodes. Pure arithmetic.

verl waits for its placement groups, and TransferQueue for its actors, without a deadline. So a run
whose actors cannot be placed hangs for ever. The needs are those of verl 0.9.1
(`single_controller/ray/base.py`, `workers/rollout/replica.py`, `trainer/ppo/v1`) and TransferQueue
0.1.11:

- a pool is one placement group per node, each STRICT_PACK: a bundle of 1 GPU and 3 CPUs for every
  process, 2 CPUs if the process only generates (the replicas of `mixed_separate_async`);
- a storage unit takes 1 CPU; without a number in the config there are 8, or 2 for each node where
  that is more; unit i goes to node i modulo the number of nodes, and to no other;
- TransferQueue's controller takes 1 CPU of any node;
- runner, agent loop workers, reward workers and engine servers need no resources: Ray places such
  an actor even if all CPUs are taken.

Ray chooses the controller's node and the order of nodes. So a need without a problem may still be
placed badly on nodes that it fills to the last CPU.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.lookup import at

TRAINING_CPUS = 3
"""CPUs of a training process in a bundle of verl's pools."""

GENERATING_CPUS = 2
"""CPUs of a process that only generates, in the pool of a replica."""

CONTROLLER_CPUS = 1

_ROLLOUT = "actor_rollout_ref.rollout"
_LEAST_UNITS = 8
UNITS_KEY = "transfer_queue.backend.SimpleStorage.num_data_storage_units"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The resources of one node, used or not."""

    cpus: float
    gpus: float
    """Including logical ones."""

    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal placement groups; each group needs one node, and several groups may share a node."""

    keys: str
    """The config keys that decide the pool, for messages."""

    groups: int
    processes: int
    """Processes of a group; each takes 1 GPU."""

    cpus_per_process: int = TRAINING_CPUS

    @property
    def cpus(self) -> int:
        """CPUs of a group."""
        return self.processes * self.cpus_per_process


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Everything that a run places at the same time."""

    pools: tuple[Pool, ...]
    storage_units: int
    controller_cpus: int = CONTROLLER_CPUS

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.groups * pool.processes for pool in self.pools)

    @property
    def cpus(self) -> int:
        """CPUs of pools, storage and controller, which a single machine must have."""
        pools = sum(pool.groups * pool.cpus for pool in self.pools)
        return pools + self.storage_units + self.controller_cpus


def need_of(config: Mapping[str, Any]) -> Need | None:
    """The need of a run, from its resolved config.

    Returns:
        None if a number that it needs is wrong; `verl_mixed.checks.preflight` reports which.
    """
    pools = [_pool(config, "trainer")]
    if at(config, "trainer.v1.trainer_mode") == "mixed_separate_async":
        pools.append(_replicas(config))
    units = storage_units(config)
    if None in pools or units is None:
        return None
    return Need(pools=tuple(pool for pool in pools if pool is not None), storage_units=units)


def storage_units(config: Mapping[str, Any]) -> int | None:
    """TransferQueue's storage units, each with an equal part of the rows; None if a number that
    they depend on is wrong."""
    if at(config, "transfer_queue.backend.storage_backend", "SimpleStorage") != "SimpleStorage":
        return 0
    units = at(config, UNITS_KEY)
    if units is None:
        separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
        nodes = [at(config, f"{pool}.nnodes") for pool in ("trainer", *[_ROLLOUT] * separate)]
        units = max(_LEAST_UNITS, 2 * sum(nodes)) if all(map(_is_count, nodes)) else None
    return units if _is_count(units) else None


def _pool(config: Mapping[str, Any], section: str) -> Pool | None:
    nodes, processes = at(config, f"{section}.nnodes"), at(config, f"{section}.n_gpus_per_node")
    if not _is_count(nodes) or not _is_count(processes):
        return None
    keys = f"{section}.nnodes={nodes} x n_gpus_per_node={processes}"
    return Pool(keys=keys, groups=nodes, processes=processes)


def _replicas(config: Mapping[str, Any]) -> Pool | None:
    """The pools of the engines of `mixed_separate_async`, one per engine."""
    nodes, per_node = at(config, f"{_ROLLOUT}.nnodes"), at(config, f"{_ROLLOUT}.n_gpus_per_node")
    sizes = [
        at(config, f"{_ROLLOUT}.{kind}_parallel_size", 1)
        for kind in ("tensor_model", "data", "pipeline_model")
    ]
    if not all(map(_is_count, (nodes, per_node, *sizes))):
        return None
    replica = math.prod(sizes)
    processes = min(per_node, replica)
    if replica % processes:
        return None  # verl's own assertion, which fails at once
    return Pool(
        keys=f"{_ROLLOUT}.nnodes={nodes} x n_gpus_per_node={per_node}, replicas of {replica}",
        groups=nodes * per_node // replica * (replica // processes),
        processes=processes,
        cpus_per_process=GENERATING_CPUS,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def own_node(config: Mapping[str, Any], gpus_here: Callable[[], int]) -> Node:
    """The one node of the Ray that a run starts for itself.

    `gpus_here` counts this machine's GPUs; it is called if the config has no number.
    """
    cpus = at(config, "ray_kwargs.ray_init.num_cpus")
    gpus = at(config, "ray_kwargs.ray_init.num_gpus")
    return Node(
        cpus=cpus if isinstance(cpus, int | float) else os.cpu_count() or 1,
        gpus=gpus if isinstance(gpus, int | float) else gpus_here(),
        name="this machine",
    )


def placement_problems(need: Need, nodes: Sequence[Node]) -> list[str]:
    """Why a need can never be placed on these nodes, even if nobody else uses them.

    Returns:
        One sentence each, with the numbers and the remedy; empty if a placement exists.
    """
    if not nodes:
        return ["no node is alive: verl would wait for ever; start the cluster"]
    problems = [problem for pool in need.pools for problem in _pool_problems(pool, nodes)]
    if not problems and not fits(need, nodes):
        problems = [_together(need, nodes)]
    return problems


def _pool_problems(pool: Pool, nodes: Sequence[Node]) -> list[str]:
    """Why this pool could not be placed even if it were the only one."""
    if not pool.groups:
        return [f"{pool.keys}: fewer GPUs than one replica takes; raise them, or lower its sizes"]
    by_gpus = sum(int(node.gpus) // pool.processes for node in nodes)
    both = sum(min(int(node.gpus) // pool.processes, int(node.cpus) // pool.cpus) for node in nodes)
    if min(by_gpus, both) >= pool.groups:
        return []
    wanted = f"{pool.groups} x {pool.processes} GPUs, each on one node"
    if by_gpus < pool.groups:
        return [
            f"{pool.keys} takes {wanted}: there is room for {by_gpus} ({_words(nodes)}), and verl "
            "would wait for ever; ask for fewer, or give Ray more (logical) GPUs or nodes"
        ]
    return [
        f"{pool.keys} takes {wanted} with {pool.cpus} logical CPUs ({pool.cpus_per_process} a "
        f"process): there is room for {both} ({_words(nodes)}), and verl would wait for ever; give "
        "Ray more logical CPUs, which may be more than the machine has "
        "(ray_kwargs.ray_init.num_cpus, NUM_CPUS of a cluster), or ask for fewer processes"
    ]


def _together(need: Need, nodes: Sequence[Node]) -> str:
    pools = "; ".join(
        f"{pool.groups} x ({pool.processes} GPUs, {pool.cpus} CPUs) for {pool.keys}"
        for pool in need.pools
    )
    return (
        f"no room for all of it at once on {_words(nodes)}: {pools}; {need.storage_units} storage "
        f"units of 1 CPU in turn over the nodes ({UNITS_KEY}), {need.controller_cpus} CPU for "
        f"their controller, {need.gpus} GPUs and {need.cpus} CPUs in all: verl would wait for "
        "ever; give Ray more logical CPUs, which may be more than the machine has "
        "(ray_kwargs.ray_init.num_cpus, NUM_CPUS of a cluster), or more GPUs or nodes"
    )


def _words(nodes: Sequence[Node]) -> str:
    """The nodes grouped by size, as in `2 nodes of 8 GPUs and 96 CPUs`."""
    sizes: dict[tuple[float, float], list[str]] = {}
    for node in nodes:
        sizes.setdefault((node.gpus, node.cpus), []).append(node.name)
    return ", ".join(
        f"{names[0] or '1 node' if len(names) == 1 else f'{len(names)} nodes'} of {gpus:g} GPUs "
        f"and {cpus:g} CPUs"
        for (gpus, cpus), names in sizes.items()
    )


def fits(need: Need, nodes: Sequence[Node]) -> bool:
    """Whether some placement of everything exists: pools, storage units and controller.

    It goes through the nodes and keeps every possible remainder. This is exact, because a node that
    can take one more group of a pool may always take it.
    """
    pools = sorted((pool for pool in need.pools if pool.groups), key=lambda pool: -pool.processes)
    units, longer = divmod(need.storage_units, len(nodes))
    left = (tuple(pool.groups for pool in pools), longer, need.controller_cpus)
    states = {left}
    for node in sorted(nodes, key=lambda node: (-node.gpus, -node.cpus)):
        states = {
            (groups, more, controller)
            for state in states
            for more in ((state[1],) if not state[1] else (state[1], state[1] - 1))
            for controller in {state[2], 0}
            for groups in _after(
                pools,
                state[0],
                int(node.gpus),
                int(node.cpus) - units - (state[1] - more) - (state[2] - controller),
            )
        }
    return ((0,) * len(pools), 0, 0) in states


def _after(
    pools: Sequence[Pool], left: tuple[int, ...], gpus: int, cpus: int
) -> list[tuple[int, ...]]:
    """The possible remainders of the pools after a node took all that it can.

    None is possible if storage alone is too much for the node.
    """
    if cpus < 0:
        return []
    if not pools:
        return [()]
    pool, others = pools[0], pools[1:]
    most = min(left[0], gpus // pool.processes, cpus // pool.cpus)
    return [
        (left[0] - taken, *rest)
        for taken in ([most] if not others else range(most, -1, -1))
        for rest in _after(
            others, left[1:], gpus - taken * pool.processes, cpus - taken * pool.cpus
        )
    ]
