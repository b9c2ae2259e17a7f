"""The mixture plan as verl's dataloader: prompts in the order of the plan.

A row is read when its prompt is drawn, in the trainer's process. Agent loops tokenise prompts and
process images, so a text takes 0.04 ms here and an image of one megapixel, which is decoded, 15 ms.
Worker processes would have to send the decoded images back and begin anew after a give-back.
"""

# pyarrow comes with partial types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from samplers.mixture_plan import MixturePlan, PlannedPrompt


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


class PlanStream:
    """The object that verl uses as its training dataloader, and saves in checkpoints.

    Args:
        dataset: all rows of all sources, by number.
        index: `rows_by_source` of the dataset.
        collate: verl's collate function: rows -> columns.
        on_change: see `MixturePlan.load_state_dict`.
    """

    def __init__(
        self,
        dataset: Any,
        plan: MixturePlan,
        index: Mapping[str, NDArray[np.int64]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        *,
        on_change: str = "refuse",
    ) -> None:
        self.dataset: Any = dataset
        self.plan: MixturePlan = plan
        self._index, self._collate, self._on_change = index, collate, on_change

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
        rows = [self.dataset[int(self._index[each.source][each.row])] for each in planned]
        return planned, self._collate(rows)
