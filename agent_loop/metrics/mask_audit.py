"""Checks every mask bit of a run's trajectories against the engine's output, and that no answer of
the engine is missing or trained twice.

`trajectories/<step>.jsonl` has the trained tokens, their mask, and the engine's output before any
cut (`engine_turns`). A trajectory is a session, which may be several lines, one for each row. A row
has the numbers of its requests to the engine, and a session the number of all its requests.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_loop.training.run_folder import read_lines, trajectory_files
from agent_loop.turns.trajectory import why_masked
from samplers.uid import session_of


@dataclass(slots=True, kw_only=True)
class MaskReport:
    by_step: Counter[int] = field(default_factory=Counter[int])
    """Step -> trajectories in its file; steps without a file are missing."""

    rows: int = 0
    model_tokens: int = 0
    tool_tokens: int = 0
    without_masking: int = 0
    """Trajectories with `state_masking=false`, whose tool tokens are in the loss."""

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
        sessions = defaultdict[str, _Requests](_Requests)
        for record in read_lines(path):
            sampled = sum(record["response_mask"])
            sessions[session_of(record["key"])].add(record)
            report.rows += 1
            report.model_tokens += sampled
            report.tool_tokens += len(record["response_mask"]) - sampled
            report.without_masking += not record.get("state_masking", True)
            where = f"{path.name} key={record['key']}"
            report.problems += [f"{where}: {problem}" for problem in mask_problems(record)]
        report.by_step[int(path.stem)] = len(sessions)
        for name, session in sessions.items():
            where = f"{path.name} session={name}"
            report.problems += [f"{where}: {problem}" for problem in session.problems()]
    return report


@dataclass(slots=True)
class _Requests:
    """The rows of one session, and the requests to the engine that they hold."""

    rows: int = 0
    of_session: tuple[int, int] | None = None
    """Its rows and its requests, as its lines say; None if they do not, as before release 1.1."""

    held: Counter[int] = field(default_factory=Counter[int])
    """Number of a request -> rows that have its answer."""

    def add(self, record: Mapping[str, Any]) -> None:
        self.rows += 1
        if record.get("requests") is not None and why_masked(record) is None:
            self.of_session = record["rows"], record["requests"]
        numbers = [turn.get("request") for turn in record["turns"]]
        self.held.update(number for number in numbers if number is not None)

    def problems(self) -> list[str]:
        """Answers of the engine that are in no row or in several, and rows that are missing."""
        if self.of_session is None:
            return []
        rows, requests = self.of_session
        if rows != self.rows:
            return [f"{self.rows} rows are there, of {rows}"]
        return [
            f"the engine's answer to request {number} is in {self.held[number] or 'no'} rows"
            for number in range(1, requests + 1)
            if self.held[number] != 1
        ]


def mask_problems(record: Mapping[str, Any]) -> list[str]:
    """The rules that a line of a trajectory file breaks; empty if every mask bit is right."""
    ids, mask, log_probs = record["response_ids"], record["response_mask"], record["log_probs"]
    if not len(ids) == len(mask) == len(log_probs):
        return [f"lengths differ: ids {len(ids)}, mask {len(mask)}, log-probs {len(log_probs)}"]
    problems = []
    if set(mask) - {0, 1}:
        problems.append(f"mask holds {sorted(set(mask) - {0, 1})}, only 0 and 1 mean something")
    if any(log_prob != 0.0 for log_prob, bit in zip(log_probs, mask, strict=True) if not bit):
        problems.append("a token with mask 0 has a log-prob")
    if (why := why_masked(record)) is not None:
        return problems + ([f"a {why} trajectory has mask 1"] if any(mask) else [])
    masked = record.get("state_masking", True)
    if not masked and len(set(mask)) > 1:
        problems.append("state_masking=false, but some tokens have mask 0 and some mask 1")

    turns = iter(record["engine_turns"])
    covered = 0
    for author, start, length, _text in record["segments"]:
        if start != covered:
            problems.append(f"segment at {start} does not follow the one ending at {covered}")
        covered = start + length
        bits, tokens = mask[start:covered], ids[start:covered]
        if author == "tool":
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
