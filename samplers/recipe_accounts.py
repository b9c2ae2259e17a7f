"""Ledger and metrics of a recipe of verl's: written when a batch is sampled.

The ledger is `ledger.jsonl` beside the checkpoints. The lines of a step are on the disk before its
checkpoint; a run that goes on from an earlier checkpoint removes the lines after it.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import shutil
from collections import Counter, defaultdict
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import transfer_queue as tq

from samplers.door import RESUME, Door
from samplers.faults import RecipeError
from samplers.ledger import Ledger, LedgerEntry, Outcome, read_ledger
from samplers.queue_view import prompts_under_way
from samplers.uid import group_of, prompt_of, session_of

LEDGER = "ledger.jsonl"

_log = logging.getLogger(__name__)


Score = tuple[float, float] | None
"""(reward, acc) of a session; None where a reward model scores only after sampling."""

Group = dict[str, Score]
"""Session -> score, of the sessions of a group that have rows."""


class RecipeAccounts:
    """What a recipe's replay buffer calls with each batch."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._ledger: Ledger | None = None
        self._groups: dict[str, Group] = {}
        """uid -> group, of this step so far."""

        self._warned = False

    def sampled(self, batch: Any) -> dict[str, float]:
        """Note a batch that is about to be trained.

        Returns:
            The step's metrics with the step's last batch, before it nothing. So verl has one value
            of each to reduce over the batches of a step, whatever word is in a source's name.
        """
        for uid in self._door.trainer.replay_buffer.selected:
            self._groups[uid] = {}
        for key, score in self._scores(batch).items():
            self._groups[group_of(key)][session_of(key)] = score
        if not self._door.note_sampled():
            return {}
        groups, self._groups = self._groups, {}
        self._write(groups)
        return self._metrics(groups)

    def _scores(self, batch: Any) -> dict[str, Score]:
        """Key -> (reward, acc) of each row."""
        keys: list[str] = list(batch.keys)
        reward_loop = self._door.trainer.reward_loop_manager
        if not keys or reward_loop.reward_loop_worker_handles is None:
            return dict.fromkeys(keys)
        data: Any = tq.kv_batch_get(
            keys=keys,
            partition_id=batch.partition_id,
            select_fields=["rm_scores", "extra_fields"],
        )
        scores: dict[str, Score] = {}
        for key, of_tokens, extra in zip(
            keys, data["rm_scores"].unbind(0), data["extra_fields"], strict=True
        ):
            reward = float(of_tokens.sum())
            info = getattr(extra, "data", extra).get("reward_extra_info") or {}
            acc = info.get("acc")
            is_number = isinstance(acc, Real | np.bool_)
            scores[key] = reward, float(acc) if is_number else reward  # type: ignore[arg-type]
        return scores

    def _write(self, groups: dict[str, Group]) -> None:
        trainer, plan = self._door.trainer, self._door.plan
        step = trainer.global_steps
        if self._ledger is None:
            self._ledger = self._opened(step - 1)
            self._ledger.begin(plan.description())
        empty = [uid for uid, group in groups.items() if not group]
        if empty and not self._warned:
            self._warned = True
            _log.warning(
                "step=%d failed=%s: verl trains the places of these groups empty; set "
                "trainer.v1.sampler.sync_refill_failed_groups=true to replace such groups",
                step,
                dict(Counter(prompt_of(uid)[0] for uid in empty)),
            )
        entries = [
            self._entry(uid, "trained" if group else "failed", group)
            for uid, group in groups.items()
        ]
        given_up = {own.uid: own.why for own in trainer.replay_buffer.take_given_up()}
        if step >= trainer.total_training_steps:
            under_way = prompts_under_way() - groups.keys()
            entries += [self._entry(uid, "unfinished", {}) for uid in under_way]
            given_up = {uid: why for uid, why in given_up.items() if uid not in under_way}
        entries += [self._entry(uid, why, {}) for uid, why in given_up.items()]
        entries.sort(key=lambda entry: (entry.source, entry.draw))
        self._ledger.append_step(step, entries, plan.drawn)
        plan.trained = step * plan.batch_size

    def _opened(self, step: int) -> Ledger:
        """The ledger up to a step.

        Raises:
            RecipeError: its last rows have other names now.
        """
        settings = self._door.trainer.config.trainer
        folder = Path(settings.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER
        if settings.resume_mode == "disable" and path.exists():
            kept = path.with_name(f"ledger.{path.stat().st_mtime_ns}.jsonl")
            path.rename(kept)
            _log.warning("the ledger of an earlier run in this folder is %s now", kept)
        if settings.resume_mode == "resume_path" and not path.exists():
            earlier = Path(settings.resume_from_path).parent / LEDGER
            if earlier.exists():
                shutil.copy(earlier, path)
        ledger = Ledger(path)
        ledger.rewind(step)
        for line in read_ledger(path) if step else ():
            if isinstance(line, LedgerEntry) and line.step == step:
                name = self._door.dataset.row_id(line.source, line.row)
                if name != line.row_id:
                    raise RecipeError(
                        [f"row {line.row} of {line.source} was {line.row_id}, now {name}; {RESUME}"]
                    )
        return ledger

    def _entry(self, uid: str, outcome: Outcome, group: Group) -> LedgerEntry:
        source, draw = prompt_of(uid)
        row = int(self._door.plan.rows(source, [draw])[0])
        scores = known([group])
        rewards = [reward for reward, _ in scores]
        return LedgerEntry(
            step=self._door.trainer.global_steps,
            source=source,
            draw=draw,
            row=row,
            row_id=self._door.dataset.row_id(source, row),
            outcome=outcome,
            trajectories=len(group),
            reward_mean=fmean(rewards) if rewards else None,
            judged=len(rewards) if rewards else None,
            solved=sum(acc >= 1 for _, acc in scores) if scores else None,
        )

    def _metrics(self, groups: dict[str, Group]) -> dict[str, float]:
        of_sources: defaultdict[str, list[Group]] = defaultdict(list)
        for uid, group in groups.items():
            if group:
                of_sources[prompt_of(uid)[0]].append(group)
        metrics: dict[str, float] = {}
        step = self._door.trainer.global_steps
        planned = {source for source, count in self._door.plan.counts(step - 1).items() if count}
        for source in sorted(planned | of_sources.keys()):
            own = of_sources[source]
            metrics[f"mixed/{source}/count"] = float(len(own))
            if scores := known(own):
                metrics[f"mixed/{source}/reward/mean"] = fmean(reward for reward, _ in scores)
                metrics[f"mixed/{source}/pass_rate"] = fmean(acc >= 1 for _, acc in scores)
        counts = {source: len(own) for source, own in of_sources.items()}
        return metrics | self._door.ratio_errors(counts)


def known(groups: list[Group]) -> list[tuple[float, float]]:
    """The scores of all sessions that have one."""
    return [score for group in groups for score in group.values() if score is not None]
