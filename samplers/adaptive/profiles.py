"""Pass rates of training rows, in a file beside the rows: `train.parquet` has
`train.profile.jsonl`.

A line has a row's `row_id`, its `trials` (trajectories that were judged), how many of them
`passed`, the 95 % interval of the rate, and `by`: the run or model that tried. The newest line of a
row counts.

A run that draws rows by their profiles keeps a copy, `profile.jsonl` in its folder. Its later
starts and its audit read the copy, so a newer profile beside the rows does not change it.
"""

# pyarrow comes with partial types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import fcntl
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq

from config.disk import plain_lines, write_whole
from config.schema import SourceConfig
from samplers.adaptive.curriculum import ChosenRows, Curriculum
from samplers.ledger import has_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProfile:
    """How often a row was solved."""

    row_id: str
    trials: int
    passed: int
    """Trajectories that solved the row (`acc` is 1)."""

    low: float
    high: float
    """95 % interval of the pass rate (Wilson 1927)."""

    by: str
    """The run and step, or the model, that tried."""

    @property
    def rate(self) -> float:
        return self.passed / self.trials


COPY = "profile.jsonl"
"""File in a run's folder with the profiles by which it draws rows."""


def profile_path(rows: str | Path) -> Path:
    """The profile of a file of rows."""
    return Path(rows).with_suffix(".profile.jsonl")


def read_profile(rows: str | Path) -> dict[str, RowProfile]:
    """row_id -> profile, of one file of rows; empty if it has none.

    Raises:
        ValueError: a line is not a row's profile; it names file and line.
    """
    return _read(profile_path(rows))


def _read(path: Path) -> dict[str, RowProfile]:
    found: dict[str, RowProfile] = {}
    if not path.exists():
        return found
    for number, line in enumerate(plain_lines(path), start=1):
        if not line.endswith(b"\n"):  # cut short
            break
        try:
            own = msgspec.json.decode(line, type=RowProfile)
            if own.trials < 1 or not 0 <= own.passed <= own.trials:
                raise ValueError(f"trials={own.trials} passed={own.passed}")
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(
                f"{path} line {number}: not the profile of a row ({error}); delete the file, and "
                "run `verl-mixed profile` again"
            ) from error
        found[own.row_id] = own
    return found


def write_profile(rows: str | Path, profiles: Iterable[RowProfile]) -> None:
    """Write the profile of a file of rows; rows that it had and that are not given stay."""
    folder = os.open(profile_path(rows).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # else another profile's rows would be lost
        known = read_profile(rows) | {own.row_id: own for own in profiles}
        _write(profile_path(rows), known.values())
    finally:
        os.close(folder)


def _write(path: Path, profiles: Iterable[RowProfile]) -> None:
    write_whole(path, (json.dumps(asdict(own)).encode() + b"\n" for own in profiles))


def choose_rows(
    name: str, source: SourceConfig, row_ids: Sequence[str], profiles: Mapping[str, RowProfile]
) -> ChosenRows:
    """The rows of a source that are drawn.

    Args:
        row_ids: of its rows, in the order of the files.

    Raises:
        ValueError: no row is left.
    """
    difficulty, curriculum = source.difficulty, source.curriculum
    low, high = (0.0, 1.0) if difficulty is None else (difficulty.min, difficulty.max)
    rated = [
        (row, own.rate)
        for row, row_id in enumerate(row_ids)
        if (own := profiles.get(row_id)) is not None and low <= own.rate <= high
    ]
    if not rated:
        known = sum(row_id in profiles for row_id in row_ids)
        raise ValueError(
            f"source={name!r} has no row to draw: {known} of its {len(row_ids)} rows have a "
            f"profile, none with a pass rate from {low:g} to {high:g}; run `verl-mixed profile`, "
            f"or change mixed.sources.{name}.difficulty"
        )
    settings = None if curriculum is None else Curriculum(**curriculum.model_dump())
    text = json.dumps([rated, settings and asdict(settings)])
    return ChosenRows(
        rows=np.array([row for row, _ in rated], dtype=np.int64),
        rates=np.array([rate for _, rate in rated], dtype=np.float64),
        curriculum=settings,
        digest=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    )


def draws_by_profile(source: SourceConfig) -> bool:
    """Whether a source draws its rows by their pass rates."""
    return source.difficulty is not None or source.curriculum is not None


def drawn_by_profile(sources: Mapping[str, SourceConfig]) -> dict[str, SourceConfig]:
    """The sources of a run that draw their rows by their pass rates."""
    return {
        name: source
        for name, source in sources.items()
        if source.takes_part and draws_by_profile(source)
    }


def profiles_for(
    files: Sequence[str], run_dir: str | Path, *, afresh: bool = False
) -> dict[str, RowProfile]:
    """row_id -> profile, by which a run draws rows: those beside its files, or, once the run has
    trained a step, its own copy.

    Args:
        afresh: the run begins again, whatever it trained before (`trainer.resume_mode=disable`).

    Raises:
        ValueError: a profile cannot be read.
    """
    if _has_copy(run_dir, afresh=afresh):
        return _read(Path(run_dir) / COPY)
    return {row_id: own for path in files for row_id, own in read_profile(path).items()}


def _has_copy(run_dir: str | Path, *, afresh: bool) -> bool:
    folder = Path(run_dir)
    return not afresh and (folder / COPY).exists() and has_steps(folder / "ledger.jsonl")


def choices_for(
    sources: Mapping[str, SourceConfig],
    files: Sequence[str],
    run_dir: str | Path,
    *,
    afresh: bool = False,
    keeps: bool = False,
) -> dict[str, ChosenRows]:
    """Source -> the rows that it draws, for sources with a difficulty or a curriculum.

    Args:
        files: the training files.
        afresh: see `profiles_for`.
        keeps: the run starts now, and gets its copy of the profiles.

    Raises:
        ValueError: a source has no row to draw, or a profile cannot be read.
    """
    wanted = drawn_by_profile(sources)
    if not wanted:
        return {}
    profiles, ids = profiles_for(files, run_dir, afresh=afresh), row_ids_of(files)
    if keeps and not _has_copy(run_dir, afresh=afresh):
        used = [row_id for name in wanted for row_id in ids.get(name, ()) if row_id in profiles]
        _write(Path(run_dir) / COPY, [profiles[row_id] for row_id in used])
    return {
        name: choose_rows(name, source, ids.get(name, []), profiles)
        for name, source in wanted.items()
    }


def row_ids_of(files: Sequence[str]) -> dict[str, list[str]]:
    """source -> row ids of its rows, in the order of the files."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        table = pq.read_table(path, columns=["data_source", "extra_info"])
        names = table["extra_info"].combine_chunks().field("row_id").to_pylist()
        for source, name in zip(table["data_source"].to_pylist(), names, strict=True):
            ids[source].append(name)
    return dict(ids)
