"""The files of a run that the trainer writes, one line a step, kept over a kill.

`ledger.jsonl` is `samplers.ledger`'s. Everything here is plain JSON lines, flushed as written.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samplers.disk import flush

STOP_FILE = "stop"
"""In a run's folder: the trainer saves a checkpoint after the step under way, and ends."""


def whole_checkpoint(checkpoints: Path) -> int:
    """Step of the newest whole checkpoint where verl's tracker does not say; 0 without one.

    verl opens the tracker only after a checkpoint's data.pt is written, so a folder with one is
    whole.
    """
    steps = (int(path.parent.name.split("_")[-1]) for path in checkpoints.glob("*/data.pt"))
    return max(steps, default=0)


def plain(value: Any) -> Any:
    """The JSON form of a numpy or torch value; for `json.dumps(default=...)`.

    Raises:
        TypeError: it has none.
    """
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a last line that was torn by a kill."""
    return [json.loads(raw) for raw in _finished(path)]


def _finished(path: Path) -> list[bytes]:
    """The lines of a file that end in a newline; none where there is no file."""
    if not path.exists():
        return []
    return [raw for raw in path.read_bytes().split(b"\n")[:-1] if raw.strip()]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSON-lines file at once: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (_raw(record) + b"\n" for record in records))


def _raw(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, default=plain).encode()


def write_text(path: Path, text: str) -> None:
    """Write a whole file of text, as `write_whole`; what UTF-8 does not have becomes `?`."""
    write_whole(path, [text.encode(errors="replace")])


def write_whole(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a whole file at once: readers see the old file or the new one.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.writelines(blocks)
            flush(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def metrics_line(raw: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl` with its finite numbers; None where it is none."""
    try:
        line = json.loads(raw)
        step, moment, metrics = line["step"], float(line["time"]), line["metrics"]
        if type(step) is not int or step < 0 or not math.isfinite(moment):
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
    """The lines of a `metrics.jsonl`, and how many finished lines are none and were passed over."""
    found = [metrics_line(raw) for raw in _finished(path)]
    lines = [line for line in found if line is not None]
    return lines, len(found) - len(lines)


class MetricsFile:
    """`metrics.jsonl`: `{"step", "time", "metrics": {name: number}}`, a line a step.

    Args:
        path: the file; made on first use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one step's line and flush it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(_raw(record) + b"\n")

    def rewind(self, step: int, checkpointed: Mapping[str, Any] | None) -> None:
        """Make the file end with `step`, the step that a resumed run goes on from.

        Finished lines that are none stay where they are: of which step they were is not known.

        Args:
            step: later lines are dropped: those steps are trained again.
            checkpointed: the step's line as its checkpoint holds it, added when a kill came between
                the checkpoint and the line.
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
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, bool | int | float | np.number) and np.isfinite(value):
            numbers[name] = float(value)
    return numbers
