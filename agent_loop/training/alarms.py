"""What stops a run, or is said aloud: faults, loops that raise, drift. Pure; no verl."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent_loop.metrics.source_metrics import TrainedTrajectory, groups_of
from samplers.faults import GroupFaults, fault_of

LEAST_GROUPS = 3
"""Groups of a source that must have been seen before its faults stop a run, unless the window is
full: one failed request can lose a whole group."""


class RubbleError(RuntimeError):
    """Too much of what would be trained is not the policy's doing."""


@dataclass(slots=True)
class _Counts:
    """What one source lost in one step."""

    step: int
    groups: int = 0
    trajectories: int = 0
    lost: int = 0


class FaultWindow:
    """Share of each source's trajectories that were lost, over the last steps that it was in.

    It forgets on restart: a run that was stopped for its faults may be tried again.

    Args:
        limit: a larger share stops the run; 1 never does.
        steps: how far back it looks.
    """

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._steps = limit, steps
        self._seen: defaultdict[str, deque[_Counts]] = defaultdict(lambda: deque(maxlen=steps))

    def check(self, step: int, groups: Iterable[GroupFaults]) -> None:
        """Take in groups of a step, which may come in several parts.

        Raises:
            RubbleError: a source lost too many; names tool and last error.
        """
        last: dict[str, str] = {}
        for group in groups:
            seen = self._seen[group.source]
            if not seen or seen[-1].step != step:
                seen.append(_Counts(step))
            seen[-1].groups += 1
            seen[-1].trajectories += group.trajectories
            seen[-1].lost += len(group.faults)
            if group.faults:
                last[group.source] = group.faults[-1]
        for source, fault in last.items():
            seen = self._seen[source]
            total, lost = sum(c.trajectories for c in seen), sum(c.lost for c in seen)
            enough = len(seen) == self._steps or sum(c.groups for c in seen) >= LEAST_GROUPS
            if enough and lost > self._limit * total:
                raise RubbleError(
                    f"source={source} lost {lost} of {total} trajectories of the last {len(seen)} "
                    f"steps, more than mixed.infra_error_limit={self._limit}: no policy is "
                    f"trained on rubble; {fault}; see `verl-mixed doctor` and the run's "
                    "tool_server.log, then start the same command again"
                )


def faults_by_group(trajectories: Iterable[TrainedTrajectory]) -> list[GroupFaults]:
    """What each group lost, in the order of their first trajectories."""
    return [
        GroupFaults(
            source=own[0].source,
            trajectories=len(own),
            faults=tuple(fault_of(t.record) for t in own if t.is_lost),
        )
        for own in groups_of(trajectories).values()
    ]


def nothing_to_train(trajectories: Sequence[TrainedTrajectory]) -> str | None:
    """Why a batch has no token with mask 1; None where it has one."""
    if any(any(t.response_mask) for t in trajectories):
        return None
    reasons = dict(Counter(str(t.record["stop_reason"]) for t in trajectories))
    faults = [fault for group in faults_by_group(trajectories) for fault in group.faults]
    return f"stop reasons={reasons}, {faults[-1] if faults else 'no fault'}"


def exceeds(seen: float, limit: float | None) -> bool:
    """Whether a number is above its limit; one that is none (NaN) is."""
    return limit is not None and not seen <= limit


def loop_error(trajectories: Sequence[TrainedTrajectory]) -> str | None:
    """The first exception of an agent loop's own code, None without one."""
    for t in trajectories:
        if t.record["loop_error"] is not None:
            return f"source={t.source} row_id={t.row_id}: {t.record['fault']}"
    return None


def drift_problems(
    trajectory: TrainedTrajectory, decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Where the trained tokens of a trajectory are not what its loop saw; none when all agree.

    Args:
        trajectory: as trained.
        decode: the trainer's tokenizer.
    """
    mask, log_probs = trajectory.response_mask, trajectory.log_probs
    record = trajectory.record
    if not len(trajectory.response_ids) == len(mask) == len(log_probs):
        return [f"{len(trajectory.response_ids)} ids, {len(mask)} bits, {len(log_probs)} log-probs"]
    problems = []
    if trajectory.is_lost:
        return ["a lost trajectory has mask 1"] if any(mask) else []
    # A sampled token may have log-prob 0.0, as one that was certain; one with mask 0 has no other.
    if record["state_masking"]:
        segments = record["segments"]
        bits = [int(author == "model") for author, _, n, _ in segments for _ in range(n)]
        if mask != bits:
            problems.append(f"mask 1 is not on the {sum(bits)} sampled tokens")
        if any(log_prob and not bit for log_prob, bit in zip(log_probs, mask, strict=True)):
            problems.append("a token with mask 0 has a log-prob")
    for author, start, length, text in record["segments"]:
        seen = decode(trajectory.response_ids[start : start + length])
        if seen != text and (author == "model" or text):  # the filler of an empty one has no text
            problems.append(f"tokens from {start} say {seen!r}, the loop acted on {text!r}")
    return problems
