"""Accounts of a mixed trainer: ledger, trajectories, metrics and alarms of each step.

verl adapter: `step`, `_compute_metrics`, `_validate` and `_val_metrics_update` of
trainer/ppo/v1/trainer_base.py at 0.9.1.
"""

# verl's methods are matched by name; their parameters are untyped or wider than those used here.
# Here they are called on `super()` of a class that is mixed into verl's.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from transfer_queue import KVBatchMeta
from verl.utils.debug import marked_timer

from agent_loop.calls.limiter import metrics_now
from agent_loop.records.evaluation_records import RECORD, read_record, write_records
from agent_loop.records.pace_metrics import pace_metrics
from agent_loop.records.run_folder import numbers_of
from agent_loop.records.source_metrics import (
    eviction_metrics,
    groups_of,
    loop_lag_metrics,
    prompts_per_source,
    sessions_of,
    source_metrics,
    staleness_metrics,
    validation_metrics,
)
from agent_loop.records.token_metrics import token_metrics
from agent_loop.records.trajectory_record import TrajectoryRecord, line_of
from agent_loop.records.wandb_run import log_table, shown, trajectory_rows
from agent_loop.training.alarms import (
    DRIFT_EVERY,
    TooManyFaults,
    drift_problems,
    faults_by_group,
    late_loops,
    loop_error,
    nothing_to_train,
)
from agent_loop.training.retention import prune_trajectories, sampled_groups
from agent_loop.training.trained_batch import copy_of, parts, read_token_sums, read_whole
from agent_loop.training.trainer_state import Prepared, TrainerState
from config.disk import write_whole
from samplers.adaptive.controller import MILLION, mean_advantage
from samplers.ledger import Decision, LedgerEntry, Outcome
from samplers.queue_view import prompts_under_way
from samplers.uid import prompt_of

logger = logging.getLogger(__name__)


class Accounts(TrainerState):
    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        with marked_timer("accounts", timing_raw):
            self._keep_accounts(batch, metrics)
        return batch

    def _begin_accounts(self, batch: KVBatchMeta) -> None:
        """Read and compute in a thread, while the training processes update the weights: all
        columns of the batch are there, and this process only waits."""
        self._token_sums.append(self._reader.submit(read_token_sums, copy_of(batch)))
        if self.local_trigger_step == self.parameter_sync_step - 1:  # the step is complete
            self._prepared = self._reader.submit(self._prepare)

    def _prepare(self) -> Prepared:
        trajectories = self._trajectories
        sums = [row for reading in self._token_sums for row in reading.result()]
        advantages = {row.key: row.mean_advantage for row in sums}
        for record in trajectories:
            record.advantage = advantages.get(record.key)
        written, sent = self._sampled(trajectories), self._shown(trajectories)
        needed = {t.key: t for t in (*written, *sent)}.values()
        whole = read_whole(needed, token_values=self.mixed.trajectory_token_values)
        metrics = source_metrics(trajectories) | token_metrics(sums)
        metrics |= staleness_metrics(trajectories, self.global_steps - 1)
        metrics |= loop_lag_metrics(sessions_of(trajectories))
        metrics |= self._drift(trajectories[::DRIFT_EVERY], whole)
        return Prepared(
            metrics=metrics,
            written=[whole[t.key] for t in written],
            sent=[whole[t.key] for t in sent],
        )

    def _keep_accounts(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        if self._prepared is None:  # the actor was not updated (trainer.critic_warmup)
            self._begin_accounts(batch)
        assert self._prepared is not None
        of, self._prepared = self._prepared.result(), None
        self._write_trajectories(of.written)
        if of.sent:
            decode, step = self.tokenizer.decode, self.global_steps
            log_table(trajectory_rows(of.sent, decode, step=step), step)
        entries = self._write_ledger(self._trajectories)
        metrics.update(of.metrics)
        if (late := late_loops(metrics.get("mixed/loop_lag_s/p99"))) is not None:
            logger.warning("step=%d %s", self.global_steps, late)
        metrics.update(eviction_metrics((e.source, e.outcome) for e in entries))
        metrics.update(pace_metrics(self.replay_buffer.take_waits(), self.replay_buffer.lead))
        metrics.update(self.door.ratio_errors(prompts_per_source(self._trajectories)))
        metrics["mixed/state_masking"] = float(self._state_masking)
        self._step_metrics = metrics
        self.plan.trained = self.global_steps * self.plan.batch_size

    def _check_faults(self, trajectories: list[TrajectoryRecord]) -> None:
        """Stop the run where too many sessions of a batch were lost.

        The trajectories of the step so far are written before the error is raised. A batch without
        a token to train has no loss, and stops the run. One update without a token, in a batch of
        several updates, does not: a seq-mean loss is 0 there; a token-mean loss is 0 / 0, and
        verl's engine skips the update (engine/fsdp/transformer_impl.py:823).

        Raises:
            TooManyFaults: a source lost too many trajectories (`FaultWindow`); no trajectory has a
                token to train; or a loop raised, and `mixed.fail_on_loop_error` is set.
        """
        trajectories = sessions_of(trajectories)
        error = loop_error(trajectories)
        try:
            if error is not None and self.mixed.fail_on_loop_error:
                raise TooManyFaults(
                    f"an agent loop raised in step={self.global_steps}, {error}; its traceback is "
                    "in train.log; correct the loop, or set mixed.fail_on_loop_error=false to "
                    "count such trajectories and train without them"
                )
            evicted = self.replay_buffer.take_losses()
            self._faults.check(self.global_steps, [*evicted, *faults_by_group(trajectories)])
            if (why := nothing_to_train(trajectories)) is not None:
                path = self.trajectory_dir / f"{self.global_steps}.jsonl"
                raise TooManyFaults(
                    f"cannot train step={self.global_steps}, {why}: none of {len(trajectories)} "
                    f"trajectories has a token with mask 1; read {path}; raise mixed.deadlines if "
                    "trajectories were late, run `verl-mixed doctor` if tools failed, or raise "
                    "data.max_response_length if all were truncated with mixed.on_truncated=mask; "
                    "then start the same command again"
                )
        except TooManyFaults:
            written = self._sampled(self._trajectories)
            values = self.mixed.trajectory_token_values
            whole = read_whole(written, token_values=values)
            self._write_trajectories([whole[t.key] for t in written])
            self._writer.flush()
            raise

    def _drift(
        self, compared: list[TrajectoryRecord], whole: Mapping[str, TrajectoryRecord]
    ) -> dict[str, float]:
        """Decode some trained trajectories and compare the texts with those of their loops.

        Args:
            whole: records that are read already, by key.
        """
        from agent_loop.turns.codec import codec_of  # few steps need it

        decode = codec_of(self.tokenizer).decode
        drifted = 0
        for part in parts(compared, [t.response_tokens or 0 for t in compared]):
            rest = read_whole([t for t in part if t.key not in whole])
            for t in part:
                problems = drift_problems(whole.get(t.key) or rest[t.key], decode)
                drifted += bool(problems)
                for problem in problems:
                    logger.warning(
                        "step=%d drift: trajectory=%s source=%s row_id=%s: %s",
                        *(self.global_steps, t.key, t.source, t.row_id, problem),
                    )
        return {"mixed/drift/checked": float(len(compared)), "mixed/drift/found": float(drifted)}

    # --- the run's files ----------------------------------------------------------------------

    def _write_trajectories(self, written: list[TrajectoryRecord]) -> None:
        """Write the file of a step in the writer's thread; `_save_checkpoint` waits for it."""
        folder, step, keep = self.trajectory_dir, self.global_steps, self.mixed.trajectory_keep
        path, artifacts = folder / f"{step}.jsonl", self._artifacts
        for record in written:
            record.step = step

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, map(line_of, written))
            if artifacts is not None:
                artifacts.log("trajectories", step, path)
            prune_trajectories(folder, step, keep)

        self._writer.submit(write)

    def _sampled(self, trajectories: list[TrajectoryRecord]) -> list[TrajectoryRecord]:
        """The trajectories that are written: whole groups, as `sampled_groups` chooses them."""
        ordered = sorted(trajectories, key=lambda t: (t.source, t.draw, t.key))
        groups: defaultdict[str, dict[int, None]] = defaultdict(dict)
        for t in ordered:
            groups[t.source][t.draw] = None
        written = sampled_groups(
            {source: list(draws) for source, draws in groups.items()},
            step=self.global_steps,
            sources=list(self.mixed.ratios),
            per_source=self.mixed.trajectory_sample,
            per_step=self.mixed.trajectory_sample_step,
        )
        return [t for t in ordered if (t.source, t.draw) in written]

    def _shown(self, trajectories: list[TrajectoryRecord]) -> list[TrajectoryRecord]:
        """The trajectories that are sent to Weights & Biases, if that logger is on.

        They are long, so they are sent only in the first and last step and with a validation.
        """
        trainer, step = self.config.trainer, self.global_steps
        is_due = trainer.test_freq > 0 and step % trainer.test_freq == 0
        is_sent = "wandb" in trainer.logger and (is_due or step in (1, self.total_training_steps))
        return shown(trajectories) if is_sent else []

    def _write_ledger(self, trajectories: list[TrajectoryRecord]) -> list[LedgerEntry]:
        groups = groups_of(sessions_of(trajectories))
        given_up = {own.uid: own for own in self.replay_buffer.take_given_up()}
        entries = [self._entry(uid, "trained", group) for uid, group in groups.items()]
        if self.global_steps >= self.total_training_steps:
            under_way = prompts_under_way()
            entries += [self._entry(uid, "unfinished", []) for uid in under_way]
            given_up = {uid: own for uid, own in given_up.items() if uid not in under_way}
        for uid, own in given_up.items():
            entry = self._entry(uid, own.why, [])
            entries.append(replace(entry, judged=own.judged, solved=own.solved))
        entries.sort(key=lambda entry: (entry.source, entry.draw))
        decision = self._decision(entries)
        self.ledger.append_step(self.global_steps, entries, self.plan.drawn, decision)
        return entries

    def _decision(self, entries: list[LedgerEntry]) -> Decision | None:
        """The decision for the next window, if a window ends with this step."""
        if self.plan.policy is None:
            return None
        self._window.extend(entries)
        if self.global_steps % self.plan.policy.window:
            return None
        decision, self._window = self.plan.decide(self._window), []
        for source in decision.held:
            logger.warning(
                "step=%d source=%s held at its lowest share: none of its %d prompts had "
                "trajectories with different rewards; correct its reward or its rows",
                *(self.global_steps, source, decision.inputs[source]["seen"]),
            )
        logger.info(
            "step=%d decision for steps %d to %d: %s",
            self.global_steps,
            decision.from_step,
            decision.from_step + self.plan.policy.window - 1,
            " ".join(f"{name}={share / MILLION:.3f}" for name, share in decision.shares.items()),
        )
        return decision

    def _entry(self, uid: str, outcome: Outcome, group: list[TrajectoryRecord]) -> LedgerEntry:
        source, draw = prompt_of(uid)
        row = int(self.plan.rows(source, [draw])[0])
        row_id = group[0].row_id if group else self.train_dataset.row_id(source, row)
        judged = [t.reward for t in group if t.is_judged]
        return LedgerEntry(
            step=self.global_steps,
            source=source,
            draw=draw,
            row=row,
            row_id=row_id,
            outcome=outcome,
            trajectories=len(group),
            reward_mean=float(np.mean(judged)) if judged else None,
            judged=len(judged) if group else None,
            solved=sum(t.acc >= 1 for t in group if t.is_judged) if group else None,
            advantage=mean_advantage(judged) if judged else None,
            tokens=sum(t.trained_tokens or 0 for t in group) if group else None,
        )

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._limiter is not None:
            metrics.update(metrics_now(self._limiter))
        for tool, limiter in self._tool_limiters.items():
            metrics.update(metrics_now(limiter, tool))
        self._publish(metrics)
        if self._stopping:
            self.total_training_steps = self.global_steps  # ends the loop of `fit`

    def _publish(self, metrics: dict) -> None:
        line = self._line(metrics)
        self.metrics_file.append(line)
        self._exposition.show(line["metrics"])

    def _line(self, metrics: dict) -> dict[str, Any]:
        return {"step": self.global_steps, "time": time.time(), "metrics": numbers_of(metrics)}

    # --- validation ---------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.global_steps == 0:  # later validations are in the line of their step
            self._publish(metrics)
        return metrics

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        **kwargs: Any,
    ) -> dict[str, float]:
        given = reward_extra_infos_dict.pop(RECORD)
        records = [read_record(each.encode()) for each in given if each is not None]
        path = self.validation_dir / f"{self.global_steps}.jsonl"
        self._writer.submit(write_records, path, records)
        theirs = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs
        )
        return theirs | validation_metrics(records)
