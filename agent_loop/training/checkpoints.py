"""Checkpoints of a mixed trainer: what is saved beside verl's files, and how a run goes on.

verl adapter: `_save_checkpoint` and `_load_checkpoint` of trainer/ppo/v1/trainer_base.py at 0.9.1.
The ledger lines and the trajectories of a step are on disk before its checkpoint. A kill at any
moment therefore leaves a ledger without a gap. On resume, lines and files of later steps than the
checkpoint are removed, because those steps are trained again.

This module removes old checkpoints, in verl's place. verl removes only weights, remembers only what
its process saved, and with one checkpoint to keep removes it before the next one is complete.
"""

# verl's methods are matched by name; their parameters are untyped or wider than those used here.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import json
from pathlib import Path

import transfer_queue as tq
from omegaconf import open_dict
from verl.utils.debug import marked_timer

from agent_loop.records.run_folder import (
    TRACKER,
    checkpoint_to_resume,
    tracked_step,
    trajectory_files,
    write_lines,
    write_text,
)
from agent_loop.training.retention import prune_checkpoints, remove_checkpoint
from agent_loop.training.trainer_state import TrainerState
from samplers.ledger import LedgerEntry, read_ledger
from samplers.uid import group_of, prompt_of

KL_FILE = "kl_coefficient.txt"
"""In a checkpoint: the adaptive coefficient of KL in the reward, which verl does not save."""


class Checkpoints(TrainerState):
    def _save_checkpoint(self) -> None:
        self._writer.flush()
        trainer = self.config.trainer
        keep = trainer.max_actor_ckpt_to_keep
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if keep is not None:
            self._prune_checkpoints(max(1, keep - 1))  # there is room for the new one
        if folder.is_dir() or folder.is_symlink():
            remove_checkpoint(folder)  # interrupted, or of steps that are trained again
        folder.mkdir(parents=True)
        write_lines(folder / "metrics.jsonl", [self._line(self._step_metrics)])
        if self.config.algorithm.use_kl_in_reward:
            write_text(folder / KL_FILE, repr(float(self.kl_ctrl_in_reward.value)))
        trainer.max_actor_ckpt_to_keep = trainer.max_critic_ckpt_to_keep = None
        try:
            super()._save_checkpoint()
        finally:
            trainer.max_actor_ckpt_to_keep = trainer.max_critic_ckpt_to_keep = keep
        self._saved_step = self.global_steps
        if self._artifacts is not None:
            self._artifacts.log("checkpoint", self.global_steps, folder)
        self._prune_checkpoints(keep)

    def _prune_checkpoints(self, keep: int | None) -> None:
        """Remove all but the newest and the one that `resume_path` names for the next start."""
        trainer = self.config.trainer
        checkpoints, named = Path(trainer.default_local_dir), []
        if trainer.resume_mode == "resume_path":
            path = Path(trainer.resume_from_path)
            if path.parent.resolve() == checkpoints.resolve():
                named = [int(path.name.removeprefix("global_step_"))]
        prune_checkpoints(checkpoints, keep, has_queue=self.trainer_mode != "sync", named=named)

    def on_step_end(self) -> None:
        self._stopping = self._stop_file.exists()
        if self._stopping and self._saved_step != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        super().on_step_end()

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        checkpoints = Path(trainer.default_local_dir)
        latest = checkpoint_to_resume(checkpoints, lambda: self.ledger.last_step)
        if tracked_step(checkpoints) is None:  # verl cannot read one that a kill left empty
            _write_tracker(checkpoints, latest)
        super()._load_checkpoint()
        step = self.global_steps
        is_named = trainer.resume_mode == "resume_path"
        folder = Path(trainer.resume_from_path) if is_named else checkpoints / f"global_step_{step}"
        coefficient = folder / KL_FILE
        if self.config.algorithm.use_kl_in_reward and coefficient.exists():
            self.kl_ctrl_in_reward.value = float(coefficient.read_text())
        if trainer.resume_mode != "auto":
            _write_tracker(checkpoints, step)
        self.ledger.rewind(step)
        self.ledger.begin(self.plan.description())
        if self.plan.policy is not None:
            started = step - step % self.plan.policy.window
            lines = read_ledger(self.ledger.path)
            self._window = [e for e in lines if isinstance(e, LedgerEntry) and e.step > started]
        self._clear_restored_rows()
        line = folder / "metrics.jsonl"
        checkpointed = json.loads(line.read_text(encoding="utf-8")) if line.exists() else None
        self.metrics_file.rewind(step if step else -1, checkpointed)
        for path in trajectory_files(self.trajectory_dir):
            if int(path.stem) > step:
                path.unlink()
        if step:
            with open_dict(self.config):
                # Step 0 was validated at the first start.
                self.config.trainer.val_before_train = False

    def _clear_restored_rows(self) -> None:
        """Remove rows of a restored TransferQueue that no step will train.

        These are the rows of the step that was checkpointed, and the prompts of sources that are no
        longer in the mixture.
        """
        items = (tq.kv_list("train") or {}).get("train", {}) if self.trainer_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        kept = {uid for uid in prompts if prompt_of(uid)[0] in self.mixed.ratios}
        keys = [key for key in items if group_of(key) not in kept]
        if keys:
            tq.kv_clear(keys=keys, partition_id="train")
        self._restored_tq_prompt_count = len(kept)


def _write_tracker(checkpoints: Path, step: int) -> None:
    """Let the next start resume from a step; from the beginning if the step has no checkpoint."""
    tracker = checkpoints / TRACKER
    if (checkpoints / f"global_step_{step}" / "data.pt").exists():
        tracker.write_text(str(step))
    else:
        tracker.unlink(missing_ok=True)
