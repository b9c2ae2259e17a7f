"""`mixed_sync`: verl's synchronous trainer over the mixture plan, with the run's accounts kept.

verl adapter: `PPOTrainerSync` (trainer/ppo/v1/trainer_sync.py at 0.9.1), chosen by
`trainer.v1.trainer_mode`. No method of verl is replaced but those that read the dataloader; the
rest call verl's own and add: prompts come from the plan, a batch that differs from it is an error,
and each step leaves its ledger lines, its trajectories and its metrics.

Order that matters: ledger and trajectories of a step are on disk before its checkpoint is, so a
kill at any moment leaves a ledger without a gap; what is on disk past the checkpoint is taken back
on resume (`_load_checkpoint`), because those steps are trained again.
"""

# verl's methods are matched by name; their parameters are untyped or wider than what reaches us.
# pyright: reportIncompatibleMethodOverride=false

import json
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from agent_loop.run_folder import MetricsFile, numbers_of, write_lines
from agent_loop.source_metrics import (
    TrainedTrajectory,
    prompts_per_source,
    ratio_error,
    source_metrics,
    validation_metrics,
)
from agent_loop.trajectory import StopReason
from config.schema import MixedConfig, load_section
from samplers.ledger import Ledger, LedgerEntry
from samplers.mixed_sampler import PlannedPrompt, PlanStream, rows_by_source
from samplers.mixture_plan import MixturePlan

POLL_INTERVAL_S = 0.05
"""How often the replay buffer looks for finished groups; verl's 2 s would dominate a small step."""


class MixtureError(RuntimeError):
    """The batch about to be trained is not the planned one."""


@register_trainer("mixed_sync")
class MixedSyncTrainer(PPOTrainerSync):
    """Synchronous training on the exact mixture."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            # verl asks for the literal name in several places (trainer_base.py:153, 731, 902, ...).
            config.trainer.v1.trainer_mode = "sync"
        self.mixed = load_section(
            MixedConfig, OmegaConf.to_container(config.mixed, resolve=True), "mixed"
        )
        run_dir = Path(self.mixed.run_dir)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.metrics_file = MetricsFile(run_dir / "metrics.jsonl")
        self.trajectory_dir = run_dir / "trajectories"
        self._planned: dict[str, PlannedPrompt] = {}  # uid -> prompts of the step under way
        self._cumulative_error: dict[str, int] = {}
        self._step_metrics: dict[str, Any] = {}
        super().__init__(config)

    # --- prompts ------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        dataset: Any = self.train_dataset  # MixedRLHFDataset
        index = rows_by_source(dataset.dataframe["data_source"])
        self.plan = MixturePlan(
            sizes={name: len(rows) for name, rows in index.items() if name in self.mixed.ratios},
            ratios=self.mixed.ratios,
            batch_size=self.config.data.train_batch_size,
            seed=self.mixed.seed,
            apportionment=self.mixed.apportionment,
        )
        self.stream = PlanStream(dataset, self.plan, index, collate_fn)
        self.train_dataloader = self.stream
        self.steps_per_epoch = max(1, self.steps_per_epoch)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        planned, columns = self.stream.take(num_prompts or self.config.data.train_batch_size)
        # The position rides in the uid, which verl carries everywhere and splits on "_" only.
        uids = [f"{uuid.uuid4().hex}.{prompt.position}" for prompt in planned]
        self._planned = dict(zip(uids, planned, strict=True))
        columns["uid"] = np.array(uids, dtype=object)
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_INTERVAL_S
        return buffer

    # --- the trained batch --------------------------------------------------------------------

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **kwargs: Any) -> KVBatchMeta:
        self._check_composition(batch)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _check_composition(self, batch: KVBatchMeta) -> None:
        """Refuse a batch whose sources are not the plan's, counted from the rows themselves.

        Raises:
            MixtureError: a group is missing, short, or of another source than planned.
        """
        data = _fetch(batch, batch.keys, ["data_source", "uid"])
        rows_per_group: dict[str, int] = {}
        trained: dict[str, int] = {}
        for uid, source in zip(_values(data, "uid"), _values(data, "data_source"), strict=True):
            if uid not in rows_per_group:
                trained[source] = trained.get(source, 0) + 1
            rows_per_group[uid] = rows_per_group.get(uid, 0) + 1
        planned = self.plan.counts(self.global_steps - 1)
        wanted = {source: count for source, count in planned.items() if count}
        n = self.config.actor_rollout_ref.rollout.n
        short = sorted(uid for uid, rows in rows_per_group.items() if rows < n)
        if trained != wanted or short:
            raise MixtureError(
                f"cannot train step={self.global_steps}: planned prompts {wanted}, finished "
                f"{trained}, groups with fewer than n={n} trajectories: {len(short)}; an agent "
                "loop raised: its traceback is in train.log above this line"
            )

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        limit = self.mixed.max_probs_diff
        seen = metrics.get("training/rollout_probs_diff_max")
        if limit is not None and seen is not None and float(seen) > limit:
            raise RuntimeError(
                f"rollout and trainer disagree in step={self.global_steps}: "
                f"rollout_probs_diff_max={float(seen):.2e} is above mixed.max_probs_diff={limit}; "
                "weights, masks or token ids differ between the two"
            )
        return batch

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        trajectories = self._read_trajectories(batch)
        self._check_infrastructure(trajectories)
        self._write_trajectories(trajectories)
        self._write_ledger(trajectories)
        planned = self.plan.counts(self.global_steps - 1)
        trained = prompts_per_source(trajectories)
        for source in planned:
            self._cumulative_error[source] = (
                self._cumulative_error.get(source, 0) + trained.get(source, 0) - planned[source]
            )
        metrics.update(source_metrics(trajectories))
        metrics["mixed/ratio_error/max"] = float(ratio_error(planned, trained))
        metrics["mixed/ratio_error/cumulative_max"] = float(
            max(map(abs, self._cumulative_error.values()))
        )
        self._step_metrics = metrics
        return batch

    def _read_trajectories(self, batch: KVBatchMeta) -> list[TrainedTrajectory]:
        """The rows of a trained batch, padding left out."""
        keys = [
            key
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding", False)
        ]
        tokens = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
        facts = ["uid", "data_source", "extra_info", "extra_fields"]
        data = _fetch(batch, keys, tokens + facts)
        column: dict[str, list[Any]] = {
            name: [row.tolist() for row in data[name].unbind(0)] for name in tokens
        }
        column |= {name: _values(data, name) for name in facts}
        return [
            TrainedTrajectory(
                key=key,
                uid=column["uid"][i],
                position=self._planned[column["uid"][i]].position,
                source=column["data_source"][i],
                row_id=column["extra_info"][i]["row_id"],
                reward=sum(column["rm_scores"][i]),
                acc=float(column["extra_fields"][i]["reward_extra_info"].get("acc", 0.0)),
                prompt_ids=column["prompts"][i],
                response_ids=column["responses"][i],
                response_mask=column["response_mask"][i],
                log_probs=column["rollout_log_probs"][i],
                record=column["extra_fields"][i]["mixed"],
            )
            for i, key in enumerate(keys)
        ]

    def _check_infrastructure(self, trajectories: list[TrainedTrajectory]) -> None:
        faults = [
            trajectory.record["fault"]
            for trajectory in trajectories
            if trajectory.record["stop_reason"] == StopReason.INFRA_ERROR
        ]
        rate = len(faults) / len(trajectories)
        if rate > self.mixed.max_infra_error_rate:
            raise RuntimeError(
                f"{len(faults)} of {len(trajectories)} trajectories of step={self.global_steps} "
                f"were lost to infrastructure faults, more than mixed.max_infra_error_rate="
                f"{self.mixed.max_infra_error_rate}; the first: {faults[0]}"
            )

    # --- the run's files ----------------------------------------------------------------------

    def _write_trajectories(self, trajectories: list[TrainedTrajectory]) -> None:
        write_lines(
            self.trajectory_dir / f"{self.global_steps}.jsonl",
            (
                {
                    "step": self.global_steps,
                    "key": t.key,
                    "source": t.source,
                    "row_id": t.row_id,
                    "position": t.position,
                    "reward": t.reward,
                    "acc": t.acc,
                    "prompt_ids": t.prompt_ids,
                    "response_ids": t.response_ids,
                    "response_mask": t.response_mask,
                    "log_probs": t.log_probs,
                    **t.record,
                }
                for t in sorted(trajectories, key=lambda t: (t.position, t.key))
            ),
        )

    def _write_ledger(self, trajectories: list[TrainedTrajectory]) -> None:
        groups: dict[str, list[TrainedTrajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.uid, []).append(trajectory)
        entries = []
        for uid, group in groups.items():
            solved = sum(trajectory.acc >= 1 for trajectory in group)
            entries.append(
                LedgerEntry(
                    step=self.global_steps,
                    position=group[0].position,
                    source=group[0].source,
                    row=self._planned[uid].row,
                    row_id=group[0].row_id,
                    outcome=f"solved {solved}/{len(group)}",
                )
            )
        entries.sort(key=lambda entry: entry.position)
        self.ledger.append_step(self.global_steps, entries)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self.metrics_file.append(self._line(metrics))

    def _line(self, metrics: dict) -> dict[str, Any]:
        return {"step": self.global_steps, "time": time.time(), "metrics": numbers_of(metrics)}

    # --- validation ---------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.global_steps == 0:  # before training; later ones are in their step's line
            self.metrics_file.append(self._line(metrics))
        return metrics

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        **kwargs: Any,
    ) -> dict[str, float]:
        own = validation_metrics(
            data_sources,
            reward_extra_infos_dict["reward"],
            [float(acc or 0.0) for acc in reward_extra_infos_dict["acc"]],
        )
        theirs = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs
        )
        return theirs | own

    # --- checkpoints --------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "metrics.jsonl", [self._line(self._step_metrics)])
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        checkpoints = Path(self.config.trainer.default_local_dir)
        _mend_tracker(checkpoints)
        super()._load_checkpoint()
        step = self.global_steps
        self.ledger.rewind(step)
        line = checkpoints / f"global_step_{step}" / "metrics.jsonl"
        checkpointed = json.loads(line.read_text(encoding="utf-8")) if line.exists() else None
        self.metrics_file.rewind(step if step else -1, checkpointed)
        for path in self.trajectory_dir.glob("*.jsonl"):
            if int(path.stem) > step:
                path.unlink()
        if step:
            with open_dict(self.config):
                self.config.trainer.val_before_train = False  # step 0 has its validation already

    # --- CPU ----------------------------------------------------------------------------------

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device != "cpu":
            return
        from agent_loop.cpu.worker import CPUActorRolloutRefWorker

        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CPUActorRolloutRefWorker)


def _fetch(batch: KVBatchMeta, keys: list[str], fields: list[str]) -> Any:
    """Columns of some rows of a batch: a TensorDict."""
    return tq.kv_batch_get(keys=keys, partition_id=str(batch.partition_id), select_fields=fields)


def _values(data: Any, name: str) -> list[Any]:
    """A column that is no tensor, as plain Python values."""
    return data.get(name).tolist()


def _mend_tracker(checkpoints: Path) -> None:
    """Rewrite verl's file that names the last checkpoint when a kill left it empty.

    verl opens it only after the checkpoint's data.pt is written, so the newest folder with one is
    whole.
    """
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    if not tracker.exists() or tracker.read_text().strip().isdigit():
        return
    steps = [int(path.parent.name.split("_")[-1]) for path in checkpoints.glob("*/data.pt")]
    if steps:
        tracker.write_text(str(max(steps)))
    else:
        tracker.unlink()
