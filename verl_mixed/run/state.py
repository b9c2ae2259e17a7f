"""A run's folder as the launcher sees it: who holds it, what it was started with, how far it is.

Decides whether a run is new, goes on or is complete, and which changes of its config a resume
allows. The trainer's own files (`metrics.jsonl`, `ledger.jsonl`, checkpoints) are only read here.
"""

import fcntl
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent_loop.training.run_folder import STOP_FILE, read_metrics, whole_checkpoint
from config.lookup import flatten

HARMLESS = (
    r"trainer\.(total_training_steps|logger|save_freq|test_freq|max_\w+_ckpt_to_keep)",
    r"trainer\.(val_before_train|log_val_generations|resume_mode|resume_from_path)",
    r"(trainer|.*\.trace)\.(project_name|experiment_name)",
    r"mixed\.(max_\w+|on_change)",
    r"ray_kwargs\..*",
    r".*\.multi_turn\.tool_config\.(server_url|max_retries|timeout|max_workers|request_interval)",
    r".*\.multi_turn\.tool_config\.(rate_limit_\w+|burst|enable_global_rate_limit|cache\..*)",
    r"mixed\.rate_limit\..*",
    r"mixed\.tool_server\..*",
    r".*\.num_workers",
    r".*micro_batch_size_per_gpu",
)
"""Keys that may change between two starts of a run: they change how it runs, not what it learns."""

OF_THE_MIXTURE = (
    r"(mixed|data)\.sources\..*",
    r"mixed\.(seed|apportionment)",
    r"data\.(train_files|train_batch_size)",
    r"actor_rollout_ref\.rollout\.seed",
    r"(actor_rollout_ref\.actor|critic)\.ppo_mini_batch_size",
)
"""Keys that may also change with `mixed.on_change=continue`."""

_harmless = re.compile("|".join(f"(?:{pattern})" for pattern in HARMLESS))
_of_the_mixture = re.compile("|".join(f"(?:{pattern})" for pattern in OF_THE_MIXTURE))


class RunHeld(RuntimeError):
    """Another launcher is running this run."""


RUNS = Path("runs")
"""Folder of all runs, from the repository's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The launcher of a run."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether its process id means something on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunFolder:
    """`runs/<experiment>/`.

    Args:
        path: the folder; made by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "config.yaml"
        self.command = self.path / "command.txt"
        self.log = self.path / "train.log"
        self.server_log = self.path / "tool_server.log"
        self.versions = self.path / "versions.jsonl"
        self.stop_request = self.path / STOP_FILE
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.done = self.path / "done"
        self._lock = self.path / ".lock"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the run alone; the kernel lets go when this process ends, however it ends.

        Raises:
            RunHeld: another launcher holds it; the message says which.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as lock:
            if not _locked(lock):
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
        """Who runs it now; None when nobody does.

        Raises:
            RunHeld: somebody does, and left no name.
        """
        try:
            lock = self._lock.open()
        except FileNotFoundError:
            return None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if holder := self._written():
                    return holder
                raise RunHeld(
                    f"{self.path} is held by a process that left no name in {self._lock}"
                ) from error
        return None

    def claimed_at(self) -> float:
        """When it was claimed last, seconds since 1970; 0 where it never was."""
        try:
            return self._lock.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _written(self) -> Holder | None:
        """What the lock file says; true only while the lock is held."""
        words = self._lock.read_text().split()
        if len(words) != 2 or not words[0].isdigit():
            return None
        return Holder(pid=int(words[0]), host=words[1])

    def note_command(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Add this start to `command.txt`: the settings from the environment, then the command."""
        words = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
        line = " ".join([time.strftime("%Y-%m-%dT%H:%M:%S%z"), *words, shlex.join(arguments)])
        with self.command.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """`metrics.jsonl` so far, in order of steps, without lines that are none."""
        return read_metrics(self.metrics)[0]

    def last_step(self) -> int:
        """Highest step with metrics; 0 before the first."""
        return max((line["step"] for line in self.lines()), default=0)

    def has_trained(self) -> bool:
        """Whether a step was trained, so that another start is a resume."""
        return self.last_step() > 0 or any((self.path / "checkpoints").glob("global_step_*"))

    def saved_step(self) -> int:
        """Step of the last whole checkpoint; 0 without one."""
        checkpoints = self.path / "checkpoints"
        tracker = checkpoints / "latest_checkpointed_iteration.txt"
        text = tracker.read_text().strip() if tracker.exists() else ""
        # a kill can leave the tracker empty
        return int(text) if text.isdigit() else whole_checkpoint(checkpoints)

    def wandb_run_id(self) -> str:
        """The run's name at Weights & Biases: made at its first start, and kept."""
        path = self.wandb / "run_id"
        if not path.exists():
            self.wandb.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{secrets.token_hex(4)}\n")
        return path.read_text().strip()

    def is_done(self, total_steps: int) -> bool:
        """Whether the trainer ended by itself after this many steps."""
        return self.done.exists() and self.last_step() >= total_steps

    def mark_done(self) -> None:
        """Remember that the trainer ended by itself."""
        self.done.write_text(f"{self.last_step()}\n")


def _locked(lock: IO[str]) -> bool:
    """Take the lock, unless somebody keeps it; `RunFolder.holder` has it for an instant only."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two configs and may not, as `key: old -> new`.

    With `mixed.on_change=continue` in the new one, the mixture may differ.
    """
    old, new = flatten(before), flatten(now)
    free = new.get("mixed.on_change") == "continue"
    return [
        f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not _harmless.fullmatch(key)
        and not (free and _of_the_mixture.fullmatch(key))
    ]
