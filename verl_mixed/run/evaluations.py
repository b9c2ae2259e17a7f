"""The evaluations of a run: their folders, records and results, and the validations of a run.

`runs/<experiment>/evaluations/<label>/` has `config.yaml`, `job.json`, `records.jsonl`,
`selected.json`, `summary.json`, `summary.csv` and logs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_loop.records.evaluation_records import JOB, RECORDS, SELECTED, Record, read_records
from agent_loop.records.run_folder import trajectory_files
from config.disk import BrokenFile, plain_text

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The records of one evaluation or validation."""

    label: str
    step: int
    records: Sequence[Record]
    is_finished: bool = True
    """Whether its last call made all records that it chose, and all can be read."""


def evaluations_of(run: Path) -> Path:
    """The folder of a run's evaluations."""
    return run / "evaluations"


PROFILE = "profile_"
"""How the names of evaluations of training rows begin."""


def summaries_of(run: Path) -> list[dict[str, Any]]:
    """The `summary.json` of each complete evaluation, in order of step and label; without those of
    training rows, which `verl-mixed profile` tried.

    Raises:
        BrokenFile: one cannot be read.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(evaluations_of(run).glob(f"*/{SUMMARY}")):
        if path.parent.name.startswith(PROFILE):
            continue
        try:
            found.append(dict(json.loads(plain_text(path))))
        except (ValueError, TypeError) as error:
            raise BrokenFile(
                f"cannot read {path}: no summary of an evaluation ({error}); remove it, and "
                "`verl-mixed evaluate` writes it again"
            ) from error
    return sorted(found, key=lambda one: (one.get("step", 0), str(one.get("label"))))


def validation_file(run: Path, step: int) -> Path:
    """The records of the validation at a step."""
    return run / "validation" / f"{step}.jsonl"


def validated_steps(run: Path) -> list[int]:
    """The steps whose validation has records, in order."""
    return [int(path.stem) for path in trajectory_files(run / "validation")]


def validations_of(run: Path, lines: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[Record]]:
    """Step -> records, of the first and the last validation in the lines of `metrics.jsonl`.

    A step whose file is absent has none; a change is then computed without pairs. A damaged line is
    left out.
    """
    steps = [
        line["step"]
        for line in lines
        if any("/val/" in name and name.startswith("mixed/") for name in line["metrics"])
    ]
    found: dict[int, Sequence[Record]] = {}
    for step in {*steps[:1], *steps[-1:]}:
        path = validation_file(run, step)
        with suppress(OSError):
            written = path.stat()
            if records := _cached(path, written.st_mtime_ns, written.st_size):
                found[step] = records
    return found


@lru_cache(maxsize=8)
def _cached(path: Path, written_ns: int, size: int) -> tuple[Record, ...]:
    return tuple(read_records(path)[0])


def selected_records(folder: Path, records: Sequence[Record], samples: int) -> list[Record]:
    """Those of an evaluation's records that its last call chose."""
    chosen = {tuple(row) for row in json.loads(plain_text(folder / SELECTED))}
    return [
        record
        for record in records
        if (record.source, record.row_id) in chosen and record.sample < samples
    ]


def named_evaluation(name: str) -> Evaluation:
    """The records that a word names: the folder of an evaluation, a file, or RUN@STEP.

    RUN@STEP is the validation of that step inside the run, or else `evaluations/step_<STEP>`. Of an
    evaluation's folder, the rows and samples that its last call chose are taken.

    Raises:
        ValueError: there are none.
    """
    path = Path(name)
    if path.is_dir() and (path / RECORDS).is_file():
        return _read(path / RECORDS, path.name)
    if path.is_file():
        return _read(path, path.stem)
    if match := re.fullmatch(r"(?P<run>.+)@(?P<step>\d+)", name):
        run, step = Path(match["run"]), int(match["step"])
        label = f"{run.name}@{step}"
        evaluated = evaluations_of(run) / f"step_{step}" / RECORDS
        for file in (validation_file(run, step), evaluated):
            if file.is_file():
                return _read(file, label)
        known = ", ".join(map(str, validated_steps(run))) or "none"
        raise ValueError(
            f"no records of {name}: validations of {run} with records are {known}; run "
            f"`verl-mixed evaluate {run} --step {step}`"
        )
    raise ValueError(
        f"no records at {name}: name runs/<experiment>@<step>, a folder in "
        "runs/<experiment>/evaluations, or a file validation/<step>.jsonl"
    )


def _read(file: Path, label: str) -> Evaluation:
    folder = file.parent
    records, problems = read_records(file)
    is_finished = not problems
    if file.name == RECORDS:
        is_finished &= (folder / SUMMARY).is_file()
        try:
            samples = int(json.loads(plain_text(folder / JOB))["selection"]["samples"])
            records = selected_records(folder, records, samples)
        except FileNotFoundError:  # it was ended before it chose its rows
            is_finished = False
    if not records:
        raise ValueError(f"{file} has no records: the evaluation was ended before its first")
    return Evaluation(label=label, step=records[0].step, records=records, is_finished=is_finished)
