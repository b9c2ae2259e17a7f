"""Where each trajectory of a run lies, what it came to and what it says: a small database.

It follows the files: one that was rewritten or has grown is read again, line by line. A last line
without its end is left out until it is whole. No tokens are kept: a trajectory is read from its
file when it is shown.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.turns.trajectory import StopReason
from verl_mixed.views.viewer.database import has_words, open_database
from verl_mixed.views.viewer.filters import Filter, bare, words_of
from verl_mixed.views.viewer.records import IndexEntry, Record, read_line

_COLUMNS = (
    *("step", "key", "group", "source", "row_id", "reward", "acc", "advantage", "stop_reason"),
    *("length", "model_tokens", "turns", "calls", "errors"),
)
_ROW = ", ".join(f'"{name}"' for name in _COLUMNS)

_GROUP_SIZE = (
    '(SELECT count(*) FROM trajectories AS other WHERE other."group" = trajectories."group")'
)

_LOST = f"stop_reason = '{StopReason.INFRA_ERROR}'"
OUTCOMES = {
    "solved": f"acc >= 1 AND NOT {_LOST}",
    "unsolved": f"NOT ifnull(acc >= 1, 0) AND NOT {_LOST}",
    "lost": _LOST,
    "tool error": "errors > 0",
}
"""Name -> condition. Besides them every stop reason is an outcome."""

_UNREAD = (-1, -1)
"""Time and size of a file that could not be read to its end: no file has them, so it is tried
again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trajectory in the list."""

    id: str
    """File and line, from 1: `7.13`."""

    values: dict[str, Any]
    """Column -> value; `outcomes`: the names of all that it is; `group_size`: members that were
    written."""


class Index:
    """The trajectories of one run. Not thread-safe; several processes may have the same.

    Args:
        run_dir: the run's folder.
        progress: told each file that is read.
    """

    def __init__(
        self, run_dir: Path, progress: Callable[[str], object] = lambda line: None
    ) -> None:
        self.folder = run_dir / "trajectories"
        self._progress = progress
        self.path, self._database = open_database(run_dir)
        self._has_words = has_words(self._database)

    def close(self) -> None:
        self._database.close()

    def refresh(self) -> int:
        """Follow the files.

        Returns:
            files that were read.
        """
        here = {path.name: _time_and_size(path) for path in _files(self.folder)}
        known = {
            name: (mtime_ns, size)
            for name, mtime_ns, size in self._database.execute(
                "SELECT name, mtime_ns, size FROM files"
            )
        }
        changed = [name for name, now in here.items() if now == _UNREAD or known.get(name) != now]
        gone = known.keys() - here.keys()
        for number, name in enumerate(changed, 1):
            self._progress(f"reading {name} ({number} of {len(changed)})")
            with self._database:
                self._forget(name)
                try:
                    self._read(name)
                except OSError as error:
                    self._leave_unread(name, error)
        with self._database:
            for name in gone:
                self._forget(name)
        return len(changed)

    # --- questions --------------------------------------------------------------------------------

    def count(self, chosen: Filter) -> int:
        where, values = self._where(chosen)
        return self._database.execute(
            f"SELECT count(*) FROM trajectories WHERE {where}", values
        ).fetchone()[0]

    def rows(self, chosen: Filter, *, offset: int = 0, limit: int = 100) -> list[Row]:
        """Some of the trajectories that are meant, in order of steps and lines."""
        where, values = self._where(chosen)
        fits = ", ".join(OUTCOMES.values())
        found = self._database.execute(
            f"SELECT file, line, {_GROUP_SIZE}, {fits}, {_ROW} FROM trajectories WHERE {where} "
            "ORDER BY step, file, line LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        rows: list[Row] = []
        for file, line, group_size, *rest in found:
            values = dict(zip(_COLUMNS, rest[len(OUTCOMES) :], strict=True))
            outcomes = [name for name, fit in zip(OUTCOMES, rest, strict=False) if fit]
            values["outcomes"] = [*outcomes, values["stop_reason"]]
            values["group_size"] = group_size
            rows.append(Row(id=f"{Path(file).stem}.{line}", values=values))
        return rows

    def record(self, identity: str) -> Record:
        """A trajectory, read from its file.

        Raises:
            KeyError: there is none of this name.
            OSError: its file cannot be read.
            ValueError: its line cannot be read.
        """
        stem, _, line = identity.rpartition(".")
        found = self._database.execute(
            "SELECT file, start FROM trajectories WHERE file = ? AND line = ?",
            [_storable(f"{stem}.jsonl"), int(line) if re.fullmatch("[0-9]{1,18}", line) else -1],
        ).fetchone()
        if found is None:
            raise KeyError(identity)
        file, start = found
        with (self.folder / file).open("rb") as lines:
            lines.seek(start)
            return read_line(lines.readline(), Record)

    def sources(self) -> dict[str, int]:
        """source -> its trajectories."""
        return self._counts("source")

    def stop_reasons(self) -> dict[str, int]:
        """Stop reason -> trajectories."""
        return self._counts("stop_reason")

    def steps(self) -> tuple[int, int] | None:
        """First and last; None without a trajectory."""
        first, last = self._database.execute(
            "SELECT min(step), max(step) FROM trajectories"
        ).fetchone()
        return None if first is None else (first, last)

    def unreadable(self, limit: int = 20) -> tuple[int, list[str]]:
        """How many files and whole lines cannot be read, and what is wrong with the first."""
        number = self._database.execute("SELECT count(*) FROM unreadable").fetchone()[0]
        shown = self._database.execute(
            "SELECT file, line, why FROM unreadable ORDER BY file, line LIMIT ?", [limit]
        )
        return number, [
            f"{file} line {line}: {why}" if line else f"{file}: {why}" for file, line, why in shown
        ]

    def _counts(self, column: str) -> dict[str, int]:
        return dict(
            self._database.execute(
                f"SELECT {column}, count(*) FROM trajectories GROUP BY {column} ORDER BY {column}"
            ).fetchall()
        )

    def _where(self, chosen: Filter) -> tuple[str, list[Any]]:
        conditions, values = ["1"], list[Any]()

        def add(condition: str, *given: Any) -> None:
            conditions.append(f"({condition})")
            values.extend(given)

        if chosen.source:
            add("source = ?", _storable(chosen.source))
        if chosen.group:
            add('"group" = ?', _storable(chosen.group))
        if chosen.steps:
            add("step BETWEEN ? AND ?", *chosen.steps)
        if chosen.outcome in OUTCOMES:
            add(OUTCOMES[chosen.outcome])
        elif chosen.outcome:
            add("stop_reason = ?", _storable(chosen.outcome))
        if chosen.reward_min is not None:
            add("reward >= ?", chosen.reward_min)
        if chosen.reward_max is not None:
            add("reward <= ?", chosen.reward_max)
        words, others = words_of(_storable(chosen.text))
        if words and self._has_words:
            add("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", _match(words))
        for part in others if self._has_words else [*words, *others]:
            pattern = "%" + part.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
            add("id IN (SELECT rowid FROM texts WHERE text LIKE ? ESCAPE '!')", pattern)
        return " AND ".join(conditions), values

    # --- files ------------------------------------------------------------------------------------

    def _forget(self, name: str) -> None:
        run = self._database.execute
        run("DELETE FROM texts WHERE rowid IN (SELECT id FROM trajectories WHERE file = ?)", [name])
        for table, column in (("trajectories", "file"), ("unreadable", "file"), ("files", "name")):
            run(f"DELETE FROM {table} WHERE {column} = ?", [name])

    def _read(self, name: str) -> None:
        with (self.folder / name).open("rb") as lines:
            stat = os.fstat(lines.fileno())  # of what is read, not of what has replaced it since
            self._database.execute(
                "INSERT INTO files VALUES (?, ?, ?)", [name, stat.st_mtime_ns, stat.st_size]
            )
            for number, start, line in _whole_lines(lines, stat.st_size):
                try:
                    entry = read_line(line, IndexEntry)
                except ValueError as error:
                    self._complain(name, number, str(error))
                else:
                    self._add(name, number, start, entry)

    def _leave_unread(self, name: str, error: OSError) -> None:
        """Say what is wrong with a file, and keep what was read of it; the next time it is tried
        again. One that is gone meanwhile is none."""
        if os.path.lexists(self.folder / name):
            self._database.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?)", [name, *_UNREAD]
            )
            self._complain(name, 0, error.strerror or str(error))

    def _complain(self, name: str, number: int, why: str) -> None:
        """Of a line, from 1, or of the whole file: 0."""
        self._database.execute(
            "INSERT INTO unreadable VALUES (?, ?, ?)", [name, number, _storable(why)]
        )

    def _add(self, name: str, number: int, start: int, entry: IndexEntry) -> None:
        lengths = [(author, length) for author, _, length, _ in entry.segments]
        values = {
            "step": entry.step,
            "key": entry.key,
            "group": entry.group,
            "source": entry.source,
            "row_id": entry.row_id,
            "reward": entry.reward,
            "acc": entry.acc,
            "advantage": entry.advantage,
            "stop_reason": entry.stop_reason,
            "length": sum(length for _, length in lengths),
            "model_tokens": sum(length for author, length in lengths if author == "model"),
            "turns": len(entry.turns),
            "calls": len(entry.calls),
            "errors": sum(call.status != "ok" for call in entry.calls),
        }
        marks = ", ".join("?" * (3 + len(_COLUMNS)))
        cursor = self._database.execute(
            f"INSERT INTO trajectories (file, line, start, {_ROW}) VALUES ({marks})",
            [name, number, start, *(_storable(values[column]) for column in _COLUMNS)],
        )
        text = "\n".join(text for _, _, _, text in entry.segments)
        self._database.execute(
            "INSERT INTO texts (rowid, text) VALUES (?, ?)",
            [cursor.lastrowid, _storable(bare(text))],
        )


def _files(folder: Path) -> list[Path]:
    numbered = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem))


def _time_and_size(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return _UNREAD
    return stat.st_mtime_ns, stat.st_size


def _whole_lines(lines: Any, size: int) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, where it starts, bytes) of each line that has its end."""
    start = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") or start + len(line) > size:
            return
        if line.strip():
            yield number, start, line
        start += len(line)


def _match(words: Sequence[str]) -> str:
    """Each as a phrase, so that nothing of it is read as an operator; the last may go on."""
    quoted = ['"' + word.replace('"', '""').replace("\0", "") + '"' for word in words]
    return " ".join(quoted) + "*"


def _storable(value: Any) -> Any:
    """What the database takes: text without half characters, and nothing in place of NaN and
    infinities, which are no number to compare with."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
