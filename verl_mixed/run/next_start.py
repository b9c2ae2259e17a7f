"""What the next start of a run does: begin, resume from a checkpoint, or nothing.

The launcher, `--dry-run`, the scripts and the messages of a run that ended read it here. The
trainer (`agent_loop.training.checkpoints`) takes the checkpoint of `auto` from the same function.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.records.run_folder import tracked_step
from config.lookup import at
from verl_mixed.run.checkpoints import checkpoint_of
from verl_mixed.run.state import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """What a start does with the steps and checkpoints of the run's folder."""

    seen: int
    """Last step with metrics; 0 before the first."""

    checkpoint: Path | None
    """The checkpoint that it goes on from; None: it begins with step 1."""

    step: int
    """Step of the checkpoint; 0 without one."""

    is_complete: bool
    """Whether the run has all its steps, so that nothing is trained."""

    is_own: bool = True
    """Whether the checkpoint is of this run."""

    problem: str = ""
    """Why the start is refused; empty if it is not."""

    @property
    def action(self) -> str:
        """What it does, in words."""
        if self.problem:
            return "is refused"
        if self.is_complete:
            return "trains nothing"
        if self.checkpoint is None:
            return "begins again with step 1"
        return f"resumes from checkpoint {self.checkpoint.name if self.is_own else self.checkpoint}"

    def words(self, length: str) -> str:
        """The state of the run and what the start does; `length` is that of the run in words."""
        if not self.seen and self.checkpoint is None and not self.problem:
            return f"new, {length}"
        steps = f"{self.seen} of {length} seen" if self.seen else f"new, {length}"
        return f"{'complete, ' * self.is_complete}{steps}; {self.action}"


def next_start(folder: RunFolder, config: Mapping[str, Any], total_steps: int) -> NextStart:
    """What a start with this config does; `total_steps` is 0 if the config does not say.

    A `resume_from_path` that is no checkpoint is refused by the check of the config.
    """
    checkpoints = folder.path / "checkpoints"
    mode, given = (at(config, f"trainer.resume_{name}") for name in ("mode", "from_path"))
    checkpoint, problem = None, ""
    is_complete = mode == "auto" and bool(total_steps) and folder.is_done(total_steps)
    if mode == "resume_path" and isinstance(given, str):
        checkpoint = Path(given).expanduser().absolute()
    elif mode == "auto" and (saved := folder.saved_step()):
        checkpoint = checkpoint_of(folder, saved)
    elif mode == "auto" and (lost := tracked_step(checkpoints)) and not is_complete:
        problem = (
            f"{checkpoints}/global_step_{lost} is gone, and the run would go on from it: put it "
            "back, name another (trainer.resume_mode=resume_path "
            "trainer.resume_from_path=...), or begin again (trainer.resume_mode=disable)"
        )
    named = re.fullmatch(r"global_step_(\d+)", checkpoint.name) if checkpoint else None
    step = int(named[1]) if named else 0
    if mode == "resume_path" and 0 < total_steps <= step:
        problem = (
            f"trainer.resume_from_path={given!r}: no step is left after it, with "
            f"trainer.total_training_steps={total_steps}; raise that (TOTAL_TRAINING_STEPS), or "
            "name an earlier checkpoint"
        )
    return NextStart(
        seen=folder.last_step(),
        checkpoint=checkpoint,
        step=step,
        is_complete=is_complete,
        is_own=checkpoint is None or checkpoint.parent == checkpoints,
        problem=problem,
    )
