"""The rows of a dataset in the order of a mixture plan.

A row is read when its prompt is drawn, in the trainer's process. Agent loops tokenise prompts and
process images, so a text takes 0.04 ms here and an image of one megapixel, which is decoded, 15 ms.
Worker processes would have to send the decoded images back and begin anew after a give-back.
"""

# pyarrow comes with partial types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from samplers.mixture_plan import MixturePlan, PlannedPrompt
from samplers.row_names import row_id


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


class MixtureRows:
    """Comes before verl's dataset among the base classes of a dataset that is drawn by a plan.

    Only `draw` follows the plan. `dataset[i]` is row i of the files, so the same class serves for
    validation. The state is that of the plan; a dataset without a plan has an empty one.
    """

    dataframe: Any
    """verl's, a `datasets.Dataset`; a dataset of another kind has none."""

    plan: MixturePlan | None = None
    index: Mapping[str, NDArray[np.int64]]
    """Source -> its rows in the dataset."""

    on_change: str = "refuse"
    """See `MixturePlan.load_state_dict`."""

    def follow(self, plan: MixturePlan, index: Mapping[str, NDArray[np.int64]]) -> None:
        """Draw by this plan from now on."""
        self.plan, self.index = plan, index

    def sources(self) -> dict[str, NDArray[np.int64]]:
        """`rows_by_source` of this dataset; errors as there."""
        table = self._table
        if table is None:
            rows: Any = self
            return rows_by_source([rows[row]["data_source"] for row in range(len(rows))])
        return rows_by_source(table.with_format("arrow")["data_source"][:])

    def draw(
        self, wanted: int | Mapping[str, int]
    ) -> tuple[list[PlannedPrompt], list[dict[str, Any]]]:
        """(prompts, their rows), in the order in which they were drawn.

        Args:
            wanted: number of the next prompts of the stream; or source -> number of prompts outside
                the stream, which replace prompts that were lost.
        """
        assert self.plan is not None, "`follow` comes first"
        drawn = self.plan.take(wanted) if isinstance(wanted, int) else self.plan.replace(wanted)
        rows: Any = self
        return drawn, [rows[int(self.index[own.source][own.row])] for own in drawn]

    def row_id(self, source: str, row: int) -> str:
        """`extra_info.row_id` of a row of a source; without one, a name made from its content."""
        rows: Any = self if self._table is None else self._table
        stored = rows[int(self.index[source][row])]
        given = (stored.get("extra_info") or {}).get("row_id")
        return str(given) if given else row_id(source, stored)

    @property
    def _table(self) -> Any:
        """verl's table of rows; None where the dataset has none, or one of another kind."""
        table = getattr(self, "dataframe", None)
        return table if hasattr(table, "with_format") else None

    def state_dict(self) -> dict[str, Any]:
        """That of the plan, with the base class's own."""
        state = {} if self.plan is None else self.plan.state_dict()
        base = getattr(super(), "state_dict", None)
        return state if base is None else state | {"base": base()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; errors as `MixturePlan.load_state_dict`."""
        if self.plan is not None:
            self.plan.load_state_dict(state, on_change=self.on_change)
        if "base" in state:
            super().load_state_dict(state["base"])  # type: ignore[misc]
