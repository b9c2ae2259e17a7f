"""verl's replay buffers with the quotas of the mixture: they choose the groups that are trained.

verl adapter: `ReplayBuffer` and `ReplayBufferAsync` (trainer/ppo/v1/replay_buffer.py at 0.9.1).
verl takes the oldest finished groups of any source, and replaces an evicted group by the next
prompt of any source. These subclasses change six things:

- verl sees at most each source's quota of finished groups, oldest first. So its condition "enough
  groups" means "every quota is full".
- Evicted groups are counted by source. verl's request for a number of new prompts becomes a request
  for a number of each source.
- A trajectory that was lost to infrastructure does not decide whether its group is filtered.
- A step in which a source cannot fill its quota fails, instead of waiting for ever.
- In asynchronous modes, the number of open groups of a source follows its latency
  (`samplers.lead`), and a source may have a smaller staleness bound than verl's.
- A poll reads which groups ended since the last one. verl lists all keys at each poll: 48 ms of CPU
  at 1,024 groups of 16 trajectories.

In synchronous mode, the trained groups of a source are the first surviving groups in draw order.
The draws after the last trained draw are given back and drawn again in the next step. Validation is
not changed.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportMissingTypeArgument=false, reportUntypedFunctionDecorator=false
# pyright: reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false

import math
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.trainer.ppo.v1.replay_buffer import (
    ReplayBuffer,
    ReplayBufferAsync,
)

from samplers.faults import GroupFaults, SessionOutcome, SourceStarved
from samplers.lead import FlightTimes, Lead, lead_of, to_start
from samplers.ledger import Outcome
from samplers.queue_view import QueueView
from samplers.uid import group_of, prompt_of
from samplers.verl_releases import HAS_WAIT, OF_REWARD

UNBOUNDED = 50
"""Factor for sources without a bound on their staleness. If all open groups are trained within n
steps, such a source has open at most the groups that it trains within 50 n steps. So a source whose
schedule ends has no more open groups than seats."""

POLL_INTERVAL_S = 0.05
"""Seconds between two looks for finished groups; verl's 2 s would dominate a small step."""

CHECK_S = 5.0
"""Seconds between two questions whether the processes that generate are still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The trainer's functions that the buffer calls, and the buffer's limits."""

    quota: Callable[[int], Mapping[str, int]]
    """Number of groups in the next batch -> source -> its quota."""

    draw: Callable[[Mapping[str, int]], Any]
    """Starts more prompts: source -> number."""

    give_back: Callable[[Mapping[str, int]], None]
    """Takes draws back: source -> its next draw; later draws are drawn again."""

    seats: Callable[[int], Mapping[str, int]]
    """Number of steps -> source -> groups that are trained from now until the end of the step that
    is so many steps after the current one."""

    max_wait_s: float
    max_replacements: int
    """Most replaced prompts of a source in one step, per prompt of its quota."""

    max_staleness: Mapping[str, int] = field(default_factory=dict[str, int])
    """source -> most model versions that a trajectory may span, where this is below verl's
    `max_off_policy_threshold`."""

    ahead: int | None = None
    """Groups by which each source is ahead of its quota; None: by its latency."""

    clock: Callable[[], float] = time.monotonic

    check: Callable[[], None] = lambda: None
    """Raises if a process is gone without which no group can finish; called every `CHECK_S`."""

    sampled: Callable[[Any], Mapping[str, float]] = lambda batch: {}
    """Called with each batch that is about to be trained; returns metrics of the step."""

    outcomes: Callable[[str, list[str]], Mapping[str, SessionOutcome]] | None = None
    """Partition, keys of rows -> session -> how it ended. None: the loop workers are verl's, which
    write no records, and do not name the groups that ended."""

    limits: str = "mixed"
    """Where the config has `max_wait_s` and `max_replacements`, for error messages."""


class _Finished(NamedTuple):
    """A finished group; older groups compare as smaller."""

    step: int
    draw: int
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A group that was evicted."""

    uid: str
    why: Outcome
    judged: int | None
    """Trajectories of a filtered group with a reward, which no fault ended; else None."""

    solved: int | None
    """Those of them that solved the prompt."""


class _ExactQuotas(QueueView):
    """The part that both buffers share. `options` are verl's own arguments without `refill_fn`."""

    # verl's, in both classes
    trainer_mode: str
    train_batch_size: int | None
    filter_groups_metric: str | None
    sync_refill_failed_groups: bool
    _dapo_classification_cache: Any

    lead: Lead | None = None
    """The open groups that the last step of asynchronous training aimed at."""

    def __init__(self, mixture: Mixture, **options: Any) -> None:
        self.mixture = mixture
        self.given_up: list[GivenUp] = []
        self._solved: dict[str, tuple[int, int]] = {}
        """uid -> judged and solved trajectories, of groups that are dropped in this poll."""

        self._losses: list[GroupFaults] = []
        self._last_fault: dict[str, str] = {}
        """source -> the last fault among its dropped groups in this wait."""
        self._quota: Mapping[str, int] = {}
        self._ready: dict[str, list[str]] = {}
        self._pool: defaultdict[str, list[_Finished]] = defaultdict(list)
        """source -> its finished groups, oldest first; kept between polls."""
        self._pooled: dict[str, _Finished] = {}
        self._owed: Counter[str] = Counter()
        self._replaced: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since = self._seen_at = self._left_at = self._checked_at = mixture.clock()
        self._step = 0
        self._flights = FlightTimes()
        self._most: dict[str, int] = {}
        """source -> open groups that can be trained before they are too stale, in asynchronous
        modes."""

        self._waited: defaultdict[str, float] = defaultdict(float)
        self._waited_before: Mapping[str, float] = {}
        self.selected: list[str] = []
        """The groups of the last batch."""

        options.setdefault("poll_interval", POLL_INTERVAL_S)
        super().__init__(
            clock=mixture.clock,
            are_named=mixture.outcomes is not None,
            refill_fn=self._refill,
            **options,
        )

    def take_given_up(self) -> list[GivenUp]:
        """The groups evicted since the last call."""
        taken, self.given_up = self.given_up, []
        return taken

    def take_losses(self) -> list[GroupFaults]:
        """The lost trajectories of groups that were dropped untrained since the last call."""
        taken, self._losses = self._losses, []
        return taken

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        if partition_id != "train":
            self.list_all_next()
        elif self.trainer_mode == "sync" or not HAS_WAIT:
            self._begin(global_steps, batch_size)
        batch, metrics = super().sample(  # type: ignore[misc]
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == "train":
            metrics.update(self.mixture.sampled(batch))
        return batch, metrics

    def take_waits(self) -> dict[str, float]:
        """source -> seconds that sampling waited for its quota since the last call."""
        waited, self._waited = dict(self._waited), defaultdict(float)
        return waited

    def _sync_metadata_from_transfer_queue(self) -> None:
        now = self.mixture.clock()
        self._flights.elapse(now - self._seen_at, self.in_flight)
        self._seen_at = now
        super()._sync_metadata_from_transfer_queue()

    # --- quotas -------------------------------------------------------------------------------

    def _begin(self, global_steps: int, groups: int) -> None:
        """Begin to wait for a batch with this number of groups."""
        self._pause()
        self._quota = self.mixture.quota(groups)
        self._since, self._step = self.mixture.clock(), global_steps
        self._waited_before = self._waited.copy()
        self._ready = {}
        self._replaced.clear()
        self._last_fault.clear()
        if self.trainer_mode == "sync":
            self._owed.clear()  # verl clears its own count at the end of a step too

    _busy_s: float = 0.0
    """Seconds since the dispatch in which the trainer did not wait for groups."""

    def _pause(self) -> None:
        now = self.mixture.clock()
        self._busy_s += now - self._left_at
        self._left_at = now

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        finished = super()._sampleable_terminal_keys(partition_id, eviction_reasons)  # type: ignore[misc]
        if partition_id != "train":
            return finished
        self._pool_finished(finished, self.prompt_global_steps[partition_id])
        self._ready = {
            source: [group.uid for group in self._pool[source][:quota]]
            for source, quota in self._quota.items()
        }
        return {uid for own in self._ready.values() for uid in own}

    def _pool_finished(self, finished: set[str], steps: Mapping[str, int]) -> None:
        """Update the pool: add new finished groups in order, remove groups that are gone."""
        new = finished.difference(self._pooled)
        if len(self._pooled) + len(new) > len(finished):  # some were evicted
            for uid in self._pooled.keys() - finished:
                source, group = prompt_of(uid)[0], self._pooled.pop(uid)
                own = self._pool[source]
                del own[bisect_left(own, group)]
                self._flights.end(source, -1, self._open_wanted(source))
        for uid in new:
            source, draw = prompt_of(uid)
            self._flights.end(source, 1, self._open_wanted(source))
            self._pooled[uid] = _Finished(steps.get(uid, 0), draw, uid)
            insort(self._pool[source], self._pooled[uid])

    def _open_wanted(self, source: str) -> int:
        return self.lead.groups.get(source, 0) if self.lead is not None else 0

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> Any:
        if partition_id != "train":
            return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)  # type: ignore[misc]
        self.selected = selected = [uid for own in self._ready.values() for uid in own]
        counts = Counter(prompt_of(uid)[0] for uid in selected)
        assert counts == {s: n for s, n in self._quota.items() if n}, (counts, self._quota)
        for source, own in self._ready.items():
            del self._pool[source][: len(own)]
        for uid in selected:
            del self._pooled[uid]
        if self.trainer_mode == "sync":
            self._forget_surplus(selected)
        # verl copies both, and nothing changes them before the batch is built.
        return selected, self.partitions[partition_id], self.prompt_global_steps[partition_id]

    def _forget_surplus(self, selected: list[str]) -> None:
        """Drop the groups after the last trained draw of each source, and give their draws back."""
        surplus = set(self._pooled)
        self._note_losses("train", surplus)  # all, because evicted groups alone would look worse
        self._clear_groups("train", surplus)
        ends: dict[str, int] = {}
        for source, draw in map(prompt_of, selected):
            ends[source] = max(ends.get(source, 0), draw + 1)
        self.given_up = [own for own in self.given_up if _is_before(own.uid, ends)]
        self.mixture.give_back(ends)

    # --- eviction and replacement -------------------------------------------------------------

    def _dapo_filtered_keys(self, partition_id: str) -> Any:
        """verl's filtered groups, and groups without information among their valid trajectories.

        verl compares all trajectories of a group. The reward 0 of a lost trajectory (its mask is
        all zero) then makes a group of solved ones look informative. Each group that verl keeps is
        checked once, and filtered if fewer than two trajectories are valid, or if the valid ones
        have equal rewards, because its advantages are zero.
        """
        if self.filter_groups_metric is None or self.mixture.outcomes is None:
            return super()._dapo_filtered_keys(partition_id)  # type: ignore[misc]
        verdicts = self._dapo_classification_cache[partition_id]  # uid -> shared value, or None
        known = set(verdicts)
        with self._only(partition_id, self.finished_keys[partition_id] - known):
            filtered, counts = super()._dapo_filtered_keys(partition_id)  # type: ignore[misc]
        kept = {uid for uid in verdicts.keys() - known if verdicts[uid] is None}
        for uid, values in self._metric_of_valid(partition_id, kept).items():
            if len(set(values)) < 2:
                verdicts[uid] = values[0] if values else 0.0
                filtered.add(uid)
                counts[verdicts[uid]] += 1
        return filtered, counts

    def _metric_of_valid(self, partition_id: str, uids: set[str]) -> dict[str, list[float]]:
        """uid -> the filter's metric of its valid trajectories."""
        metrics: dict[str, list[float]] = {uid: [] for uid in uids}
        name = self.filter_groups_metric
        for session, ended in self._outcomes(partition_id, uids).items():
            if ended.is_trained:
                metric = ended.reward if name == OF_REWARD else ended.info[str(name)]
                metrics[group_of(session)].append(float(metric))
        return metrics

    def _outcomes(self, partition_id: str, uids: set[str]) -> Mapping[str, SessionOutcome]:
        """Session -> how it ended, of some groups."""
        assert self.mixture.outcomes is not None
        keys = self._keys_of(partition_id, uids)
        return self.mixture.outcomes(partition_id, keys) if keys else {}

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(  # type: ignore[misc]
            global_steps, partition_id
        )
        if partition_id == "train" and self.sync_refill_failed_groups:
            failed = set(self.failure_keys[partition_id])  # also groups that lost one trajectory
        return stale, filtered, failed, counts

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: Any
    ) -> Any:
        stale, filtered, failed, _ = eviction_reasons
        self._note_losses(partition_id, stale | filtered | failed)
        evicted, *rest = super()._evict_terminal_groups(  # type: ignore[misc]
            global_steps, partition_id, eviction_reasons
        )
        for uid in sorted(evicted, key=prompt_of):
            source, _ = prompt_of(uid)
            why: Outcome = "stale" if uid in stale else "filtered" if uid in filtered else "failed"
            is_known = why == "filtered" and self.mixture.outcomes is not None
            judged, solved = self._solved.get(uid, (0, 0)) if is_known else (None, None)
            self.given_up.append(GivenUp(uid=uid, why=why, judged=judged, solved=solved))
            self._replaced[source][why] += 1
            # In sync mode, verl starts two prompts for a filtered group.
            self._owed[source] += 2 if why == "filtered" and self.trainer_mode == "sync" else 1
        if evicted:  # groups of validation are never evicted
            self._check_patience()
        return evicted, *rest

    def _note_losses(self, partition_id: str, dropped: set[str]) -> None:
        """Read the lost trajectories of groups before the groups are cleared."""
        if not dropped or self.mixture.outcomes is None:
            return
        outcomes = self._outcomes(partition_id, dropped)
        sizes = Counter(map(group_of, outcomes))
        faults: dict[str, list[str]] = {uid: [] for uid in sizes}
        self._solved = dict.fromkeys(sizes, (0, 0))
        for session, ended in outcomes.items():
            if ended.is_judged:
                judged, solved = self._solved[group_of(session)]
                self._solved[group_of(session)] = judged + 1, solved + ended.is_solved
            if ended.fault is not None and not ended.is_trained:  # its first token was not late
                faults[group_of(session)].append(ended.fault)
        for uid, own in faults.items():
            source, _ = prompt_of(uid)
            self._losses.append(
                GroupFaults(source=source, trajectories=sizes[uid], faults=tuple(own))
            )
            if own:
                self._last_fault[source] = own[-1]

    def _refill(self, prompts: int) -> None:
        """Start new prompts of the sources that need them."""
        wanted: Counter[str] = Counter()
        short = sorted(
            self._owed, key=lambda name: (self.in_flight[name] - self._missing(name), name)
        )
        for source in short:
            if self.trainer_mode == "sync" and not self._missing(source):
                continue  # its quota is full, so a new group would be thrown away
            if not self._most.get(source, 1):
                continue  # its schedule has ended
            wanted[source] = min(self._owed[source], prompts - wanted.total())
        unpaid = prompts - wanted.total()
        self._owed -= wanted
        for source in short:
            dropped = min(self._owed[source], unpaid) if source not in wanted else 0
            self._owed[source] -= dropped
            unpaid -= dropped
        self._owed = +self._owed
        if wanted := +wanted:
            self.mixture.draw(dict(wanted))

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if (now := self.mixture.clock()) >= self._checked_at + CHECK_S:
            self._checked_at = now
            self.mixture.check()
        if partition_id == "train":
            self._check_patience()
            # Prompts restored from another mixture may be too few for the quotas.
            lacking = {
                source: self._missing(source) - self.in_flight[source] - self._owed[source]
                for source in self._quota
            }
            if lacking := {source: count for source, count in lacking.items() if count > 0}:
                self.mixture.draw(lacking)
        lacked = [source for source in self._quota if self._missing(source)]
        last_debug_time = super()._wait_for_next_poll(partition_id, last_debug_time)  # type: ignore[misc]
        if partition_id == "train":
            waited_s = self.mixture.clock() - self._since
            for source in lacked:
                self._waited[source] = self._waited_before.get(source, 0.0) + waited_s
        return last_debug_time

    def _missing(self, source: str) -> int:
        """Number of finished groups that a source's quota still lacks."""
        return self._quota.get(source, 0) - len(self._ready.get(source, ()))

    def _check_patience(self) -> None:
        waited_s, limits = self.mixture.clock() - self._since, self.mixture.limits
        if waited_s > self.mixture.max_wait_s and not any(map(self._missing, self._quota)):
            raise SourceStarved(
                f"step={self._step} has the groups of its batch and waits for others in flight: "
                f"{dict(+self.in_flight)}, which would become too stale or belong to this step; "
                f"waited {waited_s:.0f} s, {self.mixture.max_wait_s:g} s are allowed; look for a "
                f"stuck tool or engine, or raise {limits}.max_wait_s"
            )
        for source, quota in self._quota.items():
            replaced = self._replaced[source]
            limit = self.mixture.max_replacements * max(1, quota)
            if not self._missing(source):
                continue
            if replaced.total() > limit:
                cause = f"{replaced.total()} prompts of it were replaced, {limit} are allowed"
                remedy = (
                    f"look for what its groups have in common, or raise {limits}.max_replacements"
                )
            elif waited_s > self.mixture.max_wait_s:
                cause = f"waited {waited_s:.0f} s, {self.mixture.max_wait_s:g} s are allowed"
                remedy = f"look for a stuck tool or engine, or raise {limits}.max_wait_s"
            else:
                continue
            have = {
                name: f"{len(self._ready.get(name, ()))}/{own}" for name, own in self._quota.items()
            }
            raise SourceStarved(
                f"step={self._step} cannot fill its batch with source={source!r}: {cause}; it has "
                f"{have[source]} finished groups and {self.in_flight[source]} under way, "
                f"{dict(replaced) or 'none'} replaced, {self._last_fault.get(source, 'no fault')}; "
                f"all sources {have}; {remedy}"
            )


class MixedReplayBuffer(_ExactQuotas, ReplayBuffer):
    """Synchronous training."""


class MixedReplayBufferAsync(_ExactQuotas, ReplayBufferAsync):
    """Asynchronous training, colocated or separate."""

    lead: Lead | None

    # verl's
    max_off_policy_threshold: int | None
    max_off_policy_strategy: str

    def wanted(self, total: int) -> dict[str, int]:
        """source -> prompts to start now. Called once a step, before its first batch is sampled.

        Args:
            total: groups that may be open; not used if `mixture.ahead` is a number.
        """
        self._sync_metadata_from_transfer_queue()
        self._end_of_training()
        is_open = self.in_flight.copy()
        for uid in self.finished_keys["train"] | self.failure_keys["train"]:
            is_open[prompt_of(uid)[0]] += 1
        least = self.mixture.seats(0)
        steps = math.ceil(total / sum(least.values()))
        quotas = {name: n / steps for name, n in self.mixture.seats(steps - 1).items()}
        last = {name: self._most_versions(name) or UNBOUNDED * steps for name in least}
        seats = {bound: self.mixture.seats(bound - 1) for bound in set(last.values())}
        self._most = {name: seats[bound][name] for name, bound in last.items()}
        seconds = self._flights.means(quotas)
        if (ahead := self.mixture.ahead) is None:
            self.lead = lead_of(quotas, least, self._most, seconds, total, self._training_s)
        else:
            groups = {name: min(self._most[name], n + ahead) for name, n in least.items() if n}
            step_s = max(quotas[name] * seconds[name] / n for name, n in groups.items())
            self.lead = Lead(
                groups=groups, step_s=step_s, limit="fixed", source=None, flight_s=seconds
            )
            total = sum(groups.values())
        for name in is_open:  # of a source whose schedule has ended, some are never trained
            is_open[name] = min(is_open[name], self._most.get(name, 0))
        return to_start(self.lead.groups, least, is_open, total)

    _training_s: float = 0.0
    """Smoothed seconds of a step in which the trainer does not wait for groups."""

    def _end_of_training(self) -> None:
        """Count the time since the last batch was sampled, at the first dispatch of a step."""
        self._pause()
        self._training_s += (self._busy_s - self._training_s) / 4
        self._busy_s = 0.0

    def _most_versions(self, source: str) -> int | None:
        """Most model versions that a trajectory of a source may span; None without a bound."""
        own = self.mixture.max_staleness.get(source)
        bounds = [n for n in (own, self.max_off_policy_threshold) if n is not None]
        return min(bounds, default=None)

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        stale = super()._stale_terminal_keys(global_steps, partition_id)
        if partition_id != "train" or self.max_off_policy_strategy != "drop":
            return stale
        for uid in self.finished_keys["train"] if self.mixture.max_staleness else ():
            bound = self.mixture.max_staleness.get(prompt_of(uid)[0])
            started = self.prompt_global_steps["train"][uid]
            if bound is not None and global_steps - started + 1 > bound:
                stale.add(uid)
        return stale

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        enough = super()._has_enough_samples(
            global_steps, partition_id, batch_size, sampleable_keys
        )
        if enough and partition_id == "train":
            if self.max_off_policy_strategy == "wait":
                enough = not any(self._must_wait(source, global_steps) for source in self._quota)
            self._left_at = self.mixture.clock()  # the end of the wait, unless it goes on
        return enough

    def _must_wait(self, source: str, global_steps: int) -> bool:
        """Whether older groups would become too stale if younger ones took their seats now.

        verl waits only for groups that have reached the bound, which may be too late. Say the quota
        is 1 and the bound is 3. The groups A and B of step 1 are in flight in step 2, and C of step
        2 has ended. If C were trained in step 2, only the seat of step 3 would be left for A and B,
        and one of them would be trained in step 4 with 4 versions.
        """
        bound, own = self._most_versions(source), self._ready[source]
        if bound is None or not own:
            return False
        started = self.prompt_global_steps["train"]
        flying = [
            started[uid]
            for uid in (*self.pending_keys["train"], *self.running_keys["train"])
            if prompt_of(uid)[0] == source
        ]
        if not flying or min(flying) >= max(started[uid] for uid in own):
            return False  # the oldest groups are taken; waiting would change nothing
        left = flying + [group.step for group in self._pool[source][len(own) :]]
        due = Counter(max(0, step + bound - 1 - global_steps) for step in left)
        taken = len(own)
        for later in range(bound):
            taken += due[later]
            if taken > self.mixture.seats(later)[source]:
                return True
        return False

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> Any:
        if partition_id == "train":
            self._begin(global_steps, target_count)
        else:
            self.list_all_next()
        return super().wait_for_sampleable(global_steps, partition_id, target_count)

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        if partition_id == "train" and self.train_batch_size is not None:
            self._quota = self.mixture.quota(self.train_batch_size)
        return super().get_sampleable_count(global_steps, partition_id)


def _is_before(uid: str, ends: Mapping[str, int]) -> bool:
    """Whether a group's draw comes before the next draw of its source."""
    source, draw = prompt_of(uid)
    return draw < ends.get(source, draw + 1)
