"""Artifacts at Weights & Biases: the checkpoints and trajectory files of a run.

wandb adapter: 0.31. verl starts the run itself (utils/tracking.py). wandb reads the files while
training goes on, and offline only when `wandb sync` sends them. Until then the run may have removed
or replaced them. Therefore an artifact has files of its own: hard links in a folder `.wandb` beside
the files, which take no time and no space as long as the original is there.
"""

import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

LINKS = ".wandb"
"""Folder with the files of artifacts, beside the files themselves."""


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
