"""Checks every mask bit of a run's trajectories against the engine's output, and that no answer of
the engine is missing or trained twice.

`trajectories/<step>.jsonl` has the trained tokens, their mask, and the engine's output before any
cut (`engine_turns`). A trajectory is a session, which may be several lines, one for each sequence.
A sequence has the numbers of its requests to the engine, and a session the number of all its
requests.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from agent_loop.records.run_folder import trajectory_files
from agent_loop.records.trajectory_record import (
    LATER,
    TrajectoryRecord,
    absent_fields,
    read_file,
)

SHOWN = 20
"""Most problems of a session. A damaged line may say that it had billions of requests."""


@dataclass(slots=True, kw_only=True)
class MaskReport:
    by_step: Counter[int] = field(default_factory=Counter[int])
    """Step -> trajectories in its file; steps without a file are missing."""

    rows: int = 0
    model_tokens: int = 0
    tool_tokens: int = 0
    without_masking: int = 0
    """Trajectories with `state_masking=false`, whose tool tokens are in the loss."""

    absent: set[str] = field(default_factory=lambda: set(LATER))
    """Fields that no record has, because an older release wrote them all."""

    problems: list[str] = field(default_factory=list)

    @property
    def trajectories(self) -> int:
        return self.by_step.total()

    @property
    def ok(self) -> bool:
        return self.trajectories > 0 and not self.problems

    def __str__(self) -> str:
        ablation = (
            f"; state_masking=false: tool tokens of {self.without_masking} trajectories are in "
            "the loss, counted as model tokens"
        )
        in_rows = f" in {self.rows} rows" if self.rows > self.trajectories else ""
        return (
            f"{self.trajectories} trajectories{in_rows}, "
            f"{self.model_tokens} model tokens with mask 1, "
            f"{self.tool_tokens} tool tokens with mask 0, {len(self.problems)} problems"
            f"{ablation if self.without_masking else ''}"
        )


def audit_masks(run_dir: Path) -> MaskReport:
    report = MaskReport()
    for path in trajectory_files(run_dir / "trajectories"):
        sessions = defaultdict[str, list[TrajectoryRecord]](list)
        records, unreadable = read_file(path)
        report.problems += unreadable
        report.absent = absent_fields(records, report.absent)
        for record in records:
            sampled = sum(record.response_mask)
            sessions[record.session].append(record)
            report.rows += 1
            report.model_tokens += sampled
            report.tool_tokens += len(record.response_mask) - sampled
            report.without_masking += not record.state_masking
            where = f"{path.name} key={record.key}"
            report.problems += [f"{where}: {problem}" for problem in mask_problems(record)]
        report.by_step[int(path.stem)] = len(sessions)
        for name, sequences in sessions.items():
            where = f"{path.name} session={name}"
            report.problems += [f"{where}: {problem}" for problem in session_problems(sequences)]
    return report


def session_problems(sequences: Sequence[TrajectoryRecord]) -> list[str]:
    """Sequences of a session that are missing, and answers of the engine that are in none or in
    several: the first `SHOWN` of them.

    Args:
        sequences: the lines of the session. Those of release 1.0.0 do not say how many there
            should be.
    """
    said = [s for s in sequences if s.requests is not None and s.why_masked is None]
    if not said:
        return []
    if said[-1].rows != len(sequences):
        return [f"{len(sequences)} rows are there, of {said[-1].rows}"]
    held = Counter(turn.request for sequence in sequences for turn in sequence.turns)
    wrong = (n for n in range(1, (said[-1].requests or 0) + 1) if held[n] != 1)
    return [
        f"the engine's answer to request {number} is in {held[number] or 'no'} rows"
        for number in islice(wrong, SHOWN)
    ]


def mask_problems(record: TrajectoryRecord) -> list[str]:
    """The rules that a record with its tokens breaks; empty if every mask bit is right."""
    ids, mask, log_probs = record.response_ids, record.response_mask, record.log_probs
    if not len(ids) == len(mask) == len(log_probs):
        return [f"lengths differ: ids {len(ids)}, mask {len(mask)}, log-probs {len(log_probs)}"]
    problems = []
    if set(mask) - {0, 1}:
        problems.append(f"mask holds {sorted(set(mask) - {0, 1})}, only 0 and 1 mean something")
    if any(log_prob != 0.0 for log_prob, bit in zip(log_probs, mask, strict=True) if not bit):
        problems.append("a token with mask 0 has a log-prob")
    if (why := record.why_masked) is not None:
        return problems + ([f"a {why} trajectory has mask 1"] if any(mask) else [])
    masked = record.state_masking
    if not masked and len(set(mask)) > 1:
        problems.append("state_masking=false, but some tokens have mask 0 and some mask 1")

    turns = iter(record.engine_turns)
    covered = 0
    for segment in record.segments:
        start, length = segment.start, segment.length
        if start != covered:
            problems.append(f"segment at {start} does not follow the one ending at {covered}")
        covered = start + length
        bits, tokens = mask[start:covered], ids[start:covered]
        if segment.author == "tool":
            problems += [f"tool tokens at {start} have mask 1"] if masked and any(bits) else []
            continue
        returned = next(turns, [])
        if not all(bits):
            problems.append(f"model tokens at {start} have mask 0")
        if tokens != returned[:length]:
            problems.append(f"model tokens at {start} are not the ones the engine returned")
    if covered != len(ids):
        problems.append(f"segments cover {covered} of {len(ids)} tokens")
    if next(turns, None) is not None:
        problems.append("the engine returned a turn that is not in the response")
    return problems
