"""What a run's folder says now, read as it grows; it disturbs nobody and changes nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from config.lookup import at
from config.schema import ConfigError
from rate_limit.stats import snapshot_of
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder, RunHeld
from verl_mixed.run.text import clock
from verl_mixed.views.limiter import state_file_of
from verl_mixed.views.progress import Line, driver_error, startup_phase
from verl_mixed.views.watch.board import Board, LimiterRow, board_of, limiter_row
from verl_mixed.views.watch.screen import Sight
from verl_mixed.views.watch.tails import LogTail, MetricsTail


class Phase(Enum):
    """Where a run is in its life; each with the style of its words."""

    NOT_BEGUN = "dim"
    RUNNING = "bold"
    FINISHED = "bold green"
    STOPPED = "bold yellow"
    FAILED = "bold red"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Whether a run goes on, in words."""

    phase: Phase
    words: str
    start_up: str = ""
    """Where the start-up is; empty from the first step of this start."""

    started_s: float = 0.0
    """How long it has run."""

    is_here: bool = True
    """Whether it runs on this machine, where somebody runs it."""

    @property
    def is_running(self) -> bool:
        """Whether somebody runs it."""
        return self.phase is Phase.RUNNING


class RunReader:
    """A run's folder, there or not; `read` first, and again for what is new.

    Args:
        folder: the run's.
        now: seconds since 1970.
        log_from: byte of `train.log` where this start's part begins; 0 where that is not known.
    """

    def __init__(
        self, folder: RunFolder, now: Callable[[], float] = time.time, log_from: int = 0
    ) -> None:
        self.folder = folder
        self.total_steps: int | None = None
        """None where no config says it."""

        self._now = now
        self._metrics, self._log = MetricsTail(folder.metrics), LogTail(folder.log, now, log_from)
        self._config_time = -1
        self._limiter_file = folder.path / "rate_limit.state"
        self._board: Board | None = None
        self._error: str | None = None

    @property
    def lines(self) -> list[Line]:
        """`metrics.jsonl`; of old lines only what curves are drawn of."""
        return self._metrics.lines

    @property
    def passed_over(self) -> int:
        """Finished lines of `metrics.jsonl` that are none."""
        return self._metrics.passed_over

    def read(self) -> None:
        """Read what was added to the files.

        Raises:
            OSError: one of them is there and cannot be read.
        """
        is_other = self._read_config()
        if self._metrics.read() or is_other:
            self._board = None
        if self._log.read():
            self._error = None

    def _read_config(self) -> bool:
        """Read the config where it is another than before; a resume may change where a run ends."""
        path = self.folder.config
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if written == self._config_time:
            return False
        self._config_time = written
        try:
            self.total_steps = int(at(load_config(path), "trainer.total_training_steps"))
            self._limiter_file = Path(state_file_of(self.folder.path))
        except (ConfigError, OmegaConfBaseException, YAMLError, TypeError, ValueError):
            self.total_steps = None  # the screen shows that it is not known
        return True

    @property
    def board(self) -> Board:
        """What the metrics show."""
        if self._board is None:
            self._board = board_of(self.lines, self.total_steps)
        return self._board

    def state(self) -> State:
        """Who runs it, or how it ended."""
        try:
            holder = self.folder.holder()
        except RunHeld:
            return self._running("a process that left no name", is_here=True)
        if holder is not None:
            return self._running(str(holder), is_here=holder.is_here)
        step = self.board.step
        if self.folder.done.exists() and self.total_steps is not None and step >= self.total_steps:
            return State(phase=Phase.FINISHED, words="finished")
        if not self.lines and not self.folder.log.exists():
            return State(phase=Phase.NOT_BEGUN, words="not begun")
        if self._error is None:
            self._error = driver_error(self._log.text) or ""
        if self._error:
            words = f"failed: {self._error}; see `verl-mixed diagnose {self.folder.path}`"
            return State(phase=Phase.FAILED, words=words)
        saved = self.folder.saved_step()
        words = f"stopped after step {step}"
        words += f", goes on from checkpoint global_step_{saved}" if saved else ", no checkpoint"
        return State(phase=Phase.STOPPED, words=words)

    def _running(self, by: str, is_here: bool) -> State:
        words = f"running by {by}"
        if self.folder.stop_request.exists():
            words += ", asked to stop after this step"
        began = self.folder.claimed_at()
        is_up = self.lines and self.lines[-1]["time"] >= began
        return State(
            phase=Phase.RUNNING,
            words=words,
            start_up="" if is_up else startup_phase(self._log.text),
            started_s=max(0.0, self._now() - began),
            is_here=is_here,
        )

    def sight(self, state: State, *, titled: bool = True) -> Sight:
        """All that a screen shows.

        Args:
            state: of the run, now.
            titled: name the run and its state.
        """
        board = self.board
        return Sight(
            board=board,
            total_steps=self.total_steps,
            now=self._now(),
            title=f"{self.folder.path.name}  {state.words}" if titled else "",
            style=state.phase.value,
            start_up=f"{state.start_up} ({clock(state.started_s)})" if state.start_up else "",
            is_over=not state.is_running,
            limiter=self._limiter() if state.is_running and state.is_here else None,
            stuck=self._log.stuck() if state.is_running else (),
            warned=self._log.warnings,
            passed_over=self.passed_over,
        )

    def _limiter(self) -> LimiterRow | None:
        """The limiter as it is now; None where it cannot be seen from here."""
        try:
            return limiter_row(snapshot_of(self._limiter_file))
        except (OSError, ValueError):
            return None
