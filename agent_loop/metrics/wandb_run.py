"""What Weights & Biases gets besides the numbers, some trajectories of a step as a table; its end.

wandb adapter: 0.31. verl starts the run itself (utils/tracking.py).
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_loop.metrics.source_metrics import TrainedTrajectory

COLUMNS = (
    *("step", "source", "row_id", "key", "reward", "acc", "advantage", "stop_reason"),
    *("turns", "tool_calls", "tokens", "trained_tokens", "prompt", "response"),
)


def trajectory_rows(
    trajectories: Sequence[TrainedTrajectory],
    advantages: Mapping[str, float | None],
    decode: Callable[[Sequence[int]], str],
    *,
    step: int,
    per_source: int = 4,
) -> list[list[Any]]:
    """Rows of `COLUMNS`: of each source, the first trajectories of the prompt drawn first.

    In the response each text says who wrote it, as `[model] ...`.
    """
    by_source: dict[str, list[TrainedTrajectory]] = defaultdict(list)
    for each in sorted(trajectories, key=lambda t: (t.source, t.draw, t.key)):
        by_source[each.source].append(each)
    return [
        [
            *(step, t.source, t.row_id, t.key, t.reward, t.acc, advantages.get(t.key)),
            *(t.record["stop_reason"], len(t.record["turns"]), len(t.record["calls"])),
            *(len(t.response_ids), sum(t.response_mask), decode(t.prompt_ids)),
            "\n".join(f"[{author}] {text}" for author, _, _, text in t.record["segments"]),
        ]
        for own in by_source.values()
        for t in own[:per_source]
    ]


def log_table(rows: Sequence[Sequence[Any]], step: int) -> None:
    """Add the rows to the run of this process as `trajectories`; nothing without a run."""
    import wandb

    if wandb.run is not None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        wandb.log({"trajectories": table}, step=step)


def end_service() -> None:
    """End wandb's own process: Ray ends it before wandb's exit hook, which then reports a fault."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()
