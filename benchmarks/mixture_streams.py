"""Our plan and its peers behind one small interface, for `mixture_plan.py` to measure.

Every stream here mixes three sources by `RATIOS` into batches of `BATCH_SIZE`. Sources lie one
behind the other, so one number, the global row, tells both source and row. Each peer is used the
way its own project uses it and as lean as that allows; where it does less work than ours, its
`note` says so.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

BATCH_SIZE = 256
RATIOS = (0.4, 0.3, 0.3)
SEED = 0


class Stream(ABC):
    """One mixture, read batch by batch.

    Args:
        sizes: rows of each source, in the order of `RATIOS`.
        cache: folder for what the peer keeps on disk between runs; None keeps nothing.
    """

    label: ClassVar[str]
    """Name in the tables."""

    package: ClassVar[str | None]
    """Distribution whose version is printed."""

    library: ClassVar[str]
    """Module to import before the clock starts; a stream whose module is absent is left out."""

    note: ClassVar[str]
    """What a reader of the tables must know of it."""

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        self.starts = np.cumsum([0, *sizes[:-1]])  # (S,) global row of each source's first row

    @abstractmethod
    def next_batch(self) -> Any:
        """The next batch, in whatever form this library gives it."""

    @abstractmethod
    def rows(self, batch: Any) -> NDArray[np.int64]:
        """(B,) global rows of a batch; not part of what is timed."""

    @abstractmethod
    def state(self) -> Any:
        """What a checkpoint would hold."""

    @abstractmethod
    def resume(self, state: Any) -> None:
        """Continue a stream just built where `state` was taken."""

    def advance(self, batches: int) -> None:
        """Move on by `batches`; streams with random access override this."""
        for _ in range(batches):
            self.next_batch()


class Ours(Stream):
    label = "ours: MixturePlan"
    package = None
    library = "samplers.mixture_plan"
    note = "exact ratios, rows shuffled"

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        from samplers.mixture_plan import MixturePlan

        super().__init__(sizes)
        names = ("a", "b", "c")  # sorted, so that source ids follow the order of RATIOS
        self.plan = MixturePlan(
            dict(zip(names, sizes, strict=True)),
            dict(zip(names, RATIOS, strict=True)),
            BATCH_SIZE,
            SEED,
        )
        self.batch_index = 0

    def next_batch(self) -> Any:
        batch = self.plan.batch(self.batch_index)
        self.batch_index += 1
        return batch

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return self.starts[batch.source_ids] + batch.rows

    def state(self) -> Any:
        self.plan.position = self.batch_index * BATCH_SIZE
        return self.plan.state_dict()

    def resume(self, state: Any) -> None:
        self.plan.load_state_dict(state)
        self.batch_index = self.plan.position // BATCH_SIZE

    def advance(self, batches: int) -> None:
        self.batch_index += batches


class _MegatronSource:
    """The least that BlendedDataset asks of a dataset; a sample is its own row number."""

    index_split = SimpleNamespace(name="train")

    def __init__(self, number: int, size: int):
        self.size = size
        self.unique_identifiers = {"number": number, "size": size}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, int]:
        return {"row": row}


class MegatronBlended(Stream):
    label = "megatron-core: BlendedDataset"
    package = "megatron-core"
    library = "megatron.core.datasets.blended_dataset"
    note = (
        "an index for all samples, read sample by sample as its loader does; rows in order (its "
        "datasets shuffle, with an index of their own that is not counted); resumes from the index "
        "on disk, 10 bytes a sample, not counted in the state"
    )

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        import torch
        from megatron.core.datasets.blended_dataset import (  # pyright: ignore[reportMissingImports]
            BlendedDataset,
        )

        super().__init__(sizes)
        if cache is not None and not any(cache.glob("*.npy")):  # it asks for a rank before it saves
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{cache}/rendezvous", rank=0, world_size=1
            )
        config = SimpleNamespace(
            path_to_cache=None if cache is None else str(cache),
            defer_npy_index_mmap=False,
            fast_cache_load=False,
            mid_level_dataset_surplus=0.005,
        )
        sources = [_MegatronSource(number, size) for number, size in enumerate(sizes)]
        self.dataset = BlendedDataset(sources, list(RATIOS), sum(sizes), config)
        self.consumed_samples = 0

    def next_batch(self) -> Any:
        first = self.consumed_samples
        self.consumed_samples += BATCH_SIZE
        dataset = self.dataset
        return [dataset[i] for i in range(first, first + BATCH_SIZE)]

    def rows(self, batch: Any) -> NDArray[np.int64]:
        source_ids = np.array([sample["dataset_id"] for sample in batch])
        return self.starts[source_ids] + np.array([sample["row"] for sample in batch])

    def state(self) -> Any:
        return {"consumed_samples": self.consumed_samples}

    def resume(self, state: Any) -> None:
        self.consumed_samples = state["consumed_samples"]

    def advance(self, batches: int) -> None:
        self.consumed_samples += batches * BATCH_SIZE


class MegatronHelper(Stream):
    label = "megatron-core: C++ helper alone"
    package = "megatron-core"
    library = "megatron.core.datasets.helpers"
    note = (
        "build_blending_indices without the dataset around it, its two arrays sliced by hand: the "
        "least that this way of mixing can cost; rows in order; resumes by building again"
    )

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        from megatron.core.datasets import helpers  # pyright: ignore[reportMissingImports]

        super().__init__(sizes)
        self.source_ids = np.zeros(sum(sizes), dtype=np.int16)
        self.source_rows = np.zeros(sum(sizes), dtype=np.int64)
        weights = np.array(RATIOS)
        helpers.build_blending_indices(
            self.source_ids, self.source_rows, weights, len(sizes), sum(sizes), False
        )
        self.consumed_samples = 0

    def next_batch(self) -> Any:
        here = slice(self.consumed_samples, self.consumed_samples + BATCH_SIZE)
        self.consumed_samples += BATCH_SIZE
        return self.source_ids[here].copy(), self.source_rows[here].copy()

    def rows(self, batch: Any) -> NDArray[np.int64]:
        source_ids, source_rows = batch
        return self.starts[source_ids] + source_rows

    def state(self) -> Any:
        return {"consumed_samples": self.consumed_samples}

    def resume(self, state: Any) -> None:
        self.consumed_samples = state["consumed_samples"]

    def advance(self, batches: int) -> None:
        self.consumed_samples += batches * BATCH_SIZE


class VerlRandomSampler(Stream):
    label = "verl: torchdata RandomSampler"
    package = "torchdata"
    library = "torchdata.stateful_dataloader.sampler"
    note = (
        "what verl's create_rl_sampler returns, in the BatchSampler of its loader, without "
        "fetching rows; it knows no ratios, a source's share is its share of all rows; rows "
        "shuffled; resuming draws their order three times, as in the loader"
    )

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        import torch
        from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler

        super().__init__(sizes)
        generator = torch.Generator()
        generator.manual_seed(SEED)
        sampler = RandomSampler(data_source=range(sum(sizes)), generator=generator)
        self.batches = iter(BatchSampler(sampler, BATCH_SIZE, drop_last=True))

    def next_batch(self) -> Any:
        return next(self.batches)

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return np.array(batch)

    def state(self) -> Any:
        return self.batches.state_dict()

    def resume(self, state: Any) -> None:
        self.batches.load_state_dict(state)


class TorchdataWeighted(Stream):
    label = "torchdata: MultiNodeWeightedSampler"
    package = "torchdata"
    library = "torchdata.nodes"
    note = "draws the source of each prompt at random; rows shuffled by torch's RandomSampler"

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        import torch
        from torch.utils.data import RandomSampler
        from torchdata.nodes import Batcher, MultiNodeWeightedSampler, SamplerWrapper, StopCriteria

        class GlobalRows(RandomSampler):
            """Tells the source by its rows, for less than torchdata's Mapper node takes."""

            first_row: int

            def __iter__(self) -> Iterator[int]:
                return map(self.first_row.__add__, super().__iter__())

        super().__init__(sizes)
        nodes: dict[str, Any] = {}
        for number, (start, size) in enumerate(zip(self.starts.tolist(), sizes, strict=True)):
            generator = torch.Generator()
            generator.manual_seed(SEED + number)
            sampler = GlobalRows(range(size), generator=generator)
            sampler.first_row = start
            nodes[str(number)] = SamplerWrapper(sampler)
        mixed = MultiNodeWeightedSampler(
            nodes,
            dict(zip(nodes, RATIOS, strict=True)),
            stop_criteria=StopCriteria.CYCLE_FOREVER,
            seed=SEED,
        )
        self.batches = Batcher(mixed, BATCH_SIZE)

    def next_batch(self) -> Any:
        return next(self.batches)

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return np.array(batch)

    def state(self) -> Any:
        return self.batches.state_dict()

    def resume(self, state: Any) -> None:
        self.batches.reset(state)


class GrainMix(Stream):
    label = "grain: MapDataset.mix"
    package = "grain"
    library = "grain"
    note = (
        "turns ratios into whole numbers, the smallest 100, so 0.4 becomes 133/333; rows shuffled; "
        "without reader threads"
    )

    def __init__(self, sizes: Sequence[int], cache: Path | None = None):
        import grain  # pyright: ignore[reportMissingImports]

        super().__init__(sizes)
        stops = itertools.accumulate(sizes)
        sources = [
            grain.MapDataset.range(start, stop).shuffle(seed=SEED)
            for start, stop in zip(self.starts.tolist(), stops, strict=True)
        ]
        mixed = grain.MapDataset.mix(sources, list(RATIOS)).batch(BATCH_SIZE)
        # Threads would read ahead: the same work, and a first batch that waits for others.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self.batches = iter(mixed.to_iter_dataset(options))

    def next_batch(self) -> Any:
        return next(self.batches)

    def rows(self, batch: Any) -> NDArray[np.int64]:
        return np.asarray(batch)

    def state(self) -> Any:
        return self.batches.get_state()

    def resume(self, state: Any) -> None:
        self.batches.set_state(state)

    def advance(self, batches: int) -> None:
        state = self.batches.get_state()
        self.batches.set_state({**state, "next_index": state["next_index"] + batches})


STREAMS: tuple[type[Stream], ...] = (
    Ours,
    MegatronBlended,
    MegatronHelper,
    VerlRandomSampler,
    TorchdataWeighted,
    GrainMix,
)
