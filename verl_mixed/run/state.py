"""A run's folder: its files, its lock, how far the run is, and which changes a resume allows.

The trainer's own files (`metrics.jsonl`, `ledger.jsonl`, checkpoints) are only read here.
"""

import fcntl
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent_loop.records.run_folder import (
    LOCK_FILE,
    STOP_FILE,
    checkpoint_to_resume,
    is_claimed,
    read_metrics,
)
from config.disk import naming, plain_text
from config.lookup import flatten
from config.schema import ControlConfig
from samplers.ledger import last_step_of, read_ledger

HARMLESS = (
    r"trainer\.(total_training_steps|total_epochs|logger|save_freq|test_freq|max_\w+_ckpt_to_keep)",
    r"trainer\.(val_before_train|log_val_generations|resume_mode|resume_from_path)",
    r"(trainer|.*\.trace)\.(project_name|experiment_name)",
    r"mixed\.(max_\w+|on_change|trajectory_\w+|wandb_artifacts)",
    r"ray_kwargs\..*",
    r".*\.multi_turn\.tool_config\.(server_url|max_retries|timeout|max_workers|request_interval)",
    r".*\.multi_turn\.tool_config\.(rate_limit_\w+|burst|enable_global_rate_limit|cache\..*)",
    r"mixed\.rate_limit\..*",
    r"mixed\.tool_server\..*",
    r".*\.num_workers",
    r"data\.dataloader_num_workers",
    r"transfer_queue\..*\.total_storage_size",
    r".*micro_batch_size_per_gpu",
    r"agent_loops\.[^.]+\.hidden",
)
"""Keys that may change when a run is resumed: they change how it runs, not what it learns."""

OF_THE_MIXTURE = (
    r"(mixed|data)\.sources\.(?![^.]+\.(difficulty|curriculum)(\.|$)).*",
    r"mixed\.(seed|apportionment)",
    r"data\.(train_files|train_batch_size)",
    r"actor_rollout_ref\.rollout\.seed",
    r"(actor_rollout_ref\.actor|critic)\.ppo_mini_batch_size",
)
"""Keys that may change too if `mixed.on_change=continue`."""

ABSENT = {
    "mixed.on_truncated": "train",
    "mixed.lead": "auto",
    "mixed.unit": "prompts",
    "mixed.controller": "off",
} | flatten({"mixed": {"control": ControlConfig().model_dump()}})
"""Keys that are newer than some runs -> the value that such a run was trained with."""

_harmless = re.compile("|".join(f"(?:{pattern})" for pattern in HARMLESS))
_of_the_mixture = re.compile("|".join(f"(?:{pattern})" for pattern in OF_THE_MIXTURE))


class RunHeld(RuntimeError):
    """Another process runs this run."""


RUNS = Path("runs")
"""Folder of all runs, relative to the folder that runs start in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The launcher that runs a run."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether the launcher runs on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunFolder:
    """`runs/<experiment>/`, which `claim` makes."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "config.yaml"
        self.command = self.path / "command.txt"
        self.log = self.path / "train.log"
        self.server_log = self.path / "tool_server.log"
        self.versions = self.path / "versions.jsonl"
        self.stop_request = self.path / STOP_FILE
        self.retries = self.path / "retries.json"
        self.failures = self.path / "failures.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.done = self.path / "done"
        self._lock = self.path / LOCK_FILE

    def link_log(self) -> None:
        """Make `logs/train_<time>.log` beside the folder of all runs, a link to `train.log`."""
        link = RUNS.absolute().parent / "logs" / time.strftime("train_%Y%m%d_%H%M%S.log")
        with suppress(OSError):  # a second start in this second, or no links on this file system
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(os.path.relpath(self.log, link.parent))

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the run for this process; the kernel releases the lock when the process ends.

        Raises:
            RunHeld: another launcher holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as lock:
            with naming(self._lock):
                is_ours = _locked(lock)
            if not is_ours:
                raise RunHeld(
                    f"{self.path} is being run by {self._written() or 'another process'}, step "
                    f"{self.last_step()} seen: wait for it, stop it (`verl-mixed stop`), or choose "
                    "another EXPERIMENT_NAME"
                )
            lock.truncate(0)
            lock.write(f"{os.getpid()} {socket.gethostname()}")
            lock.flush()
            yield

    def holder(self) -> Holder | None:
        """The launcher that runs it now; None if there is none.

        Raises:
            RunHeld: a process holds the lock and left no name.
        """
        with naming(self._lock):
            if not is_claimed(self.path):
                return None
        if holder := self._written():
            return holder
        raise RunHeld(f"{self.path} is held by a process that left no name in {self._lock}")

    def claimed_at(self) -> float:
        """When the run was last claimed, seconds since 1970; 0 if never."""
        try:
            return self._lock.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _written(self) -> Holder | None:
        """The launcher named in the lock file; valid only while the lock is held."""
        words = plain_text(self._lock).split()
        if len(words) != 2 or not words[0].isdigit():
            return None
        return Holder(pid=int(words[0]), host=words[1])

    def note_command(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Append a start to `command.txt`: the settings from the environment, then the command."""
        words = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
        line = " ".join([time.strftime("%Y-%m-%dT%H:%M:%S%z"), *words, shlex.join(arguments)])
        with naming(self.command), self.command.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The valid lines of `metrics.jsonl`, in order of steps."""
        return read_metrics(self.metrics)[0]

    def last_step(self) -> int:
        """Highest step with metrics; 0 before the first."""
        return max((line["step"] for line in self.lines()), default=0)

    def has_trained(self) -> bool:
        """Whether a step was trained, so that the next start is a resume."""
        return self.last_step() > 0 or any((self.path / "checkpoints").glob("global_step_*"))

    def saved_step(self) -> int:
        """Step of the checkpoint that the run goes on from by itself; 0 without one."""
        return checkpoint_to_resume(
            self.path / "checkpoints", lambda: last_step_of(read_ledger(self.ledger))
        )

    def wandb_run_id(self) -> str:
        """The run's id at Weights & Biases, made at the first start and kept."""
        path = self.wandb / "run_id"
        if not path.exists():
            self.wandb.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{secrets.token_hex(4)}\n")
        return path.read_text().strip()

    def is_done(self, total_steps: int) -> bool:
        """Whether the trainer ended by itself after this many steps."""
        return self.done.exists() and self.last_step() >= total_steps

    def mark_done(self) -> None:
        """Note in the folder that the trainer ended by itself."""
        self.done.write_text(f"{self.last_step()}\n")


def _locked(lock: IO[str]) -> bool:
    """Try for a second to take the lock; `RunFolder.holder` holds it only for a moment."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


def changes_of_resume(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    is_idle: Callable[[str], bool] = lambda key: False,
    *,
    mixture_may_change: bool = True,
) -> list[str]:
    """The differences between two configs that a resume refuses, as `key: old -> new`.

    The mixture may differ if the new config has `mixed.on_change=continue`, unless
    `mixture_may_change` is False: the records of an evaluation are of one mixture. A key may differ
    if it had and has no effect, which `is_idle` tells.
    """
    old, new = ABSENT | flatten(before), ABSENT | flatten(now)
    free = mixture_may_change and new.get("mixed.on_change") == "continue"
    return [
        f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not _harmless.fullmatch(key)
        and not (free and _of_the_mixture.fullmatch(key))
        and not is_idle(key)
    ]
