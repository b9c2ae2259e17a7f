"""verl's trainers on the exact mixture: `mixed_sync`, `mixed_colocate_async` and
`mixed_separate_async`.

verl adapter: the trainers of trainer/ppo/v1 at 0.9.1, chosen by `trainer.v1.trainer_mode`. Methods
of verl are called and added to; replaced are only those that read the dataloader, build the replay
buffer and order the batch. Prompts come from the plan, a batch that differs from it is an error,
and each step leaves its ledger lines, its trajectories and its metrics.

Order that matters: ledger and trajectories of a step are on disk before its checkpoint is, so a
kill at any moment leaves a ledger without a gap; what is on disk past the checkpoint is taken back
on resume (`_load_checkpoint`), because those steps are trained again.
"""

# verl's methods are matched by name; their parameters are untyped or wider than what reaches us.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import json
import logging
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.debug import marked_timer

from agent_loop.metrics.exposition import Exposition
from agent_loop.metrics.source_metrics import (
    TrainedTrajectory,
    eviction_metrics,
    groups_of,
    prompts_per_source,
    ratio_error,
    source_metrics,
    validation_metrics,
)
from agent_loop.metrics.token_metrics import token_metrics
from agent_loop.metrics.wandb_run import end_service, log_table, trajectory_rows
from agent_loop.tools.limiter import Limiter, make_limiter, metrics_now, settled
from agent_loop.training.advantage import STATE_MASKED_REMAX, greedy_baselines
from agent_loop.training.alarms import (
    FaultWindow,
    RubbleError,
    drift_problems,
    exceeds,
    faults_by_group,
    loop_error,
    nothing_to_train,
)
from agent_loop.training.estimators import WITHIN_GROUPS
from agent_loop.training.run_folder import (
    STOP_FILE,
    MetricsFile,
    numbers_of,
    whole_checkpoint,
    write_lines,
    write_text,
)
from agent_loop.training.trained_batch import (
    RowTemperatures,
    Sizes,
    fetch,
    fill_with_zeros,
    group_of,
    is_padding,
    lay_out,
    place_of,
    read_baselines,
    read_tokens,
    read_trajectories,
    values,
    write_temperatures,
)
from agent_loop.turns.observation_style import codec_of
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig, load_section
from samplers.ledger import Ledger, LedgerEntry, Outcome
from samplers.mixed_sampler import PlanStream, rows_by_source
from samplers.mixture_plan import MixturePlan
from samplers.replay_buffer import (
    MixedReplayBuffer,
    MixedReplayBufferAsync,
    Mixture,
    make_uid,
    prompt_of,
)

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's, beside the checkpoints."""

KL_FILE = "kl_coefficient.txt"
"""In a checkpoint: where the adaptive coefficient of KL in the reward was; verl begins anew."""

_LOSSES = ("infra_error", "loop_error")
"""Parts of a reward that say why there is none."""


class MixtureError(RuntimeError):
    """The batch about to be trained is not the planned one."""


class _MixedTrainer:
    """Mixed into each of verl's trainers; see the module."""

    MODE: ClassVar[str]
    """verl's own name of the mode."""

    # verl's
    config: Any
    global_steps: int
    local_trigger_step: int
    parameter_sync_step: int
    steps_per_epoch: int
    total_training_steps: int
    trainer_mode: str
    train_dataset: Any
    val_dataset: Any
    tokenizer: Any
    actor_rollout_wg: Any
    use_reference_policy: bool
    role_worker_mapping: dict[Any, Any]

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            # verl asks for the literal name in several places (trainer_base.py:153, 731, 902, ...).
            config.trainer.v1.trainer_mode = self.MODE
        self.mixed = load_section(
            MixedConfig, OmegaConf.to_container(config.mixed, resolve=True), "mixed"
        )
        self._limiter = self._settle_limiter(config)
        run_dir = Path(self.mixed.run_dir)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.metrics_file = MetricsFile(run_dir / "metrics.jsonl")
        self.trajectory_dir = run_dir / "trajectories"
        self._faults = FaultWindow(self.mixed.infra_error_limit, self.mixed.infra_error_window)
        self._rows_per_update = 0
        self._trajectories: list[TrainedTrajectory] = []  # of this step so far
        self._miscounted: Counter[str] = Counter()  # source -> trained more than planned so far
        self._step_metrics: dict[str, Any] = {}
        self._exposition = Exposition(self.mixed.experiment, self.mixed.ratios)
        self._stop_file = run_dir / STOP_FILE
        self._saved_step = 0
        self._stopping = False  # somebody asked for the end, and this step is the last
        super().__init__(config)  # type: ignore[call-arg]

    def _settle_limiter(self, config: DictConfig) -> Limiter | None:
        """Decide who keeps the rate limit, for all processes, and open it: errors come out here."""
        values = OmegaConf.to_container(OmegaConf.select(config, TOOL_CONFIG), resolve=True)
        tools = load_section(ToolConfig, values, TOOL_CONFIG)
        settings = settled(tools, self.mixed)
        with open_dict(config):
            config.mixed.rate_limit = settings.model_dump()
        self.mixed = self.mixed.model_copy(update={"rate_limit": settings})
        self._state_masking = tools.state_masking
        return make_limiter(tools, self.mixed) if tools.enable_global_rate_limit else None

    # --- prompts ------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        dataset: Any = self.train_dataset  # MixedRLHFDataset
        self.val_dataset.is_validation = True
        index = rows_by_source(dataset.dataframe.with_format("arrow")["data_source"][:])
        self.plan = MixturePlan(
            sizes={name: len(rows) for name, rows in index.items() if name in self.mixed.ratios},
            ratios=self.mixed.ratios,
            batch_size=self.config.data.train_batch_size,
            seed=self.mixed.seed,
            apportionment=self.mixed.apportionment,
        )
        self._index = index
        self.stream = PlanStream(
            dataset,
            self.plan,
            index,
            collate_fn,
            workers=self.config.data.dataloader_num_workers,
            on_change=self.mixed.on_change,
        )
        self.train_dataloader = self.stream
        self.steps_per_epoch = max(1, self.steps_per_epoch)

    def _next_train_batch(self, num_prompts: int | Mapping[str, int] | None = None) -> TensorDict:
        """The next prompts of the stream; or, given source -> prompts, of these sources."""
        if isinstance(num_prompts, Mapping):
            planned, columns = self.stream.replace(num_prompts)
        else:
            planned, columns = self.stream.take(num_prompts or self.config.data.train_batch_size)
        uids = [make_uid(prompt.source, prompt.draw) for prompt in planned]
        columns["uid"] = np.array(uids, dtype=object)
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        if (step_s := self.mixed.deadlines.step_s) is not None:
            # Replacements are given what is left of their step; asynchronous steps overlap.
            gone_s = time.monotonic() - self._step_began if self.trainer_mode == "sync" else 0.0
            tu.assign_non_tensor_data(batch, "step_seconds_left", max(0.0, step_s - gone_s))
        return batch

    # --- the trained batch --------------------------------------------------------------------

    def _build_replay_buffer(self) -> MixedReplayBuffer | MixedReplayBufferAsync:
        v1 = self.config.trainer.v1
        is_sync = self.trainer_mode == "sync"
        metric = self._resolve_filter_groups_metric()
        filter_groups = self.config.algorithm.get("filter_groups") or {}
        return (MixedReplayBuffer if is_sync else MixedReplayBufferAsync)(
            Mixture(
                quota=self._quota,
                draw=self._add_prompts_to_generate,
                give_back=lambda drawn: self.stream.give_back(drawn),
                max_wait_s=self.mixed.max_wait_s,
                max_replacements=self.mixed.max_replacements,
            ),
            trainer_mode=self.trainer_mode,
            trainer_config=v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=v1.sampler.max_off_policy_threshold,
            max_off_policy_strategy=v1.sampler.max_off_policy_strategy,
            sampler_kwargs=v1.sampler.sampler_kwargs,
            filter_groups_metric=metric,
            train_batch_size=self.config.data.train_batch_size,
            gen_batch_size=1,
            max_inflight_gen_batches=filter_groups.get("max_inflight_gen_batches", 1),
            sync_refill_failed_groups=is_sync and bool(v1.sampler.sync_refill_failed_groups),
        )

    def _quota(self, groups: int, update: int | None = None) -> dict[str, int]:
        """source -> groups among the next so many of this step, from its mini-batch `update` on."""
        batch_size = self.config.data.train_batch_size
        first = (self.global_steps - 1) * batch_size
        if update is None:
            first += self.local_trigger_step * (batch_size // self.parameter_sync_step)
        else:
            first += update * groups
        return self.plan.counts_between(first, first + groups)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            if logger := getattr(self, "logger", None):  # a start that failed has none
                logger.finish(exit_code=int(sys.exc_info()[0] is not None))
            end_service()
            self._exposition.close()

    def on_step_begin(self) -> None:
        self.local_trigger_step = 0  # verl leaves the last step's here until it samples
        self._step_began = time.monotonic()
        self._trajectories = []
        super().on_step_begin()

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        groups = self._check_composition(batch)
        # By source and draw, whichever was finished first.
        batch.reorder(sorted(range(len(batch)), key=lambda row: place_of(batch.keys[row])))
        trajectories = read_trajectories(batch)
        self._trajectories += trajectories  # in separate mode a step has several mini-batches
        self._check_faults(trajectories)
        per_update = min(self.config.actor_rollout_ref.actor.ppo_mini_batch_size, groups)
        start = self.local_trigger_step * groups // per_update
        quotas = [
            self._quota(per_update, update) for update in range(start, start + groups // per_update)
        ]
        batch, self._rows_per_update, balance = lay_out(
            batch, quotas, self._sizes(), self.tokenizer.eos_token_id
        )
        metrics.update(balance)
        if self._temperatures:
            write_temperatures(batch, self._temperatures, self._common_temperature)
        return batch

    def _check_composition(self, batch: KVBatchMeta) -> int:
        """Refuse a batch whose sources are not the plan's, counted from the rows themselves.

        Returns:
            Groups in the batch.

        Raises:
            MixtureError: a group is missing, short, or of another source than planned.
        """
        data = fetch(batch, batch.keys, ["data_source", "uid"])
        sessions: dict[str, set[str]] = {}
        trained: Counter[str] = Counter()
        for key, uid, source in zip(
            batch.keys, values(data, "uid"), values(data, "data_source"), strict=True
        ):
            if uid not in sessions:
                trained[source] += 1
            sessions.setdefault(uid, set()).add(key.split("_")[1])
        groups = self.config.data.train_batch_size // self.parameter_sync_step
        wanted = {source: count for source, count in self._quota(groups).items() if count}
        short = [uid for uid, own in sessions.items() if len(own) < self._rollout_n(uid)]
        if trained != wanted or short:
            raise MixtureError(
                f"cannot train step={self.global_steps}: planned prompts {wanted}, finished "
                f"{dict(trained)}, groups that lost trajectories: {len(short)}; an agent loop "
                "raised: its traceback is in train.log above this line; mend it, or have such "
                "groups replaced (trainer.v1.sampler.sync_refill_failed_groups=true)"
            )
        return groups

    def _rollout_n(self, uid: str) -> int:
        source = self.mixed.sources[prompt_of(uid)[0]]
        return source.rollout_n or self.config.actor_rollout_ref.rollout.n

    def _sizes(self) -> Sizes:
        """What the rows of an optimizer update must divide into."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        config = self.config.actor_rollout_ref
        of_log_probs = [config.rollout]
        if self.use_reference_policy:
            of_log_probs.append(config.ref)
        return Sizes(
            ranks=max(workers._dispatch_info["actor"]) + 1,
            update_micro=1
            if config.actor.use_dynamic_bsz
            else config.actor.ppo_micro_batch_size_per_gpu,
            log_prob_micro=math.lcm(
                *(
                    section.log_prob_micro_batch_size_per_gpu
                    for section in of_log_probs
                    if not section.log_prob_use_dynamic_bsz
                )
            ),
        )

    # --- one temperature per row, one number of rows per update -------------------------------

    @property
    def _common_temperature(self) -> float:
        return float(self.config.actor_rollout_ref.rollout.temperature)

    @cached_property
    def _temperatures(self) -> dict[str, float]:
        """source -> temperature; empty where all have the common one."""
        own = {
            name: source.temperature or self._common_temperature
            for name, source in self.mixed.sources.items()
        }
        return own if set(own.values()) != {self._common_temperature} else {}

    def _with_row_temperatures(self, batch: KVBatchMeta) -> KVBatchMeta:
        if self._temperatures:
            batch.extra_info = RowTemperatures(batch.extra_info or {})
            batch.extra_info.pop("temperature", None)
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(self._with_row_temperatures(batch), metrics)
        warn, limit = self.mixed.drift.warn_probs_diff, self.mixed.max_probs_diff
        # Without state masking the rollout's side is 0 for tokens that nobody sampled.
        is_compared = metrics.get("training/rollout_probs_diff_valid") and self._state_masking
        if not is_compared or not self._is_on_policy(batch):
            return batch
        seen = float(metrics["training/rollout_probs_diff_max"])
        if exceeds(seen, warn):
            logger.warning("step=%d drift: %s", self.global_steps, self._worst_token(batch))
        if exceeds(seen, limit):
            raise RuntimeError(
                f"rollout and trainer disagree in step={self.global_steps}: "
                f"rollout_probs_diff_max={seen:.2e} is above mixed.max_probs_diff={limit} "
                f"({self._worst_token(batch)}); weights, masks or token ids differ between the two"
            )
        return batch

    def _worst_token(self, batch: KVBatchMeta) -> str:
        """Where rollout and trainer differ most; a log-prob that is NaN differs more than any."""
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)]
        names = ["rollout_log_probs", "old_log_probs", "response_mask"]
        data = fetch(batch, keys, names)
        worst = (-1.0, "", 0, 0.0, 0.0)
        for key, *row in zip(keys, *(data[name].unbind(0) for name in names), strict=True):
            ours, theirs, mask = row
            gap = (ours.exp() - theirs.exp()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            gap = gap.where(mask.bool(), 0.0)
            at = int(gap.argmax())
            worst = max(worst, (float(gap[at]), key, at, float(ours[at]), float(theirs[at])))
        _, key, at, ours, theirs = worst
        source, draw = prompt_of(group_of(key))
        return (
            f"trajectory={key} source={source} draw={draw} token={at}: log-prob {ours:.4f} in "
            f"the rollout, {theirs:.4f} in the trainer"
        )

    def _is_on_policy(self, batch: KVBatchMeta) -> bool:
        """Whether all rows were sampled from the weights that are trained now."""
        current = self.global_steps - 1
        return self.trainer_mode == "sync" or all(
            is_padding(tag) or (tag.get("min_global_steps") or 0) >= current for tag in batch.tags
        )

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_ref_log_prob(self._with_row_temperatures(batch), metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's advantage of any estimator, over the rows that it can judge.

        Padding, and trajectories that infrastructure ended, are in no mean, std or whitening; nor
        is the only one left of a group, where it would be compared with its group: its advantage
        is 0.
        """
        masks = fetch(batch, batch.keys, ["response_mask"])["response_mask"].unbind(0)
        judged = [key for key, mask in zip(batch.keys, masks, strict=True) if mask.any()]
        algorithm = self.config.algorithm
        if algorithm.adv_estimator in WITHIN_GROUPS:
            left = Counter(map(group_of, judged))
            judged = [key for key in judged if left[group_of(key)] > 1]
        fields = ["advantages", "returns"]
        if algorithm.use_kl_in_reward:
            fields.append("token_level_rewards")
        if judged:
            rows = batch.select_keys(judged)
            with self._greedy_baselines(rows, metrics):
                done = super()._compute_advantage(rows, metrics)
            if len(judged) == len(batch):
                return done
            fields += {"rollout_is_weights"} & set(done.fields or ())
        done = fill_with_zeros(batch, set(batch.keys) - set(judged), fields)
        batch.fields = done.fields
        return batch

    @contextmanager
    def _greedy_baselines(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> Iterator[None]:
        """For `remax`: each row's baseline, where verl's trainer of V1 has none
        (`reward_baselines`, which only trainer/ppo/ray_trainer.py:1525 fills at 0.9.1)."""
        algorithm = self.config.algorithm
        if algorithm.adv_estimator != "remax":
            yield
            return
        baselines = read_baselines(batch)
        known = [value for value in baselines.values() if value is not None]
        metrics["mixed/remax/baseline"] = float(np.mean(known)) if known else 0.0
        metrics["mixed/remax/lost_baselines"] = float(len(baselines) - len(known))
        token = greedy_baselines.set(baselines)
        with open_dict(self.config):
            algorithm.adv_estimator = STATE_MASKED_REMAX
        try:
            yield
        finally:
            greedy_baselines.reset(token)
            with open_dict(self.config):
                algorithm.adv_estimator = "remax"

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._verl_reads_rows_per_update():
            return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = self._with_row_temperatures(batch)
        if self.config.actor_rollout_ref.actor.loss_agg_mode.startswith("seq-mean"):
            own = {"global_batch_size"} | ({"temperature"} if self._temperatures else set())
            rows = self._valid_rows_per_update(batch)
            batch.extra_info = _Settled((batch.extra_info or {}) | {"global_batch_size": rows}, own)
        with self._verl_reads_rows_per_update():
            return super()._update_actor(batch, metrics)

    def _valid_rows_per_update(self, batch: KVBatchMeta) -> float:
        """What the seq-mean losses divide by: rows with some mask bit 1.

        verl divides by all rows (trainer_base.py:1851, core_algos.py:1188 and 1202 at 0.9.1), so
        padding, and trajectories that were lost to infrastructure, would shrink the gradient of the
        others. Exact for one update in a step, which is the default. With more of them it is their
        mean, since verl takes one number for all: each row of the step still weighs the same,
        though updates that lost more rows are smaller than a mean of their own rows would be.
        token-mean needs none of this: the engine counts the kept tokens of each update.
        """
        masks = fetch(batch, batch.keys, ["response_mask"])["response_mask"].unbind(0)
        valid = sum(bool(mask.any()) for mask in masks)
        return max(1, valid) * self._rows_per_update / len(batch)

    @contextmanager
    def _verl_reads_rows_per_update(self) -> Iterator[None]:
        """verl takes `ppo_mini_batch_size * rollout.n` for the rows of one update. Where groups
        differ in size that is not their number, so the two say it while verl reads them."""
        config, critic = self.config.actor_rollout_ref, self.config.critic
        sizes = config.actor.ppo_mini_batch_size, critic.ppo_mini_batch_size, config.rollout.n
        rows = self._rows_per_update
        with open_dict(self.config):
            config.actor.ppo_mini_batch_size = critic.ppo_mini_batch_size = rows
            config.rollout.n = 1
            try:
                yield
            finally:
                config.actor.ppo_mini_batch_size, critic.ppo_mini_batch_size, config.rollout.n = (
                    sizes
                )

    # --- accounts -----------------------------------------------------------------------------

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        with marked_timer("accounts", timing_raw):
            self._keep_accounts(batch, metrics)
        return batch

    def _keep_accounts(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """The step's trajectories, ledger lines and metrics."""
        trajectories, tokens = self._trajectories, read_tokens(batch)
        advantages = {row.key: row.advantage for row in tokens}
        self._write_trajectories(trajectories, advantages)
        self._show_trajectories(trajectories, advantages)
        entries = self._write_ledger(trajectories)
        metrics.update(source_metrics(trajectories) | token_metrics(tokens))
        metrics.update(eviction_metrics((e.source, e.outcome) for e in entries))
        metrics.update(self._ratio_errors(prompts_per_source(trajectories)))
        metrics.update(self._drift(trajectories))
        metrics["mixed/state_masking"] = float(self._state_masking)
        self._step_metrics = metrics

    def _ratio_errors(self, trained: Mapping[str, int]) -> dict[str, float]:
        """How far the batch is from its quotas, and the run so far from what is due, in prompts."""
        planned = self.plan.counts(self.global_steps - 1)
        self._miscounted.update({name: trained.get(name, 0) - planned[name] for name in planned})
        prompts = self.global_steps * self.plan.batch_size
        so_far, due = self.plan.counts_between(0, prompts), self.plan.due(prompts)
        return {
            "mixed/ratio_error/max": float(ratio_error(planned, trained)),
            "mixed/ratio_error/cumulative_max": max(
                abs(float(so_far[name] + self._miscounted[name] - due[name])) for name in planned
            ),
        }

    def _check_faults(self, trajectories: list[TrainedTrajectory]) -> None:
        """Stop a run before it trains on rubble, and leave the step so far on disk.

        A batch without one token to train has no loss. Where only one of several updates of a batch
        has none, nothing stops: with seq-mean losses it is 0; with token-mean it is 0 / 0, and
        verl's engine skips the update for its gradient (engine/fsdp/transformer_impl.py:823).

        Args:
            trajectories: those of the batch about to be trained.

        Raises:
            RubbleError: see `FaultWindow`; no trajectory has a token to train; or a loop raised and
                `mixed.fail_on_loop_error` is set.
        """
        error = loop_error(trajectories)
        try:
            if error is not None and self.mixed.fail_on_loop_error:
                raise RubbleError(
                    f"an agent loop raised in step={self.global_steps}, {error}; its trace is in "
                    "train.log; mend it, or set mixed.fail_on_loop_error=false to count such "
                    "trajectories and go on without them"
                )
            evicted = self.replay_buffer.take_losses()
            self._faults.check(self.global_steps, [*evicted, *faults_by_group(trajectories)])
            if (why := nothing_to_train(trajectories)) is not None:
                path = self.trajectory_dir / f"{self.global_steps}.jsonl"
                raise RubbleError(
                    f"cannot train step={self.global_steps}, {why}: none of {len(trajectories)} "
                    f"trajectories has a token with mask 1; look at {path}, at mixed.deadlines "
                    "where they were late and at `verl-mixed doctor` where they were lost, then "
                    "start the same command again"
                )
        except RubbleError:
            self._write_trajectories(self._trajectories)
            raise

    def _drift(self, trajectories: list[TrainedTrajectory]) -> dict[str, float]:
        """Decode some of the trained trajectories and hold them against what their loops saw."""
        decode = codec_of(self.tokenizer).decode
        checked = trajectories[:: self.mixed.drift.every]
        drifted = 0
        for trajectory in checked:
            problems = drift_problems(trajectory, decode)
            drifted += bool(problems)
            for problem in problems:
                logger.warning(
                    "step=%d drift: trajectory=%s source=%s row_id=%s: %s",
                    *(self.global_steps, trajectory.key, trajectory.source, trajectory.row_id),
                    problem,
                )
        return {"mixed/drift/checked": float(len(checked)), "mixed/drift/found": float(drifted)}

    # --- the run's files ----------------------------------------------------------------------

    def _write_trajectories(
        self,
        trajectories: list[TrainedTrajectory],
        advantages: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        write_lines(
            self.trajectory_dir / f"{self.global_steps}.jsonl",
            (
                {
                    "step": self.global_steps,
                    "key": t.key,
                    "source": t.source,
                    "row_id": t.row_id,
                    "draw": t.draw,
                    "reward": t.reward,
                    "acc": t.acc,
                    "advantage": advantages.get(t.key),
                    "prompt_ids": t.prompt_ids,
                    "response_ids": t.response_ids,
                    "response_mask": t.response_mask,
                    "log_probs": t.log_probs,
                    **t.record,
                }
                for t in self._sampled(trajectories)
            ),
        )

    def _sampled(self, trajectories: list[TrainedTrajectory]) -> list[TrainedTrajectory]:
        """Those that are written: whole groups, the first drawn of each source."""
        ordered = sorted(trajectories, key=lambda t: (t.source, t.draw, t.key))
        most = self.mixed.trajectory_sample
        if most is None:
            return ordered
        draws: defaultdict[str, set[int]] = defaultdict(set)
        for t in ordered:
            if len(draws[t.source]) < most:
                draws[t.source].add(t.draw)
        return [t for t in ordered if t.draw in draws[t.source]]

    def _show_trajectories(
        self, trajectories: list[TrainedTrajectory], advantages: Mapping[str, float | None]
    ) -> None:
        """Send some to Weights & Biases, where that is used: now and then, for they are long."""
        trainer, step = self.config.trainer, self.global_steps
        is_due = trainer.test_freq > 0 and step % trainer.test_freq == 0
        if "wandb" in trainer.logger and (is_due or step in (1, self.total_training_steps)):
            decode = self.tokenizer.decode
            log_table(trajectory_rows(trajectories, advantages, decode, step=step), step)

    def _write_ledger(self, trajectories: list[TrainedTrajectory]) -> list[LedgerEntry]:
        groups = groups_of(trajectories)
        given_up = dict(self.replay_buffer.take_given_up())
        if self.global_steps >= self.total_training_steps:
            given_up |= dict.fromkeys(_prompts_under_way(), "unfinished")
        entries = [self._entry(uid, "trained", group) for uid, group in groups.items()]
        entries += [self._entry(uid, why, []) for uid, why in given_up.items()]
        entries.sort(key=lambda entry: (entry.source, entry.draw))
        self.ledger.append_step(self.global_steps, entries, self.plan.drawn)
        return entries

    def _entry(self, uid: str, outcome: Outcome, group: list[TrainedTrajectory]) -> LedgerEntry:
        source, draw = prompt_of(uid)
        row = int(self.plan.rows(source, [draw])[0])
        if group:
            row_id = group[0].row_id
        else:
            stored = self.train_dataset.dataframe[int(self._index[source][row])]
            row_id = stored["extra_info"]["row_id"]
        return LedgerEntry(
            step=self.global_steps,
            source=source,
            draw=draw,
            row=row,
            row_id=row_id,
            outcome=outcome,
            trajectories=len(group),
            reward_mean=float(np.mean([t.reward for t in group])) if group else None,
        )

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._limiter is not None:
            metrics.update(metrics_now(self._limiter))
        line = self._line(metrics)
        self.metrics_file.append(line)
        self._exposition.show(line["metrics"])
        if self._stopping:
            self.total_training_steps = self.global_steps  # the loop of `fit` ends with this step

    def _line(self, metrics: dict) -> dict[str, Any]:
        return {"step": self.global_steps, "time": time.time(), "metrics": numbers_of(metrics)}

    # --- validation ---------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.global_steps == 0:  # before training; later ones are in their step's line
            line = self._line(metrics)
            self.metrics_file.append(line)
            self._exposition.show(line["metrics"])
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
            [
                bool(i or e)
                for i, e in zip(*(reward_extra_infos_dict[n] for n in _LOSSES), strict=True)
            ],
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
        if self.config.algorithm.use_kl_in_reward:
            write_text(folder / KL_FILE, repr(float(self.kl_ctrl_in_reward.value)))
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def on_step_end(self) -> None:
        self._stopping = self._stop_file.exists()
        if self._stopping and self._saved_step != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        super().on_step_end()

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        checkpoints = Path(trainer.default_local_dir)
        _mend_tracker(checkpoints)
        super()._load_checkpoint()
        step = self.global_steps
        is_named = trainer.resume_mode == "resume_path"
        folder = Path(trainer.resume_from_path) if is_named else checkpoints / f"global_step_{step}"
        coefficient = folder / KL_FILE
        if self.config.algorithm.use_kl_in_reward and coefficient.exists():
            self.kl_ctrl_in_reward.value = float(coefficient.read_text())
        if trainer.resume_mode != "auto":
            _point_tracker(checkpoints, step)
        self.ledger.rewind(step)
        self.ledger.begin(self.plan.description())
        self._drop_strangers()
        line = folder / "metrics.jsonl"
        checkpointed = json.loads(line.read_text(encoding="utf-8")) if line.exists() else None
        self.metrics_file.rewind(step if step else -1, checkpointed)
        for path in self.trajectory_dir.glob("*.jsonl"):
            if int(path.stem) > step:
                path.unlink()
        if step:
            with open_dict(self.config):
                self.config.trainer.val_before_train = False  # step 0 has its validation already

    def _drop_strangers(self) -> None:
        """Clear what a restored TransferQueue holds and no step will train: rows of the step that
        was checkpointed, and prompts of sources that have left the mixture."""
        items = (tq.kv_list("train") or {}).get("train", {}) if self.trainer_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = {uid for uid in prompts if prompt_of(uid)[0] not in self.mixed.ratios}
        keys = [key for key in items if group_of(key) not in prompts - left]
        if keys:
            tq.kv_clear(keys=keys, partition_id="train")
        self._restored_tq_prompt_count = len(prompts - left)

    # --- CPU ----------------------------------------------------------------------------------

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device != "cpu":
            return
        from agent_loop.cpu.worker import (
            CPUActorRolloutRefWorker,
            CPUCriticWorker,
            CPUDetachActorWorker,
        )

        separate = self.trainer_mode == "separate_async"
        worker = CPUDetachActorWorker if separate else CPUActorRolloutRefWorker
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(worker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(CPUCriticWorker)


@register_trainer("mixed_sync")
class MixedSyncTrainer(_MixedTrainer, PPOTrainerSync):
    """Synchronous training on the exact mixture."""

    MODE = "sync"


@register_trainer("mixed_colocate_async")
class MixedColocateAsyncTrainer(_MixedTrainer, PPOTrainerColocateAsync):
    """Asynchronous training, rollout and training on the same devices."""

    MODE = "colocate_async"


@register_trainer("mixed_separate_async")
class MixedSeparateAsyncTrainer(_MixedTrainer, PPOTrainerSeparateAsync):
    """Asynchronous training, rollout on devices of its own."""

    MODE = "separate_async"


class _Settled(dict[str, Any]):
    """`extra_info` that keeps what it says, or does not say, of some keys when verl updates it.

    Workers get a plain dict.
    """

    def __init__(self, info: Mapping[str, Any], settled: Set[str]) -> None:
        super().__init__(info)
        self._settled = settled

    def update(self, info: Mapping[str, Any]) -> None:
        super().update({key: info[key] for key in info.keys() - self._settled})

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def _prompts_under_way() -> list[str]:
    """uids of the prompts that were started and not trained."""
    items = (tq.kv_list("train") or {}).get("train", {})
    return [key for key, tag in items.items() if tag.get("is_prompt")]


def _point_tracker(checkpoints: Path, step: int) -> None:
    """Let a later start go on from where this one begins, not from a checkpoint of before."""
    tracker = checkpoints / TRACKER
    if (checkpoints / f"global_step_{step}" / "data.pt").exists():
        tracker.write_text(str(step))
    else:
        tracker.unlink(missing_ok=True)


def _mend_tracker(checkpoints: Path) -> None:
    """Rewrite verl's file that names the last checkpoint when a kill left it empty."""
    tracker = checkpoints / TRACKER
    if not tracker.exists() or tracker.read_text().strip().isdigit():
        return
    if step := whole_checkpoint(checkpoints):
        tracker.write_text(str(step))
    else:
        tracker.unlink()
