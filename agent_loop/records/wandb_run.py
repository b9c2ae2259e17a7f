"""Weights & Biases: a table with some trajectories of each step, and the end of its process.

wandb adapter: 0.31. verl starts the run itself (utils/tracking.py).
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from agent_loop.records.trajectory_record import TrajectoryRecord

COLUMNS = (
    *("step", "source", "row_id", "key", "reward", "acc", "advantage", "stop_reason"),
    *("turns", "tool_calls", "tokens", "trained_tokens", "prompt", "response"),
)


def shown(trajectories: Iterable[TrajectoryRecord], per_source: int = 4) -> list[TrajectoryRecord]:
    """The trajectories of a step that are sent, with all their rows: for each source, the first
    ones of the prompt that was drawn first."""
    sessions: dict[str, dict[str, list[TrajectoryRecord]]] = defaultdict(dict)
    for row in sorted(trajectories, key=lambda t: (t.source, t.draw, t.key)):
        sessions[row.source].setdefault(row.session, []).append(row)
    return [
        row for own in sessions.values() for rows in list(own.values())[:per_source] for row in rows
    ]


def trajectory_rows(
    trajectories: Iterable[TrajectoryRecord],
    decode: Callable[[Sequence[int]], str],
    *,
    step: int,
) -> list[list[Any]]:
    """Rows of `COLUMNS` of whole records. In the response, each text is preceded by its author, as
    `[model] ...`."""
    return [
        [
            *(step, t.source, t.row_id, t.key, t.reward, t.acc, t.advantage),
            *(t.stop_reason, len(t.turns), len(t.calls)),
            *(t.response_tokens, t.trained_tokens, decode(np.asarray(t.prompt_ids).tolist())),
            "\n".join(f"[{segment.author}] {segment.text}" for segment in t.segments),
        ]
        for t in trajectories
    ]


def log_table(rows: Sequence[Sequence[Any]], step: int) -> None:
    """Log the rows as the table `trajectories`; does nothing without a run."""
    import wandb

    if wandb.run is not None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        wandb.log({"trajectories": table}, step=step)


def end_service() -> None:
    """End wandb's process before Ray does, because wandb's exit hook would report an error."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()
