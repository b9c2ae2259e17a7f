"""Weights & Biases: a table with some trajectories of each step, artifacts of checkpoints and of
trajectory files, and the end of its process.

wandb adapter: 0.31. verl starts the run itself (utils/tracking.py). wandb reads the files of an
artifact while training goes on, and offline only when `wandb sync` sends them. Until then the run
may have removed or replaced them. Therefore an artifact has files of its own: hard links in a
folder `.wandb` beside the files, which take no time and no space as long as the original is there.
"""

import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agent_loop.records.trajectory_record import TrajectoryRecord

logger = logging.getLogger(__name__)

LINKS = ".wandb"
"""Folder with the files of artifacts, beside the files themselves."""

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


class Artifacts:
    """Logs artifacts in a thread of its own, one after the other.

    Each step with a checkpoint or with trajectories is a version of the artifact
    `<experiment>-checkpoint` or `<experiment>-trajectories`, with the alias `step-<N>`. An error is
    logged and ends no run.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mixed-artifacts")

    def log(self, kind: Literal["checkpoint", "trajectories"], step: int, path: Path) -> None:
        """Log a file, or all files of a folder; does nothing without a run of wandb."""
        import wandb

        if wandb.run is None:
            return
        links = path.parent / LINKS / f"{step}-{time.time_ns()}"
        try:
            if path.is_dir():
                shutil.copytree(path, links, copy_function=os.link)
            else:
                links.mkdir(parents=True)
                os.link(path, links / path.name)
        except OSError as error:
            # another kind of disk: wandb gets the file itself, if it reads it in time
            logger.warning("no hard links for the %s of step=%d: %s", kind, step, error)
            shutil.rmtree(links, ignore_errors=True)
        self._thread.submit(self._log, kind, step, links if links.exists() else path, links)

    def _log(self, kind: str, step: int, files: Path, links: Path) -> None:
        import wandb

        try:
            assert wandb.run is not None, "the run ends after this thread"
            artifact = wandb.Artifact(
                f"{self._experiment}-{kind}", type=kind, metadata={"step": step}
            )
            # immutable: wandb reads the files where they are, and makes no copy of them
            if files.is_dir():
                artifact.add_dir(str(files), policy="immutable", skip_cache=True)
            else:
                artifact.add_file(str(files), policy="immutable", skip_cache=True)
            logged = wandb.run.log_artifact(artifact, aliases=["latest", f"step-{step}"])
            if wandb.run.offline:
                return  # `wandb sync` reads the links later
            logged.wait()
        except Exception as error:  # wandb raises what it likes
            logger.warning(
                "the %s of step=%d is no artifact: %s: %s", kind, step, type(error).__name__, error
            )
        shutil.rmtree(links, ignore_errors=True)

    def shutdown(self) -> None:
        """Wait until everything is logged, and sent if wandb is online."""
        self._thread.shutdown()


def end_service() -> None:
    """End wandb's process before Ray does, because wandb's exit hook would report an error."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()
