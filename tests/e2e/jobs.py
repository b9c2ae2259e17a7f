"""Real runs on the laptop profile: their commands, their folders, and how they are started."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samplers.ledger import Decision, read_ledger
from tests.json_lines import read_lines
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
QUOTAS = {"taco": 3, "nq": 3, "math": 4}
"""Of a batch of 10."""

CONTROL = ("mixed.control.window=1", "mixed.control.floor=0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, its command and where it is started."""

    mode: str
    command: list[str]
    work: Path

    @property
    def folder(self) -> Path:
        return self.work / "runs" / self.mode

    def steps(self) -> int:
        """Steps in the ledger."""
        return max((line.get("step", 0) for line in self.ledger()), default=0)

    def ledger(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "ledger.jsonl")

    def saved(self) -> int:
        """Step of the last whole checkpoint."""
        tracker = self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def is_saving(self) -> bool:
        """Whether a checkpoint past the fourth step is begun and not whole."""
        return any(
            int(path.name.split("_")[-1]) >= 4 and not (path / "data.pt").exists()
            for path in (self.folder / "checkpoints").glob("global_step_*")
        )


def decisions(job: Job) -> list[Decision]:
    lines = read_ledger(job.folder / "ledger.jsonl")
    return [line for line in lines if isinstance(line, Decision)]


def job_of(mode: str, demo: Path, work: Path, overrides: Sequence[str], steps: int) -> Job:
    files = {
        split: ",".join(str(demo / f"{name}_{split}.parquet") for name in QUOTAS)
        for split in ("train", "val")
    }
    command = [
        *(sys.executable, "-m", "verl_mixed", "train"),
        f"data.train_files=[{files['train']}]",
        f"data.val_files=[{files['val']}]",
        f"actor_rollout_ref.model.path={demo / 'model'}",
        f"mixed.experiment={mode}",
        "data.train_batch_size=10",
        "data.val_max_samples=6",
        "actor_rollout_ref.rollout.n=4",
        # an untrained model earns nothing, so this is what moves the weights
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        f"ray_kwargs.ray_init.dashboard_port={free_ports(1)[0]}",
        *overrides,
    ]
    return Job(mode=mode, command=command, work=work)


def start(command: list[str], work: Path, out: Path, **settings: str) -> subprocess.Popen[bytes]:
    """A launcher; modules in `work` can be imported, as a user's own beside the checkout."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{work}"}
    environ.pop("RAY_ADDRESS", None)
    environ |= settings
    with out.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=work,  # runs/ is made in the folder that the launcher starts in
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], out: Path, *, expected: int = 0) -> str:
    """Wait for the end, and return what was printed."""
    try:
        code = process.wait(timeout=DEADLINE_S)
    finally:
        process.terminate()  # the launcher ends its children; nothing happens to one that is done
    text = out.read_text(errors="replace")
    assert code == expected, text[-4000:]
    return text
