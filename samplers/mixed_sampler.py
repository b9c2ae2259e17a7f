"""The mixture plan as verl's dataloader: whole prompts, in plan order, from a position.

Plain Python over any indexable dataset; the trainer hands in verl's dataset and collate function.
Not a torch sampler: verl asks for any number of prompts at a time, and a plan is a stream of
prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from samplers.mixture_plan import MixturePlan


class Rows(Protocol):
    """A dataset: rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """One prompt of the stream."""

    position: int
    """Its number in the stream, from 0."""

    source: str
    row: int
    """Row within its source, in the order of the files."""


def rows_by_source(data_sources: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Dataset index of each source's rows, in the order they stand in the files.

    Args:
        data_sources: the dataset's `data_source` column, (N,).

    Returns:
        source -> int64 (rows of the source,).
    """
    column = np.asarray(data_sources)
    return {str(name): np.flatnonzero(column == name) for name in dict.fromkeys(column.tolist())}


class PlanStream:
    """Stands where verl keeps its training dataloader, and is checkpointed as one.

    Args:
        dataset: all rows of all sources.
        plan: the mixture over them.
        index: `rows_by_source` of the dataset.
        collate: verl's collate function: rows -> columns.
    """

    def __init__(
        self,
        dataset: Rows,
        plan: MixturePlan,
        index: Mapping[str, NDArray[np.int64]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        self.dataset, self.plan = dataset, plan
        self._index, self._collate = index, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, prompts: int) -> tuple[list[PlannedPrompt], dict[str, Any]]:
        """The next prompts of the stream.

        Returns:
            (what the plan says of each, their columns), both in stream order.
        """
        positions = range(self.plan.position, self.plan.position + prompts)
        drawn = self.plan.prompts(positions)
        planned = [
            PlannedPrompt(position=position, source=self.plan.sources[int(source_id)], row=row)
            for position, source_id, row in zip(
                positions, drawn.source_ids.tolist(), drawn.rows.tolist(), strict=True
            )
        ]
        self.plan.position += prompts
        rows = [self.dataset[int(self._index[p.source][p.row])] for p in planned]
        return planned, self._collate(rows)

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: the plan's fingerprint differs: sources, ratios, batch size or seed changed.
        """
        self.plan.load_state_dict(state)
