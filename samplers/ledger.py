"""Account of every trained prompt, and the audit that holds it against the plan.

`ledger.jsonl` has a line per prompt. A step's lines go to disk together, before its checkpoint, so
after a crash the file is at most ahead of the checkpoint: resume calls `Ledger.rewind`, and the
steps that training repeats are in the file once. One writer per file.

The audit proves from the file alone that every batch held the plan's counts, and that within each
source no prompt was passed over or trained twice. It looks at each source by itself because a group
that fails is replaced by the next prompt of the *same* source, which lies further on in the stream.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from samplers.mixture_plan import MixturePlan

UNTRAINED_OUTCOMES = frozenset({"failed", "filtered", "evicted"})
"""Outcomes of prompts that were drawn and replaced: accounted for, and not part of the batch."""

_SHOWN = 5
"""Problems of one kind that a report spells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One prompt of one step."""

    step: int
    """Optimizer step, from 1; its batch is `plan.batch(step - 1)`."""

    position: int
    """Place in the plan's stream, from 0."""

    source: str

    row: int
    """Row within its source."""

    row_id: str
    """Stable name of the row, `<source>:<sha1>`."""

    outcome: str
    """How it ended; one of `UNTRAINED_OUTCOMES` when it was replaced instead of trained."""


_FIELDS = {"step": int, "position": int, "source": str, "row": int, "row_id": str, "outcome": str}


class Ledger:
    """Appends a run's prompts to `ledger.jsonl`, a step at a time.

    Args:
        path: the file; made on the first append. A last line that a crash cut short is removed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.last_step = 0
        """Highest step in the file; 0 for none."""
        self._keep(read_ledger(self.path))

    def append_step(self, step: int, entries: Sequence[LedgerEntry]) -> None:
        """Write one step's prompts; they are on disk when this returns.

        Args:
            step: above every step in the file.
            entries: the step's prompts, each with this step.

        Raises:
            ValueError: the step is in the file already, or an entry is of another step.
        """
        if step <= self.last_step:
            raise ValueError(
                f"cannot append step={step} to {self.path}: it has step={self.last_step} already; "
                "call rewind with the step of the checkpoint that training resumes from"
            )
        if strays := {entry.step for entry in entries} - {step}:
            raise ValueError(f"cannot append entries of steps={sorted(strays)} as step={step}")
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab") as file:
                file.write(_encode(entries))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            if self.path.exists():
                os.truncate(self.path, size_bytes)  # half a step would break the next append
            raise
        if size_bytes == 0:
            _sync_folder(self.path.parent)
        self.last_step = step

    def rewind(self, step: int) -> int:
        """Drop the lines of all steps above `step`: those that a resumed run trains again.

        Returns:
            Lines dropped.
        """
        entries = read_ledger(self.path)
        kept = [entry for entry in entries if entry.step <= step]
        self._keep(kept)
        return len(entries) - len(kept)

    def _keep(self, entries: Sequence[LedgerEntry]) -> None:
        """Make the file hold exactly these entries, by one rename."""
        self.last_step = max((entry.step for entry in entries), default=0)
        wanted = _encode(entries)
        if not self.path.exists() or self.path.read_bytes() == wanted:
            return
        draft = self.path.with_name(f"{self.path.name}.tmp")
        with open(draft, "wb") as file:
            file.write(wanted)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        _sync_folder(self.path.parent)


def read_ledger(path: str | os.PathLike[str]) -> list[LedgerEntry]:
    """Entries in file order; a last line that was cut short is left out.

    Returns:
        N entries; none where there is no file.

    Raises:
        ValueError: a line before the last is no entry.
    """
    if not os.path.exists(path):
        return []
    *lines, tail = Path(path).read_bytes().split(b"\n")  # a whole file ends in a newline: no tail
    entries: list[LedgerEntry] = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_decode(line))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not tail:
                break
            raise ValueError(
                f"cannot read {path} line {number}: not a ledger entry ({error}); "
                "restore the file, or give the run a new folder"
            ) from error
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    steps: int
    """Steps in the ledger."""

    trained: dict[str, int]
    """Source -> prompts trained; S entries in the order of the plan."""

    problems: tuple[str, ...]
    """One sentence each; empty when the ledger keeps the plan."""

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems


def audit(entries: Iterable[LedgerEntry], plan: MixturePlan) -> AuditReport:
    """Hold a ledger against the plan of its run.

    Args:
        entries: N entries in file order.
        plan: the plan with the settings of the run.
    """
    entries = list(entries)
    by_step: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        by_step[entry.step][entry.source] += entry.outcome not in UNTRAINED_OUTCOMES
    trained = sum(by_step.values(), Counter[str]())
    problems = [
        *_step_problems([entry.step for entry in entries]),
        *_few(_count_problems(by_step, plan)),
        *_few(_row_problems(entries, plan)),
        *_few(_repeat_problems(entries)),
        *_few(_gap_problems(entries, plan)),
    ]
    return AuditReport(
        steps=len(by_step),
        trained={source: trained[source] for source in plan.sources},
        problems=tuple(problems),
    )


def _step_problems(steps: list[int]) -> list[str]:
    found: list[str] = []
    seen = sorted(set(steps))
    if seen and seen[0] != 1:
        found.append(f"the first step is {seen[0]}, not 1")
    found += [
        f"step {after} follows step {before}"
        for before, after in pairwise(seen)
        if after != before + 1
    ]
    if steps != sorted(steps):
        found.append("steps are out of order")
    return _few(found)


def _count_problems(by_step: dict[int, Counter[str]], plan: MixturePlan) -> list[str]:
    found: list[str] = []
    for step, counts in by_step.items():
        if step < 1:
            continue  # said by the check of steps
        due = plan.counts(step - 1)
        found += [
            f"step {step} trained {counts[source]} prompts of source={source!r}, "
            f"the plan has {due.get(source, 0)}"
            for source in sorted(due.keys() | counts.keys())
            if counts[source] != due.get(source, 0)
        ]
    return found


def _row_problems(entries: list[LedgerEntry], plan: MixturePlan) -> list[str]:
    found: list[str] = [
        f"step {entry.step} has position={entry.position}; positions start at 0"
        for entry in entries
        if entry.position < 0
    ]
    entries = [entry for entry in entries if entry.position >= 0]
    planned = plan.prompts(np.array([entry.position for entry in entries], dtype=np.int64))
    for entry, source_id, row in zip(
        entries, planned.source_ids.tolist(), planned.rows.tolist(), strict=True
    ):
        source = plan.sources[int(source_id)]
        if (entry.source, entry.row) != (source, row):
            found.append(
                f"step {entry.step} has source={entry.source!r} row={entry.row} at "
                f"position={entry.position}, the plan has source={source!r} row={row}"
            )
    return found


def _repeat_problems(entries: list[LedgerEntry]) -> list[str]:
    found: list[str] = []
    first_step: dict[int, int] = {}
    for entry in entries:
        earlier = first_step.setdefault(entry.position, entry.step)
        if earlier != entry.step:
            found.append(f"position={entry.position} is in step {earlier} and in step {entry.step}")
    inside = Counter((entry.step, entry.position) for entry in entries)
    found += [
        f"position={position} is {times} times in step {step}"
        for (step, position), times in inside.items()
        if times > 1
    ]
    return found


def _gap_problems(entries: list[LedgerEntry], plan: MixturePlan) -> list[str]:
    found: list[str] = []
    positions = np.unique([entry.position for entry in entries if entry.position >= 0])
    source_ids, draws = plan.draws(positions.astype(np.int64))
    for source_id, source in enumerate(plan.sources):
        here = source_ids == source_id
        own_draws, own_positions = draws[here].tolist(), positions[here].tolist()
        before, after = -1, "the start"
        for draw, position in zip(own_draws, own_positions, strict=True):
            if missing := draw - before - 1:
                found.append(
                    f"{missing} prompts of source={source!r} were skipped between {after} "
                    f"and position={position}"
                )
            before, after = draw, f"position={position}"
    return found


def _few(found: list[str]) -> list[str]:
    """The first problems of one kind, and how many more there are."""
    rest = len(found) - _SHOWN
    return found if rest <= 1 else [*found[:_SHOWN], f"{rest} more like: {found[_SHOWN]}"]


def _encode(entries: Iterable[LedgerEntry]) -> bytes:
    return b"".join(json.dumps(asdict(entry)).encode() + b"\n" for entry in entries)


def _decode(line: bytes) -> LedgerEntry:
    parsed: Any = json.loads(line)
    values = cast(dict[str, Any], parsed if isinstance(parsed, dict) else {})
    if {name: type(value) for name, value in values.items()} != _FIELDS:
        raise ValueError(f"want {', '.join(_FIELDS)}, of their types")
    return LedgerEntry(**values)


def _sync_folder(folder: Path) -> None:
    """Make a new or renamed file survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
