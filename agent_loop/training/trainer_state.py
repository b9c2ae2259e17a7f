"""Attributes that the parts of a mixed trainer share: verl's, and those of this project."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agent_loop.calls.limiter import Limiter
from agent_loop.records.exposition import Exposition
from agent_loop.records.run_folder import MetricsFile
from agent_loop.records.token_metrics import TokenSums
from agent_loop.records.trajectory_record import TrajectoryRecord
from agent_loop.records.wandb_run import Artifacts
from agent_loop.training.alarms import FaultWindow
from agent_loop.training.file_writer import FileWriter
from config.schema import MixedConfig
from samplers.door import Door
from samplers.exact_updates import ExactUpdates
from samplers.ledger import Ledger, LedgerEntry
from samplers.replay_buffer import MixedReplayBuffer, MixedReplayBufferAsync


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is read and computed of a step's trajectories while the last update runs."""

    metrics: dict[str, float]
    written: list[TrajectoryRecord]
    sent: list[TrajectoryRecord]
    """Trajectories for Weights & Biases. Both are whole records."""


class TrainerState(ExactUpdates):
    """What every part of a mixed trainer may read."""

    MODE: ClassVar[str]
    """verl's own name of the mode."""

    # set by verl
    steps_per_epoch: int
    total_training_steps: int
    trainer_mode: str
    train_dataset: Any
    val_dataset: Any
    role_worker_mapping: dict[Any, Any]
    kl_ctrl_in_reward: Any
    timing_raw: dict[str, Any]
    replay_buffer: MixedReplayBuffer | MixedReplayBufferAsync

    # set by this project
    mixed: MixedConfig
    ledger: Ledger
    metrics_file: MetricsFile
    trajectory_dir: Path
    validation_dir: Path
    door: Door
    _limiter: Limiter | None
    _tool_limiters: dict[str, Limiter]
    """Name -> limiter of a tool that has a rate of its own."""

    _exposition: Exposition
    _faults: FaultWindow
    _state_masking: bool
    _reading: Future[list[TrajectoryRecord]]
    """The facts of the current batch, until `_take_trajectories`."""

    _trajectories: list[TrajectoryRecord]
    """Trajectories of this step so far."""

    _trained: dict[str, int]
    """Key -> tokens with mask 1, of the rows of the current batch that have one."""

    _agents_set_temperature: bool
    """Whether an agent behind the gateway may choose the temperature of a row."""

    _has_session_loss: bool = False
    """Whether the training processes weight the rows of a session (`session_loss`)."""

    _token_sums: list[Future[list[TokenSums]]]
    """Sums over the tokens of each batch of this step."""

    _prepared: Future[Prepared] | None
    """What this step's accounts need of its trajectories; None until its last update."""

    _reader: ThreadPoolExecutor
    """One thread that reads from TransferQueue, while the trainer waits for other processes."""

    _writer: FileWriter
    _artifacts: Artifacts | None = None
    """None: checkpoints and trajectory files are no artifacts (mixed.wandb_artifacts)."""

    _window: list[LedgerEntry]
    """The ledger's lines of the window of steps that is being trained, if shares are decided."""

    _step_metrics: dict[str, Any]
    _run_dir: Path
    _is_launched: bool = False
    """Whether a launcher started this process; without one, nobody's end ends the run."""

    _stop_file: Path
    _saved_step: int = 0
    _stopping: bool = False
    """Whether somebody asked for the end: this step is the last."""
