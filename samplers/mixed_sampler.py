"""The mixture plan as verl's dataloader: prompts in the order of the plan.

Each source has its own `StatefulDataLoader`, which may read ahead in worker processes. Rows that
were read ahead are not part of the state: the plan counts the prompts that were taken, and after a
restart the loaders begin there.
"""

# torch and torchdata come with partial types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from samplers.mixture_plan import MixturePlan, PlannedPrompt

_AHEAD = 256  # draws that a sampler computes at a time


def rows_by_source(data_sources: Any) -> dict[str, NDArray[np.int64]]:
    """source -> (rows of the source,) dataset index of each; sources by their first appearance.

    Args:
        data_sources: (N,) the dataset's `data_source` column: a pyarrow column or a sequence.

    Raises:
        ValueError: a row has no source.
    """
    chunked = isinstance(data_sources, pa.ChunkedArray)
    column: Any = data_sources.combine_chunks() if chunked else pa.array(data_sources)
    if column.null_count:
        raise ValueError(f"data_source is null in {column.null_count} rows: each needs its source")
    if not len(column):
        return {}
    encoded = column.dictionary_encode()
    codes = np.asarray(encoded.indices)
    order = np.argsort(codes, kind="stable")
    bounds = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))[:-1]
    names = encoded.dictionary.to_pylist()
    return dict(zip(names, np.split(order, bounds), strict=True))


class SourceSampler(Sampler[int]):
    """Endless dataset rows of one source, in the order of the plan.

    Args:
        index: (rows of the source,) dataset index of each of its rows.
    """

    def __init__(
        self, plan: MixturePlan, source: str, index: NDArray[np.int64], first_draw: int
    ) -> None:
        self._plan, self._source, self._index = plan, source, index
        self._first_draw = first_draw

    def __iter__(self) -> Iterator[int]:
        draw = self._first_draw
        while True:
            rows = self._plan.rows(self._source, np.arange(draw, draw + _AHEAD))
            yield from self._index[rows].tolist()
            draw += _AHEAD


class PlanStream:
    """The object that verl uses as its training dataloader, and saves in checkpoints.

    Args:
        dataset: all rows of all sources, by number.
        index: `rows_by_source` of the dataset.
        collate: verl's collate function: rows -> columns.
        workers: processes that read ahead, for all sources together; 0 reads on demand.
        on_change: see `MixturePlan.load_state_dict`.
    """

    def __init__(
        self,
        dataset: Any,
        plan: MixturePlan,
        index: Mapping[str, NDArray[np.int64]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        *,
        workers: int = 0,
        on_change: str = "refuse",
    ) -> None:
        self.dataset: Any = dataset
        self.plan: MixturePlan = plan
        self._index, self._collate = index, collate
        self._workers, self._on_change = workers, on_change
        self._loaders: dict[str, tuple[int, Iterator[dict[str, Any]]]] = {}
        """source -> (the next draw of its loader, the loader)."""

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, prompts: int) -> tuple[list[PlannedPrompt], dict[str, Any]]:
        """(the next prompts of the stream, their columns), both in stream order."""
        return self._read(self.plan.take(prompts))

    def replace(self, wanted: Mapping[str, int]) -> tuple[list[PlannedPrompt], dict[str, Any]]:
        """The same as `take` for a number of prompts per source, outside the stream's order."""
        return self._read(self.plan.replace(wanted))

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; errors as `MixturePlan.load_state_dict`."""
        self.plan.load_state_dict(state, on_change=self._on_change)

    def _read(self, planned: list[PlannedPrompt]) -> tuple[list[PlannedPrompt], dict[str, Any]]:
        return planned, self._collate([self._row(prompt) for prompt in planned])

    def _row(self, prompt: PlannedPrompt) -> dict[str, Any]:
        at, rows = self._loaders.get(prompt.source, (-1, iter(())))
        if at != prompt.draw:  # the loader is new, or draws were given back, or a state was loaded
            rows = self._open(prompt.source, prompt.draw)
        self._loaders[prompt.source] = prompt.draw + 1, rows
        return next(rows)

    def _open(self, source: str, draw: int) -> Iterator[dict[str, Any]]:
        sampler = SourceSampler(self.plan, source, self._index[source], draw)
        if not self._workers:
            return (self.dataset[row] for row in sampler)
        return iter(
            StatefulDataLoader(
                self.dataset,
                batch_size=1,
                sampler=sampler,
                num_workers=max(1, self._workers // len(self._index)),
                collate_fn=itemgetter(0),
            )
        )
