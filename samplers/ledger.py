"""The ledger: for every prompt that was drawn, the step that trained it or the reason why none did.

`ledger.jsonl` holds four kinds of lines: the plan of the following steps, at the start and at
every change; the decision for a window of steps, if shares are decided on the way; one line per
prompt; and one line at the end of each step. The lines of a step, and the decision that it leads
to, are written to the disk together, before its checkpoint. A step without its last line was cut
short and does not count. After a crash the ledger may be ahead of the checkpoint: resume calls
`Ledger.rewind`, so that a step that is trained again is in the file only once. One process writes a
file.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from config.disk import flush, plain_lines, sync, write_whole

Outcome = Literal["trained", "filtered", "failed", "stale", "unfinished"]
"""A prompt is replaced by the next prompt of its source if all rewards of its group are equal
(filtered, DAPO), if trajectories were lost (failed), or if its weights are too old (stale). It is
unfinished if the run ended first."""


MOST_STEPS = 1 << 40
"""Steps of the longest run; the plan counts the prompts of so many in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One prompt and its outcome."""

    step: int
    """Optimizer step, from 1, in which it was trained or given up; its batch is
    `plan.batch(step - 1)`."""

    source: str
    draw: int
    """Number of prompts of its source that were drawn before it."""

    row: int
    """Row within its source."""

    row_id: str
    """Stable name of the row, `<source>:<sha1>`; empty if only the draw is known."""

    outcome: Outcome
    trajectories: int
    """Trajectories of its group that were trained."""

    reward_mean: float | None
    """Mean reward of these trajectories; None without any."""

    judged: int | None = None
    """Trajectories of its group with a reward, which no fault ended, if the group was trained or
    filtered. None in ledgers of release 1.0, as the next fields."""

    solved: int | None = None
    """Judged trajectories that solved the prompt (`acc` is 1)."""

    advantage: float | None = None
    """Mean absolute advantage of the judged trajectories (`mean_advantage` of the controller),
    whichever estimator the run has; 0 if their rewards were equal. None of a filtered group."""

    tokens: int | None = None
    """Tokens with mask 1 of its trained trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The last line of a step."""

    step: int
    prompts: int
    """Number of prompt lines of the step."""

    drawn: dict[str, int]
    """Source -> prompts drawn so far, including prompts that are not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many prompts of each source a window of steps has, and why: the controller decided it.

    Mappings have one entry per source.
    """

    window: int
    """Number of the window, from 0."""

    from_step: int
    """First step of the window, from 1."""

    inputs: dict[str, dict[str, float]]
    """What the ledger has of the window before: `prompts`, `trajectories` and `tokens` that were
    trained; `pass_rate` and `advantage` (mean absolute) of the `judged` trajectories, those of
    filtered groups included, with advantage 0; and of all windows so far `seen` groups, and
    `differences`: groups whose trajectories differed. Empty for window 0."""

    state: dict[str, float]
    """`progress`: smoothed advantages. `worst`: growth plus emphasis times pass rate."""

    passed: dict[str, float]
    """Smoothed pass rates."""

    proposed: dict[str, int]
    """Shares that the rule proposes, in millionths."""

    shares: dict[str, int]
    """Shares within all bounds, in millionths."""

    held: list[str]
    """Sources at their floors, because no group had a difference."""

    owed: dict[str, int]
    """Millionths of the unit that a source lacks before this window; below 0: it had too much."""

    foreseen: dict[str, str]
    """Units of one prompt, as fractions."""

    prompts: dict[str, int]
    """Prompts of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStart:
    """The following steps are drawn from this plan."""

    from_step: int
    plan: dict[str, Any]
    """`MixturePlan.description`"""


Line = LedgerEntry | StepEnd | PlanStart | Decision


def has_steps(path: str | os.PathLike[str]) -> bool:
    """Whether a ledger has a whole step. A missing file has none."""
    try:
        with open(path, "rb") as file:
            return any(b'"drawn"' in line for line in file)
    except FileNotFoundError:
        return False


class Ledger:
    """Appends a run's prompts to a file, step by step. A step that was cut short is removed."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path: Path = Path(path)
        self.last_step: int = 0
        """Highest step in the file; 0 for none."""
        self._plan: dict[str, Any] | None = None
        self._cut(lambda line: isinstance(line, StepEnd | PlanStart))

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write the description of the next steps' plan, unless it is the last one in the file."""
        if self._plan != plan:
            self._append([PlanStart(from_step=self.last_step + 1, plan=dict(plan))])
            self._plan = dict(plan)

    def append_step(
        self,
        step: int,
        entries: Sequence[LedgerEntry],
        drawn: Mapping[str, int],
        decision: Decision | None = None,
    ) -> None:
        """Write one step's prompts to the disk.

        Args:
            step: above every step in the file.
            entries: the step's prompts.
            drawn: source -> prompts drawn so far.
            decision: the decision for the window that begins after this step, if one does.

        Raises:
            ValueError: the file has the step already, or an entry has another step.
        """
        if step <= self.last_step:
            raise ValueError(
                f"cannot append step={step} to {self.path}: it has step={self.last_step} already; "
                "call rewind with the step of the checkpoint that training resumes from"
            )
        if strays := {entry.step for entry in entries} - {step}:
            raise ValueError(f"cannot append entries of steps={sorted(strays)} as step={step}")
        decided = [decision] if decision is not None else []
        self._append(
            [*decided, *entries, StepEnd(step=step, prompts=len(entries), drawn=dict(drawn))]
        )
        self.last_step = step

    def rewind(self, step: int) -> int:
        """Drop the lines that a run resumed after `step` writes again; returns the prompts dropped.

        These are all later steps, and the prompts that were not finished when the run ended.
        """
        dropped = self._cut(
            lambda line: (
                (isinstance(line, StepEnd) and line.step <= step)
                or (isinstance(line, PlanStart) and line.from_step <= step + 1)
            )
        )
        return dropped + self._drop_unfinished()

    def _append(self, lines: Sequence[Line]) -> None:
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab") as file:
                file.write(_encode(lines))
                flush(file)
        except OSError:
            if self.path.exists():
                os.truncate(self.path, size_bytes)  # the next append must not follow half a step
            raise
        if size_bytes == 0:
            sync(self.path.parent)

    def _cut(self, is_end: Callable[[Line], bool]) -> int:
        """Drop the lines after the last for which `is_end` is true; returns the prompts dropped."""
        data = self.path.read_bytes() if self.path.exists() else b""
        dropped, end = 0, data.rfind(b"\n") + 1  # text after the last newline was cut short
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            try:
                line = _decode(data[start:end])
            except ValueError as error:
                if end < len(data) or dropped:
                    number = data.count(b"\n", 0, start) + 1
                    raise _not_a_line(self.path, number, error) from error
                line = None  # a crash cut it short
            if line is not None and is_end(line):
                break
            dropped += isinstance(line, LedgerEntry)
            end = start
        if end < len(data):
            os.truncate(self.path, end)
        self._look_back(data[:end])
        return dropped

    def _look_back(self, data: bytes) -> None:
        """Find the last step and the last plan, searching from the end."""
        self.last_step, self._plan = 0, None
        plan = data.rfind(_PLAN_LINE)
        if plan >= 0:
            self._plan = json.loads(data[plan : data.index(b"\n", plan)])["plan"]
        end = data.rfind(_END_OF_STEP)
        if end >= 0:
            start = data.rfind(b"\n", 0, end) + 1
            self.last_step = json.loads(data[start : data.index(b"\n", start)])["step"]

    def _drop_unfinished(self) -> int:
        raw = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        end = _decode(raw[-1]) if raw else None
        if not isinstance(end, StepEnd):
            return 0
        first = len(raw) - 1 - end.prompts
        kept = [line for line in raw[first:-1] if b'"outcome": "unfinished"' not in line]
        dropped = end.prompts - len(kept)
        if dropped:
            end = replace(end, prompts=len(kept))
            write_whole(self.path, [*raw[:first], *kept, _encode([end])])
            sync(self.path.parent)
        return dropped


def read_ledger(path: str | os.PathLike[str]) -> list[Line]:
    """The lines in file order, without a last step that was cut short; none if there is no file.

    Raises:
        ValueError: a line before the last one is not a ledger line.
    """
    if not os.path.exists(path):
        return []
    lines: list[Line] = []
    broken: tuple[int, ValueError] | None = None
    for number, text in enumerate(plain_lines(Path(path)), start=1):
        if broken is not None:  # it was not the last line
            raise _not_a_line(path, *broken) from broken[1]
        if not text.endswith(b"\n"):
            break
        try:
            lines.append(_decode(text))
        except ValueError as error:
            broken = number, error
    while lines and isinstance(lines[-1], LedgerEntry | Decision):
        lines.pop()
    return lines


def last_step_of(lines: Sequence[Line]) -> int:
    """The highest step in the lines of a ledger; 0 for none."""
    return next((line.step for line in reversed(lines) if isinstance(line, StepEnd)), 0)


def _not_a_line(path: str | os.PathLike[str], number: int, error: Exception) -> ValueError:
    return ValueError(
        f"cannot read {path} line {number}: not of a ledger ({error}); "
        "restore the file, or give the run a new folder"
    )


def _encode(lines: Sequence[Line]) -> bytes:
    return b"".join(json.dumps(asdict(line)).encode() + b"\n" for line in lines)


def _decode(text: bytes) -> Line:
    parsed: Any = json.loads(text)
    values = cast(dict[str, Any], parsed if isinstance(parsed, dict) else {})
    kind = _KINDS.get(frozenset(values))
    if kind is None:
        raise ValueError("want the fields of a prompt, of a step's end or of a plan")
    line = msgspec.convert(values, kind)
    if isinstance(line, LedgerEntry | StepEnd) and line.step > MOST_STEPS:
        raise ValueError(f"step={line.step} is above {MOST_STEPS}")
    return line


_PLAN_LINE = b'{"from_step": '
_END_OF_STEP = b'"drawn": {'
"""The start of a plan's line, and a text that only the end line of a step holds."""

_KINDS: dict[frozenset[str], type[Line]] = {
    frozenset(field.name for field in fields(kind)): kind
    for kind in (LedgerEntry, StepEnd, PlanStart, Decision)
}
"""Names of a line's fields -> what the line is."""

_KINDS[frozenset(field.name for field in fields(LedgerEntry) if field.default is MISSING)] = (
    LedgerEntry  # of release 1.0
)
