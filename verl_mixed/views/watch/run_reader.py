"""Reads a run's folder while the run goes on: its state, metrics and warnings. Writes nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from config.disk import BrokenFile
from config.lookup import at
from config.schema import ConfigError
from rate_limit.snapshot import Snapshot
from rate_limit.stats import snapshot_of
from verl_mixed.run.compose import load_config
from verl_mixed.run.evaluations import validations_of
from verl_mixed.run.state import RunFolder, RunHeld
from verl_mixed.run.text import clock
from verl_mixed.views.limiter import state_file_of
from verl_mixed.views.progress import Line, driver_error, startup_phase
from verl_mixed.views.watch.board import Board, board_of
from verl_mixed.views.watch.screen import ScreenContent
from verl_mixed.views.watch.tails import LogTail, MetricsTail


class Phase(Enum):
    """The phase of a run; the value is the style of its text."""

    NOT_BEGUN = "dim"
    RUNNING = "bold"
    FINISHED = "bold green"
    STOPPED = "bold yellow"
    FAILED = "bold red"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Whether a run goes on, and how it ended."""

    phase: Phase
    text: str
    start_up: str = ""
    """The phase of the start-up; empty from the first step of this start."""

    started_s: float = 0.0
    """Seconds since the run's last start."""

    is_here: bool = True
    """False if a process on another machine runs it."""

    @property
    def is_running(self) -> bool:
        """Whether a process runs the run."""
        return self.phase is Phase.RUNNING


class RunReader:
    """Reads a run's folder, which need not exist. Call `read` first, and again to read what is new.

    `now` gives seconds since 1970. `log_from` is the byte of `train.log` where this start's part
    begins; 0: not known.
    """

    def __init__(
        self, folder: RunFolder, now: Callable[[], float] = time.time, log_from: int = 0
    ) -> None:
        self.folder = folder
        self.total_steps: int | None = None
        """None: no config says it."""

        self._now = now
        self._metrics, self._log = MetricsTail(folder.metrics), LogTail(folder.log, now, log_from)
        self._config_time, self._resume_mode = -1, "auto"
        self._limiter_file = folder.path / "rate_limit.state"
        self._board: Board | None = None
        self._error: str | None = None

    @property
    def lines(self) -> list[Line]:
        """The lines of `metrics.jsonl`; old lines have only the metrics of curves."""
        return self._metrics.lines

    @property
    def passed_over(self) -> int:
        """How many finished lines of `metrics.jsonl` cannot be read."""
        return self._metrics.passed_over

    @property
    def log_text(self) -> str:
        """The end of `train.log`, from the run's last start."""
        return self._log.text

    def read(self) -> None:
        """Read what was added to the files.

        Raises:
            OSError: a file exists and cannot be read.
        """
        has_new_config = self._read_config()
        if self._metrics.read() or has_new_config:
            self._board = None
        if self._log.read():
            self._error = None

    def _read_config(self) -> bool:
        """Read the config if it changed: a resume may change the run's last step."""
        path = self.folder.config
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if written == self._config_time:
            return False
        self._config_time = written
        try:
            config = load_config(path)
            self._resume_mode = at(config, "trainer.resume_mode", "auto")
            self.total_steps = int(at(config, "trainer.total_training_steps"))
            self._limiter_file = Path(state_file_of(self.folder.path))
        except (ConfigError, BrokenFile, OmegaConfBaseException, TypeError, ValueError):
            self.total_steps = None  # the screen shows a ? for it
        return True

    @property
    def board(self) -> Board:
        """The values of the metrics."""
        if self._board is None:
            validated = validations_of(self.folder.path, self.lines)
            self._board = board_of(self.lines, self.total_steps, self.passed_over, validated)
        return self._board

    def state(self) -> State:
        """Which process runs the run, or how the run ended."""
        try:
            holder = self.folder.holder()
        except RunHeld:
            return self._running("a process that left no name", is_here=True)
        if holder is not None:
            return self._running(str(holder), is_here=holder.is_here)
        step = self.board.step
        if self.folder.done.exists() and self.total_steps is not None and step >= self.total_steps:
            return State(phase=Phase.FINISHED, text="finished")
        if not self.lines and not self.folder.log.exists():
            return State(phase=Phase.NOT_BEGUN, text="not begun")
        if self._error is None:
            self._error = driver_error(self._log.text) or ""
        if self._error:
            text = f"failed: {self._error}; see `verl-mixed diagnose {self.folder.path}`"
            return State(phase=Phase.FAILED, text=text)
        saved = self.folder.saved_step()
        text = f"stopped after step {step}"
        goes_on = ", goes on from" if self._resume_mode == "auto" else ", last"
        text += f"{goes_on} checkpoint global_step_{saved}" if saved else ", no checkpoint"
        return State(phase=Phase.STOPPED, text=text)

    def _running(self, by: str, is_here: bool) -> State:
        text = f"running by {by}"
        if self.folder.stop_request.exists():
            text += ", asked to stop after this step"
        began = self.folder.claimed_at()
        is_up = self.lines and self.lines[-1]["time"] >= began
        return State(
            phase=Phase.RUNNING,
            text=text,
            start_up="" if is_up else startup_phase(self._log.text),
            started_s=max(0.0, self._now() - began),
            is_here=is_here,
        )

    def screen_content(self, state: State, *, titled: bool = True) -> ScreenContent:
        """What the screen shows; with `titled`, it has a line for the run's name and state."""
        return ScreenContent(
            board=self.board,
            total_steps=self.total_steps,
            now=self._now(),
            title=f"{self.folder.path.name}  {state.text}" if titled else "",
            style=state.phase.value,
            start_up=f"{state.start_up} ({clock(state.started_s)})" if state.start_up else "",
            is_over=not state.is_running,
            limiter=self._limiter() if state.is_running and state.is_here else None,
            stuck=self._log.stuck() if state.is_running else (),
            log_warnings=self._log.warnings,
        )

    def _limiter(self) -> Snapshot | None:
        """The limiter now; None if its state file cannot be read on this machine."""
        try:
            return snapshot_of(self._limiter_file)
        except (OSError, ValueError):
            return None
