"""What stops a run, or is said aloud: faults, loops that raise, drift. Pure; no verl."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from agent_loop.source_metrics import TrainedTrajectory


class RubbleError(RuntimeError):
    """Too much of what would be trained is not the policy's doing."""


class FaultWindow:
    """Share of each source's trajectories that were lost, over the last steps.

    It forgets on restart: a run that was stopped for its faults may be tried again.

    Args:
        limit: a larger share stops the run; 1 never does.
        steps: how far back it looks.
    """

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._steps = limit, steps
        self._seen: defaultdict[str, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=steps)
        )

    def check(self, trajectories: Sequence[TrainedTrajectory]) -> None:
        """Take in one step.

        Raises:
            RubbleError: a source lost too many; names tool and last error.
        """
        by_source: defaultdict[str, list[TrainedTrajectory]] = defaultdict(list)
        for trajectory in trajectories:
            by_source[trajectory.source].append(trajectory)
        for source, own in by_source.items():
            faults = [t.record for t in own if t.is_lost]
            seen = self._seen[source]
            seen.append((len(faults), len(own)))
            lost, total = (sum(counts) for counts in zip(*seen, strict=True))
            if faults and lost > self._limit * total:
                last = faults[-1]
                raise RubbleError(
                    f"source={source} lost {lost} of {total} trajectories of the last {len(seen)} "
                    f"steps, more than mixed.infra_error_limit={self._limit}: no policy is "
                    f"trained on rubble; tool={last['fault_tool']}, last error: {last['fault']}; "
                    "see `verl-mixed doctor` and the run's tool_server.log, then start the same "
                    "command again"
                )


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
