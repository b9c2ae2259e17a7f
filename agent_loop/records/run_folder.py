"""Reading and writing the JSON-lines files of a run, which a kill may not damage.

`ledger.jsonl` is in `samplers.ledger`.
"""

import fcntl
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from config.disk import open_plain, plain_lines, plain_text, write_whole

STOP_FILE = "stop"
"""If this file is in a run's folder, the trainer saves a checkpoint after the step and ends."""

LAST_MOMENT = 253402300799.0
"""The end of the year 9999, the last that has a date."""

LOCK_FILE = ".lock"
"""The launcher that runs the run holds this file's lock; the kernel frees it when it ends."""

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file beside the checkpoints: the step of the last one, written when it is complete."""


Kind = TypeVar("Kind")


def is_claimed(folder: Path) -> bool:
    """Whether a launcher runs the run in this folder.

    Raises:
        OSError: the lock file cannot be read, or its file system has no locks.
    """
    try:
        with open_plain(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def checkpoint_folders(checkpoints: Path) -> dict[int, Path]:
    """Step -> its checkpoint, whole or not, in order of steps; only names that verl writes."""
    names = (path.name for path in checkpoints.glob("global_step_*") if path.is_dir())
    steps = [int(name[12:]) for name in names if re.fullmatch(r"global_step_(0|[1-9]\d*)", name)]
    return {step: checkpoints / f"global_step_{step}" for step in sorted(steps)}


def whole_checkpoint(checkpoints: Path, last_step: float = math.inf) -> int:
    """Step of the newest whole checkpoint up to `last_step`, 0 without one: verl writes data.pt
    last, before the tracker, which a kill may leave empty."""
    whole = (
        s for s, path in checkpoint_folders(checkpoints).items() if (path / "data.pt").exists()
    )
    return max((step for step in whole if step <= last_step), default=0)


def tracked_step(checkpoints: Path) -> int | None:
    """The step in verl's tracker file; None without the file, or if a kill left it empty."""
    tracker = checkpoints / TRACKER
    text = plain_text(tracker) if tracker.exists() else ""
    return int(text) if text.isdecimal() else None


def checkpoint_to_resume(checkpoints: Path, last_step: Callable[[], int]) -> int:
    """Step of the checkpoint that `trainer.resume_mode=auto` goes on from, as verl looks for it; 0
    if it begins with step 1.

    A start that begins again removes the tracker. Where a kill left it empty, the newest whole
    checkpoint up to the `last_step` of the ledger counts: later ones are of steps that were given
    up.
    """
    if not (checkpoints / TRACKER).exists():
        return 0
    if (step := tracked_step(checkpoints)) is None:
        return whole_checkpoint(checkpoints, last_step())
    return step if (checkpoints / f"global_step_{step}").is_dir() else 0


def trajectory_files(folder: Path) -> list[Path]:
    """The files `<step>.jsonl` of a folder, in order of steps."""
    numbered = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem))


def plain(value: Any) -> Any:
    """A number of numpy or torch, or a value of a subclass of one of Python's, as Python's own."""
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def decoded(line: bytes, kind: type[Kind]) -> Kind:
    """A line as a value of a type; fields that the type does not have are left out.

    Raises:
        ValueError: it is none; the message says why.
    """
    try:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.ValidationError:
            raise
        except ValueError:
            # Python's json writes NaN and lone surrogates, and only Python's json reads them
            return msgspec.convert(json.loads(line), kind)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_typed(path: Path, decode: Callable[[bytes], Kind]) -> tuple[list[Kind], list[str]]:
    """The values of a file's lines; and what is wrong with the lines that are left out, each with
    file and line from 1. A last line without its newline is torn.

    Raises:
        OSError: as `open`.
    """
    found, problems = list[Kind](), list[str]()
    for number, line in enumerate(plain_lines(path), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it is torn: it has no newline")
            if line.strip():
                found.append(decode(line))
        except ValueError as error:
            problems.append(f"{path.name} line {number} is left out: {error}")
    return found, problems


def _finished(path: Path) -> list[bytes]:
    """The lines of a file that end in a newline; none if there is no file."""
    if not path.exists():
        return []
    return [line[:-1] for line in plain_lines(path) if line.endswith(b"\n") and line.strip()]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSON-lines file, as `write_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (_raw(record) + b"\n" for record in records))


def _raw(record: Mapping[str, Any]) -> bytes:
    # a text of others may have half a character, which UTF-8 lacks
    return json.dumps(record, ensure_ascii=False, default=plain).encode(errors="replace")


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, as `write_whole`; characters that UTF-8 lacks become `?`."""
    write_whole(path, [text.encode(errors="replace")])


def metrics_line(raw: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl` with its finite numbers; None if it is not such a line."""
    try:
        line = json.loads(raw)
        step, moment, metrics = line["step"], float(line["time"]), line["metrics"]
        if type(step) is not int or step < 0 or not 0 <= moment <= LAST_MOMENT:
            return None
        numbers = {
            sys.intern(name): value
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return {"step": step, "time": moment, "metrics": numbers}


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a `metrics.jsonl`, and how many finished lines could not be read."""
    all_lines = [metrics_line(raw) for raw in _finished(path)]
    lines = [line for line in all_lines if line is not None]
    return lines, len(all_lines) - len(lines)


class MetricsFile:
    """`metrics.jsonl`: `{"step", "time", "metrics": {name: number}}`, a line a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(_raw(record) + b"\n")

    def rewind(self, step: int, checkpointed: Mapping[str, Any] | None) -> None:
        """Remove the lines after `step`, from which the run is resumed: they are written again.

        Lines that cannot be read stay, because their step is not known. The line of `step` in its
        checkpoint is added if a kill came after the checkpoint and before the line.
        """
        kept, steps = list[bytes](), set[int]()
        for raw in _finished(self.path):
            line = metrics_line(raw)
            if line is None or line["step"] <= step:
                kept.append(raw)
            if line is not None:
                steps.add(line["step"])
        if checkpointed is not None and step not in steps:
            kept.append(_raw(checkpointed))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (raw + b"\n" for raw in kept))


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are one finite number each."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float | np.number) and np.isfinite(value)
    }
