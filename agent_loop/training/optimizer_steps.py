"""One optimizer step of a mixed trainer: layout of the batch, log-probs, advantages, updates.

verl adapter: `_balance_batch` and the `_compute_*` and `_update_*` methods of
trainer/ppo/v1/trainer_base.py at 0.9.1. What is added to verl's methods: a batch that differs from
the plan is an error; each row may have its own temperature; rows without a token to train are in no
statistic; and an update may have another number of rows than `ppo_mini_batch_size * rollout.n`.
"""

# verl's methods are matched by name; their parameters are untyped or wider than those used here.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from omegaconf import OmegaConf, open_dict
from transfer_queue import KVBatchMeta

from agent_loop.records.run_folder import is_claimed
from agent_loop.training.advantage import (
    PER_SESSION,
    STATE_MASKED_REMAX,
    greedy_baselines,
    sessions_of_sequences,
)
from agent_loop.training.alarms import exceeds
from agent_loop.training.estimators import RETURNS_OF_TOKENS, WITHIN_GROUPS
from agent_loop.training.session_loss import SESSION_SHARE, session_loss_of
from agent_loop.training.session_rules import faults_of_sequences
from agent_loop.training.trained_batch import (
    FixedInfo,
    chunks,
    copy_of,
    fetch,
    fill_with_zeros,
    read_baselines,
    read_trajectories,
    write_column,
    write_temperatures,
)
from agent_loop.training.trainer_state import TrainerState
from samplers.uid import group_of, prompt_of, session_of

logger = logging.getLogger(__name__)


class MixtureError(RuntimeError):
    """The batch about to be trained is not the planned one."""


class LauncherEnded(RuntimeError):
    """The launcher was killed, and with it ended the tool server that it had started."""


class OptimizerSteps(TrainerState):
    def _note_batch(self, batch: KVBatchMeta) -> None:
        self._check_composition(batch.keys)
        # Read while the training processes compute log-probs, see `_take_trajectories`.
        self._reading = self._reader.submit(read_trajectories, copy_of(batch))

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        if self._temperatures:
            of_rows = (
                {t.key: t.temperature for t in self._reading.result()}
                if self._agents_set_temperature
                else {}
            )
            write_temperatures(batch, self._temperatures, self._common_temperature, of_rows)
        return batch

    def _take_trajectories(self) -> None:
        """Wait for the facts of the batch, and refuse a batch that lost too many trajectories.

        Raises:
            MixtureError: a row is of another source than its uid says; or a session has several
                sequences, and a setting depends on how it is cut.
            LauncherEnded: trajectories may have lost their tools, so that the step is not trained.
            TooManyFaults: see `_check_faults`.
        """
        trajectories = self._reading.result()
        if self._is_launched and not is_claimed(self._run_dir):
            raise LauncherEnded(
                f"cannot train step={self.global_steps}: the launcher of this run ended, and with "
                "it any tool server that it had started; start the same command again, and the "
                "step is repeated"
            )
        for t in trajectories:
            if t.source != (planned := prompt_of(t.uid)[0]):
                raise MixtureError(
                    f"cannot train step={self.global_steps}: the row with row_id={t.row_id} has "
                    f"data_source={t.source!r}, and was drawn for source={planned!r}; a dataset "
                    "must not change a row's data_source"
                )
        for t in trajectories:
            t.update = self._update_of_rows[t.key]
        self._trajectories += trajectories  # separate_async: a step has several batches
        self._trained = {t.key: t.trained_tokens for t in trajectories if t.trained_tokens}
        if self._has_several_sequences():
            config: Any = OmegaConf.to_container(self.config, resolve=True)
            for setting, rule, remedy in faults_of_sequences(config):
                raise MixtureError(
                    f"cannot train step={self.global_steps}, in which sessions have several rows: "
                    f"{setting}: {rule}; {remedy}"
                )
        self._check_faults(trajectories)

    def _check_composition(self, keys: Sequence[str]) -> None:
        """Refuse a batch whose groups are not those of the plan.

        Raises:
            MixtureError: a group is missing, short, or of another source than planned.
        """
        sessions: dict[str, set[str]] = {}
        for key in keys:
            uid, session, _ = key.split("_")
            sessions.setdefault(uid, set()).add(session)
        trained = Counter(prompt_of(uid)[0] for uid in sessions)
        groups = self.config.data.train_batch_size // self.parameter_sync_step
        planned = self._quota(groups, self.local_trigger_step)
        wanted = {source: count for source, count in planned.items() if count}
        wanted_n = {source: self._rollout_n(source) for source in trained}
        short = [uid for uid, own in sessions.items() if len(own) < wanted_n[prompt_of(uid)[0]]]
        if trained != wanted or short:
            raise MixtureError(
                f"cannot train step={self.global_steps}: planned prompts {wanted}, finished "
                f"{dict(trained)}, groups that lost trajectories: {len(short)}; an agent loop "
                "raised: its traceback is in train.log above this line; correct the loop, or have "
                "such groups replaced (trainer.v1.sampler.sync_refill_failed_groups=true)"
            )

    def _rollout_n(self, source: str) -> int:
        return self.mixed.sources[source].rollout_n or self.config.actor_rollout_ref.rollout.n

    # --- log-probs ----------------------------------------------------------------------------

    @property
    def _common_temperature(self) -> float:
        return float(self.config.actor_rollout_ref.rollout.temperature)

    @cached_property
    def _temperatures(self) -> dict[str, float]:
        """Source -> temperature; empty if all rows have the common temperature."""
        own = {
            name: source.temperature or self._common_temperature
            for name, source in self.mixed.sources.items()
        }
        is_common = set(own.values()) == {self._common_temperature}
        return {} if is_common and not self._agents_set_temperature else own

    def _with_row_temperatures(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch, to which verl cannot add its one temperature if rows have their own: in the
        workers it would replace their column."""
        if self._temperatures:
            info = dict(batch.extra_info or {})
            info.pop("temperature", None)
            batch.extra_info = FixedInfo(info, {"temperature"})
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(self._with_row_temperatures(batch), metrics)
        self._take_trajectories()
        warn, limit = self.mixed.drift.warn_probs_diff, self.mixed.max_probs_diff
        # Without state masking the batch holds tool tokens, whose log-prob in the rollout is 0.
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
                f"({self._worst_token(batch)}); weights, masks or token ids differ between the two;"
                " look for a failed weight sync in train.log"
            )
        return batch

    def _worst_token(self, batch: KVBatchMeta) -> str:
        """The token where rollout and trainer differ most. NaN counts as the largest difference."""
        names = ["rollout_log_probs", "old_log_probs", "response_mask"]
        worst = (-1.0, "", 0, 0.0, 0.0)
        for keys in chunks(batch):
            data = fetch(batch, keys, names)
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
        """Whether all trained tokens were sampled with the current weights."""
        if self.trainer_mode == "sync":
            return True
        current = self.global_steps - 1
        # A trajectory that was lost in a later turn has tokens of older weights, which are masked.
        return not any(
            key in self._trained and (tag.get("min_global_steps") or 0) < current
            for key, tag in zip(batch.keys, batch.tags, strict=True)
        )

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_ref_log_prob(self._with_row_temperatures(batch), metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's advantage of any estimator, over the rows that have one.

        Padding and lost trajectories (mask all 0) are left out of every mean, std and whitening. If
        the estimator compares the sessions of a group, the only valid session of a group is left
        out too. The rows left out get advantage 0.
        """
        valid = [key for key in batch.keys if key in self._trained]
        algorithm = self.config.algorithm
        if algorithm.adv_estimator in WITHIN_GROUPS:
            group_sizes = Counter(map(group_of, {session_of(key) for key in valid}))
            valid = [key for key in valid if group_sizes[group_of(key)] > 1]
        fields = ["advantages", "returns"]
        if algorithm.use_kl_in_reward:
            fields.append("token_level_rewards")
        if valid:
            rows = batch.select_keys(valid)
            with self._greedy_baselines(rows, metrics), self._sessions(rows):
                done = super()._compute_advantage(rows, metrics)
            if len(valid) == len(batch):
                return done
            fields += {"rollout_is_weights"} & set(done.fields or ())
        done = fill_with_zeros(batch, set(batch.keys) - set(valid), fields)
        batch.fields = done.fields
        return batch

    @contextmanager
    def _greedy_baselines(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> Iterator[None]:
        """For `remax`: the baseline of each row, while verl computes the advantages.

        verl's own `remax` reads `reward_baselines`, which verl's V1 trainers do not fill (only
        trainer/ppo/ray_trainer.py:1525 does at 0.9.1), so ours takes its place.
        """
        if self.config.algorithm.adv_estimator != "remax":
            yield
            return
        baselines = read_baselines(batch)
        known = [value for value in baselines.values() if value is not None]
        metrics["mixed/remax/baseline"] = float(np.mean(known)) if known else 0.0
        metrics["mixed/remax/lost_baselines"] = float(len(baselines) - len(known))
        token = greedy_baselines.set(baselines)
        try:
            with self._estimator(STATE_MASKED_REMAX):
                yield
        finally:
            greedy_baselines.reset(token)

    @contextmanager
    def _sessions(self, batch: KVBatchMeta) -> Iterator[None]:
        """Tell the sessions, while verl computes the advantages, and have the estimator judge
        sessions if one has several sequences."""
        name = self.config.algorithm.adv_estimator
        several = name not in RETURNS_OF_TOKENS and self._has_several_sequences()
        names = [session_of(key) for key in batch.keys]
        token = sessions_of_sequences.set((str(name), np.unique(names, return_inverse=True)[1]))
        try:
            with self._estimator(PER_SESSION if several else name):
                yield
        finally:
            sessions_of_sequences.reset(token)

    @contextmanager
    def _estimator(self, name: str) -> Iterator[None]:
        """Set the name of the estimator, while verl looks it up."""
        algorithm = self.config.algorithm
        own = algorithm.adv_estimator
        with open_dict(self.config):
            algorithm.adv_estimator = name
        try:
            yield
        finally:
            with open_dict(self.config):
                algorithm.adv_estimator = own

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = self._with_row_temperatures(batch)
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        if mode.startswith("seq-mean"):
            fixed = {"global_batch_size"} | ({"temperature"} if self._temperatures else set())
            sessions = self._valid_sessions_per_update(batch)
            info = {**(batch.extra_info or {}), "global_batch_size": sessions}
            batch.extra_info = FixedInfo(info, fixed)
        if mode == "seq-mean-token-mean" and self._has_several_sequences():
            self._write_shares(batch)
        self._begin_accounts(batch)
        return super()._update_actor(batch, metrics)

    def _valid_sessions_per_update(self, batch: KVBatchMeta) -> float:
        """The divisor of the seq-mean losses: sessions of an update with a token with mask 1.

        verl divides by all rows (trainer_base.py:1851, core_algos.py:1188 and 1202 at 0.9.1), so
        that padding, lost sessions and further sequences of a session would make the gradient of
        the others smaller. verl takes one divisor for all updates of a step, so this is the mean
        over the updates. It is exact for one update a step, which is the default. With two updates
        of 8 sessions, of which 8 and 4 are valid, both losses are divided by 6: every session has
        the same weight, but the second loss is smaller than a mean over its own 4 sessions. A
        token-mean loss needs no divisor: the engine counts the tokens of each update.
        """
        valid = len({session_of(key) for key in batch.keys if key in self._trained})
        return max(1, valid) * self._rows_per_update / len(batch)

    def _has_several_sequences(self) -> bool:
        """Whether a session of the current batch has several sequences with a token to train."""
        return len({session_of(key) for key in self._trained}) < len(self._trained)

    def _write_shares(self, batch: KVBatchMeta) -> None:
        """Give each sequence its share of its session's tokens, and have the loss use it.

        A seq-mean-token-mean loss has the mean over the tokens of each sequence. The mean over the
        tokens of a session is the sum of these means, each times the sequence's share of the
        session's tokens (`agent_loop.training.session_loss`).
        """
        of_session = Counter[str]()
        for key, tokens in self._trained.items():
            of_session[session_of(key)] += tokens
        shares = [
            self._trained[key] / of_session[session_of(key)] if key in self._trained else 0.0
            for key in batch.keys
        ]
        batch.fields = write_column(batch, SESSION_SHARE, shares).fields
        if not self._has_session_loss:
            self.actor_rollout_wg.set_loss_fn(session_loss_of(self.config.actor_rollout_ref.actor))
            self._has_session_loss = True
