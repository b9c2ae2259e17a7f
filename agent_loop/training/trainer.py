"""Trainers that train the exact mixture: `mixed_sync`, `mixed_colocate_async`,
`mixed_separate_async`.

verl adapter: the trainers of trainer/ppo/v1 at 0.9.1, whose methods are called and added to.
"""

# verl's methods are matched by name; their parameters are untyped or wider than what reaches us.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from agent_loop.limited import settle_limiters
from agent_loop.records.exposition import Exposition
from agent_loop.records.run_folder import STOP_FILE, MetricsFile, is_claimed
from agent_loop.records.wandb_run import Artifacts, end_service
from agent_loop.training.accounts import Accounts
from agent_loop.training.alarms import FaultWindow
from agent_loop.training.checkpoints import Checkpoints
from agent_loop.training.file_writer import FileWriter
from agent_loop.training.optimizer_steps import OptimizerSteps
from agent_loop.training.trained_batch import read_outcomes
from config.agents import BLOCKS, with_blocks
from config.lookup import files_at
from samplers.adaptive.profiles import choices_for
from samplers.door import Door, exact_buffer
from samplers.ledger import Ledger
from samplers.planned import plan_for
from samplers.replay_buffer import MixedReplayBuffer, MixedReplayBufferAsync


class _MixedTrainer(OptimizerSteps, Accounts, Checkpoints):
    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            # verl compares with its own names in several places (trainer_base.py:153, 731, 902).
            config.trainer.v1.trainer_mode = self.MODE
        self.mixed, tools, self._limiter, self._tool_limiters = settle_limiters(config)
        self._state_masking = tools.state_masking
        self._run_dir = run_dir = Path(self.mixed.run_dir)
        self._is_launched = is_claimed(run_dir)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.metrics_file = MetricsFile(run_dir / "metrics.jsonl")
        self.trajectory_dir = run_dir / "trajectories"
        self.validation_dir = run_dir / "validation"
        self._faults = FaultWindow(self.mixed.infra_error_limit)
        self._trajectories, self._trained = [], {}
        self._agents_set_temperature = _agents_set_temperature(config)
        self._token_sums, self._prepared = [], None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="mixed-tokens")
        self._writer = FileWriter()
        if self.mixed.wandb_artifacts:
            self._artifacts = Artifacts(self.mixed.experiment)
        self._window = []
        self._step_metrics = {}
        self._exposition = Exposition(self.mixed.experiment, self.mixed.ratios)
        self._stop_file = run_dir / STOP_FILE
        super().__init__(config)  # type: ignore[call-arg]

    # --- prompts ------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        dataset: Any = self.train_dataset  # MixedRLHFDataset
        self.val_dataset.is_validation = True
        index = dataset.sources()
        self.plan = plan_for(
            self.mixed,
            {name: len(rows) for name, rows in index.items()},
            self.config.data.train_batch_size,
            self.config.actor_rollout_ref.rollout.n,
            choices_for(
                self.mixed.sources,
                files_at(self.config, "data.train_files"),
                self.mixed.run_dir,
                afresh=self.config.trainer.resume_mode == "disable",
                keeps=True,
            ),
        )
        dataset.follow(self.plan, index)
        dataset.on_change = self.mixed.on_change
        self.train_dataloader = dataset  # a checkpoint then holds the plan's state, as in 1.0.0
        self.steps_per_epoch = max(1, self.steps_per_epoch)

    def _add_async_warmup_batches(self, num_warmup_batches: float) -> None:
        """The first step starts them: `_add_batch_to_generate` fills the open groups up."""

    def _add_batch_to_generate(self) -> None:
        """Start the prompts of a step. In asynchronous modes, the groups that are still open decide
        how many of each source."""
        if self.trainer_mode == "sync":
            super()._add_batch_to_generate()
            return
        batch_size = self.config.data.train_batch_size
        ahead = self.config.trainer.v1[self.trainer_mode].num_warmup_batches
        wanted = self.replay_buffer.wanted(batch_size + max(0, math.floor(ahead * batch_size)))
        if wanted:
            self.plan.position += sum(wanted.values())
            self._add_prompts_to_generate(wanted)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if (step_s := self.mixed.deadlines.step_s) is not None:
            # A replacement gets the time that is left of its step. Asynchronous steps overlap, so
            # that there a prompt gets the time of a whole step.
            is_sync = self.trainer_mode == "sync"
            elapsed_s = time.monotonic() - self._step_began if is_sync else 0.0
            tu.assign_non_tensor_data(batch, "step_seconds_left", max(0.0, step_s - elapsed_s))
        return super()._submit_batch_to_rollout(batch)

    def _build_replay_buffer(self) -> MixedReplayBuffer | MixedReplayBufferAsync:
        self.door = Door(self)
        return exact_buffer(
            self.door,
            max_staleness={
                name: source.max_staleness
                for name, source in self.mixed.sources.items()
                if source.max_staleness is not None
            },
            ahead=None if self.mixed.lead == "auto" else self.mixed.lead,
            max_wait_s=self.mixed.max_wait_s,
            max_replacements=self.mixed.max_replacements,
            check=self._check_workers,
            outcomes=read_outcomes,
        )

    def _check_workers(self) -> None:
        if check := getattr(self.agent_loop_manager, "check_workers", None):  # a manager of ours
            check()

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
            self._writer.flush()
        finally:
            # Without a wait: what is read may be gone with the process whose end ended the run.
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._writer.shutdown()
            if self._artifacts is not None:
                self._artifacts.shutdown()  # before wandb's run is finished below
            if logger := getattr(self, "logger", None):  # absent where the start failed
                logger.finish(exit_code=int(sys.exc_info()[0] is not None))
            end_service()
            self._exposition.close()

    def on_step_begin(self) -> None:
        self._step_began = time.monotonic()
        self._trajectories, self._token_sums, self._prepared = [], [], None
        super().on_step_begin()


def _agents_set_temperature(config: DictConfig) -> bool:
    """Whether a registered agent has `let_agent_set: [temperature]`."""
    path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    of_file: Any = OmegaConf.to_container(OmegaConf.load(path)) if path else []
    blocks = [OmegaConf.select(config, block) for block in BLOCKS]
    given = [OmegaConf.to_container(block, resolve=True) for block in blocks if block]
    agents = with_blocks({entry["name"]: entry for entry in of_file}, given)
    return any("temperature" in (entry.get("let_agent_set") or ()) for entry in agents.values())


class MixedSyncTrainer(_MixedTrainer, PPOTrainerSync):
    MODE = "sync"


class MixedColocateAsyncTrainer(_MixedTrainer, PPOTrainerColocateAsync):
    MODE = "colocate_async"


class MixedSeparateAsyncTrainer(_MixedTrainer, PPOTrainerSeparateAsync):
    MODE = "separate_async"
