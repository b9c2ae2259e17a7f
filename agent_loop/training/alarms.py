"""Alarms: too many lost trajectories, loops that raise, late event loops, drift between loop and
trainer.

They stop a run or are logged. Pure functions; no verl.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.records.source_metrics import groups_of
from agent_loop.records.trajectory_record import TrajectoryRecord
from samplers.faults import GroupFaults

MIN_GROUPS = 3
"""A source's faults stop a run only after so many of its groups, or when the window is full: one
failed request can lose a whole group."""

MOST_LAG_S = 0.5
"""`mixed/loop_lag_s/p99` above it is logged. A turn passes the event loop several times, and takes
some seconds in the engine."""


class TooManyFaults(RuntimeError):
    """More trajectories were lost to infrastructure than `mixed.infra_error_limit` allows, or no
    trajectory of a batch has a token to train."""


@dataclass(slots=True)
class _Counts:
    step: int
    groups: int = 0
    trajectories: int = 0
    lost: int = 0


DRIFT_EVERY = 16
"""One of this many trajectories of a step is decoded and compared with the text of its loop."""


class FaultWindow:
    """The share of lost trajectories of each source, over the last steps that trained the source.

    The window is empty after a restart, so that a run which was stopped for its faults can be
    started again.

    Args:
        limit: a larger share stops the run; 1 never stops it.
        steps: length of the window.
    """

    def __init__(self, limit: float, steps: int = 5) -> None:
        self._limit, self._steps = limit, steps
        self._counts: defaultdict[str, deque[_Counts]] = defaultdict(lambda: deque(maxlen=steps))

    def check(self, step: int, groups: Iterable[GroupFaults]) -> None:
        """Add groups of a step, which may be added in several parts.

        Raises:
            TooManyFaults: a source lost too many; the message has the tool and its last error.
        """
        last_fault: dict[str, str] = {}
        for group in groups:
            steps = self._counts[group.source]
            if not steps or steps[-1].step != step:
                steps.append(_Counts(step))
            steps[-1].groups += 1
            steps[-1].trajectories += group.trajectories
            steps[-1].lost += len(group.faults)
            if group.faults:
                last_fault[group.source] = group.faults[-1]
        for source, fault in last_fault.items():
            steps = self._counts[source]
            total, lost = sum(c.trajectories for c in steps), sum(c.lost for c in steps)
            is_enough = len(steps) == self._steps or sum(c.groups for c in steps) >= MIN_GROUPS
            if is_enough and lost > self._limit * total:
                raise TooManyFaults(
                    f"source={source} lost {lost} of {total} trajectories of the last {len(steps)} "
                    f"steps, more than mixed.infra_error_limit={self._limit}: the batch would be "
                    f"trained without them; {fault}; see `verl-mixed doctor` and the run's "
                    "tool_server.log, then start the same command again"
                )


def faults_by_group(trajectories: Iterable[TrajectoryRecord]) -> list[GroupFaults]:
    """The faults of each group, in the order of the groups' first trajectories."""
    return [
        GroupFaults(
            source=own[0].source,
            trajectories=len(own),
            faults=tuple(t.lost_to for t in own if t.is_lost),
        )
        for own in groups_of(trajectories).values()
    ]


def nothing_to_train(trajectories: Sequence[TrajectoryRecord]) -> str | None:
    """Why no trajectory of a batch has a token with mask 1; None if one has."""
    if any(t.trained_tokens for t in trajectories):
        return None
    reasons = dict(Counter(t.stop_reason for t in trajectories))
    faults = [fault for group in faults_by_group(trajectories) for fault in group.faults]
    return f"stop reasons={reasons}, {faults[-1] if faults else 'no fault'}"


def exceeds(number: float, limit: float | None) -> bool:
    """Whether a number is above its limit. NaN is; without a limit nothing is."""
    return limit is not None and not number <= limit


def loop_error(trajectories: Sequence[TrajectoryRecord]) -> str | None:
    """The first exception that the code of an agent loop raised; None without one."""
    for t in trajectories:
        if t.loop_error is not None:
            return f"source={t.source} row_id={t.row_id}: {t.fault}"
    return None


def late_loops(lag_s: float | None) -> str | None:
    """What to do about event loops of agent loop workers that run late; None if they do not.

    Args:
        lag_s: `mixed/loop_lag_s/p99`.
    """
    if lag_s is None or lag_s <= MOST_LAG_S:
        return None
    return (
        f"mixed/loop_lag_s/p99={lag_s:.2f}: the event loops of agent loop workers run later than "
        f"{MOST_LAG_S:g} s, so engines and tools wait for them; raise "
        "actor_rollout_ref.rollout.agent.num_workers, or give the nodes more cores"
    )


def drift_problems(record: TrajectoryRecord, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Differences between the tokens of a trained trajectory and what its agent loop recorded: in
    the mask, the log-probs where the mask is 0, and the text of each segment."""
    ids, mask, log_probs = map(
        np.asarray, (record.response_ids, record.response_mask, record.log_probs)
    )
    if not len(ids) == len(mask) == len(log_probs):
        return [f"{len(ids)} ids, {len(mask)} bits, {len(log_probs)} log-probs"]
    problems = []
    if (ones := int(mask.sum())) != record.trained_tokens:
        problems.append(f"{ones} bits are 1, its loop counted {record.trained_tokens}")
    if (why := record.why_masked) is not None:
        return problems + ([f"a {why} trajectory has mask 1"] if mask.any() else [])
    # With mask 0 every log-prob is 0.0. With mask 1 it may be 0.0 too: a token that was certain.
    if record.state_masking:
        is_sampled = np.repeat(
            [s.author == "model" for s in record.segments], [s.length for s in record.segments]
        )
        if not np.array_equal(mask, is_sampled):
            problems.append(f"mask 1 is not on the {is_sampled.sum()} sampled tokens")
        if log_probs[mask == 0].any():
            problems.append("a token with mask 0 has a log-prob")
    for segment in record.segments:
        start, text = segment.start, segment.text
        decoded = decode(ids[start : start + segment.length].tolist())
        # The filler token of an empty response is recorded without a text.
        if decoded != text and (segment.author == "model" or text):
            problems.append(f"tokens from {start} say {decoded!r}, the loop acted on {text!r}")
    return problems
