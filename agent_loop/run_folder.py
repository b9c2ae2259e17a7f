"""The files of a run that the trainer writes, one line a step, kept over a kill.

`ledger.jsonl` is `samplers.ledger`'s. Everything here is plain JSON lines, flushed as written.
"""

import json
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
    if not path.exists():
        return []
    raw = path.read_text(encoding="utf-8").split("\n")
    complete = raw[:-1]  # what stands after the last newline was not finished
    return [json.loads(line) for line in complete if line]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSON-lines file at once: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, default=plain) + "\n")
        flush(file)
    temporary.replace(path)


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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False, default=plain) + "\n")

    def rewind(self, step: int, checkpointed: Mapping[str, Any] | None) -> None:
        """Make the file end with `step`, the step that a resumed run goes on from.

        Args:
            step: later lines are dropped: those steps are trained again.
            checkpointed: the step's line as its checkpoint holds it, added when a kill came between
                the checkpoint and the line.
        """
        kept = [record for record in read_lines(self.path) if record["step"] <= step]
        if checkpointed is not None and not any(record["step"] == step for record in kept):
            kept.append(dict(checkpointed))
        write_lines(self.path, kept)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are one finite number each."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, bool | int | float | np.number) and np.isfinite(value):
            numbers[name] = float(value)
    return numbers
