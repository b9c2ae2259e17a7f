"""Pass rates of training rows: from a run's ledger, or from the records of an evaluation."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.records.evaluation_records import Record
from agent_loop.records.statistics import wilson
from config.lookup import files_at
from samplers.adaptive.profiles import RowProfile, profile_path, row_ids_of, write_profile
from samplers.ledger import LedgerEntry, read_ledger
from verl_mixed.run.state import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSource:
    """What the profiles of a source's rows say."""

    rows: int
    profiled: int
    never: int
    """Profiled rows that were never solved."""

    always: int
    """Profiled rows that were solved each time."""

    mean: float | None
    """Mean pass rate of the profiled rows."""


def of_ledger(folder: RunFolder) -> dict[str, RowProfile]:
    """row_id -> profile, from all groups that a run has trained.

    Raises:
        ValueError: the ledger has no trained prompt whose solved trajectories are counted.
    """
    trials, passed, last = Counter[str](), Counter[str](), 0
    for entry in read_ledger(folder.ledger):
        if isinstance(entry, LedgerEntry) and entry.judged and entry.solved is not None:
            trials[entry.row_id] += entry.judged
            passed[entry.row_id] += entry.solved
            last = max(last, entry.step)
    if not trials:
        raise ValueError(
            f"{folder.ledger} does not count solved trajectories: nothing was trained, or release "
            "1.0 wrote it; name a --step, and its checkpoint tries the rows"
        )
    by = f"{folder.path.name}, steps 1 to {last}"
    return _profiles(trials, passed, by)


def of_records(records: Iterable[Record], by: str) -> dict[str, RowProfile]:
    """row_id -> profile, from the judged trajectories of an evaluation."""
    trials, passed = Counter[str](), Counter[str]()
    for record in records:
        if not record.lost:
            trials[record.row_id] += 1
            passed[record.row_id] += record.is_solved
    return _profiles(trials, passed, by)


def _profiles(
    trials: Mapping[str, int], passed: Mapping[str, int], by: str
) -> dict[str, RowProfile]:
    found: dict[str, RowProfile] = {}
    for row_id, count in trials.items():
        low, high = wilson(passed[row_id] / count, count)
        found[row_id] = RowProfile(
            row_id=row_id, trials=count, passed=passed[row_id], low=low, high=high, by=by
        )
    return found


def write(config: Mapping[str, Any], profiles: Mapping[str, RowProfile]) -> list[str]:
    """Write profiles beside the training files of a config; returns the files written.

    Raises:
        ValueError: a training file is not there.
    """
    written: list[str] = []
    files = files_at(config, "data.train_files")
    for path in files:
        if not Path(path).exists():
            raise ValueError(
                f"{path}: this training file (data.train_files) is not there, and its profile "
                "belongs beside it; put it back"
            )
    for path in files:
        ids = {row_id for own in row_ids_of([path]).values() for row_id in own}
        if own := [profile for row_id, profile in profiles.items() if row_id in ids]:
            write_profile(path, own)
            written.append(str(profile_path(path)))
    return written


def described(
    files: Sequence[str], profiles: Mapping[str, RowProfile]
) -> dict[str, ProfiledSource]:
    """Source -> its rows and what their profiles say."""
    rates: defaultdict[str, list[float]] = defaultdict(list)
    rows = row_ids_of(files)
    for source, ids in rows.items():
        rates[source] = [profiles[row_id].rate for row_id in ids if row_id in profiles]
    return {
        source: ProfiledSource(
            rows=len(ids),
            profiled=len(rates[source]),
            never=sum(rate == 0 for rate in rates[source]),
            always=sum(rate == 1 for rate in rates[source]),
            mean=sum(rates[source]) / len(rates[source]) if rates[source] else None,
        )
        for source, ids in sorted(rows.items())
    }
