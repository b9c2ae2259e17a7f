"""The index of a run's trajectories: their places in files, outcomes and texts, in SQLite.

The index follows the files: a file that was rewritten or has grown is read again. A last line
without its newline is left out until it is complete. The index holds no tokens: a trajectory is
read from its file when it is shown.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from agent_loop.training.run_folder import trajectory_files
from verl_mixed.views.viewer.database import has_words, open_database
from verl_mixed.views.viewer.filters import Filter, bare, words_of
from verl_mixed.views.viewer.records import IndexEntry, Record, read_line

_COLUMNS = (
    *("step", "key", "group", "source", "row_id", "reward", "acc", "advantage", "stop_reason"),
    *("masked", "length", "model_tokens", "turns", "calls", "errors"),
)
_ROW = ", ".join(f'"{name}"' for name in _COLUMNS)

_GROUP_SIZE = (
    '(SELECT count(*) FROM trajectories AS other WHERE other."group" = trajectories."group")'
)

_LOST = "ifnull(masked, '') = 'lost'"
OUTCOMES = {
    "solved": f"acc >= 1 AND NOT {_LOST}",
    "unsolved": f"NOT ifnull(acc >= 1, 0) AND NOT {_LOST}",
    "lost": _LOST,
    "tool error": "errors > 0",
}
"""Name -> SQL condition. Every stop reason is an outcome too."""

_UNREAD = (-1, -1)
"""Time and size noted for a file that could not be read. No file has these, so the next refresh
tries the file again."""


class Index:
    """The trajectories of one run. Not thread-safe; several processes may use one index file.

    `progress` is called with a text for each file that is read.
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
        """Read files that changed, forget files that are gone; returns how many were read."""
        now = {path.name: _time_and_size(path) for path in trajectory_files(self.folder)}
        noted = self._database.execute("SELECT name, mtime_ns, size FROM files")
        known = {name: (mtime_ns, size) for name, mtime_ns, size in noted}
        changed = [name for name, at in now.items() if at == _UNREAD or known.get(name) != at]
        gone = known.keys() - now.keys()
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

    def count(self, chosen: Filter) -> int:
        where, values = self._where(chosen)
        return self._database.execute(
            f"SELECT count(*) FROM trajectories WHERE {where}", values
        ).fetchone()[0]

    def rows(self, chosen: Filter, *, offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Some of the chosen trajectories, in order of steps and lines.

        Returns:
            A dictionary for each: `id` (file and line from 1, as `7.13`), its columns, `outcomes`
            (names of all that apply), `group_size` (members of its group in the files).
        """
        where, values = self._where(chosen)
        fits = ", ".join(OUTCOMES.values())
        cursor = self._database.execute(
            f"SELECT file, line, {_GROUP_SIZE}, {fits}, {_ROW} FROM trajectories WHERE {where} "
            "ORDER BY step, file, line LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        rows: list[dict[str, Any]] = []
        for file, line, group_size, *rest in cursor:
            row = dict(zip(_COLUMNS, rest[len(OUTCOMES) :], strict=True))
            outcomes = [name for name, fit in zip(OUTCOMES, rest, strict=False) if fit]
            row |= {"id": f"{Path(file).stem}.{line}", "group_size": group_size}
            rows.append(row | {"outcomes": [*outcomes, row["stop_reason"]]})
        return rows

    def record(self, identity: str) -> Record:
        """A trajectory, read from its file.

        Raises:
            KeyError: no trajectory has this id.
            OSError, ValueError: the file or the line cannot be read.
        """
        stem, _, line = identity.rpartition(".")
        place = self._database.execute(
            "SELECT file, start FROM trajectories WHERE file = ? AND line = ?",
            [_storable(f"{stem}.jsonl"), int(line) if re.fullmatch("[0-9]{1,18}", line) else -1],
        ).fetchone()
        if place is None:
            raise KeyError(identity)
        file, start = place
        with (self.folder / file).open("rb") as lines:
            lines.seek(start)
            return read_line(lines.readline(), Record)

    def counts(self, column: Literal["source", "stop_reason"]) -> dict[str, int]:
        """Source or stop reason -> number of trajectories."""
        return dict(
            self._database.execute(
                f"SELECT {column}, count(*) FROM trajectories GROUP BY {column} ORDER BY {column}"
            ).fetchall()
        )

    def steps(self) -> tuple[int, int] | None:
        """First and last step; None without a trajectory."""
        ends = self._database.execute("SELECT min(step), max(step) FROM trajectories").fetchone()
        return None if ends[0] is None else ends

    def unreadable(self, limit: int = 20) -> tuple[int, list[str]]:
        """(number of files and lines that cannot be read, messages for the first of them)."""
        number = self._database.execute("SELECT count(*) FROM unreadable").fetchone()[0]
        shown = self._database.execute(
            "SELECT file, line, why FROM unreadable ORDER BY file, line LIMIT ?", [limit]
        )
        return number, [
            f"{file} line {line}: {why}" if line else f"{file}: {why}" for file, line, why in shown
        ]

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

    def _forget(self, name: str) -> None:
        run = self._database.execute
        run("DELETE FROM texts WHERE rowid IN (SELECT id FROM trajectories WHERE file = ?)", [name])
        for table, column in (("trajectories", "file"), ("unreadable", "file"), ("files", "name")):
            run(f"DELETE FROM {table} WHERE {column} = ?", [name])

    def _read(self, name: str) -> None:
        with (self.folder / name).open("rb") as lines:
            stat = os.fstat(lines.fileno())  # not of a file that replaced it
            read = [name, stat.st_mtime_ns, stat.st_size]
            self._database.execute("INSERT INTO files VALUES (?, ?, ?)", read)
            for number, start, line in _whole_lines(lines, stat.st_size):
                try:
                    entry = read_line(line, IndexEntry)
                except ValueError as error:
                    self._complain(name, number, str(error))
                else:
                    self._add(name, number, start, entry)

    def _leave_unread(self, name: str, error: OSError) -> None:
        """Note that a file cannot be read, unless it was removed; lines read so far are kept."""
        if os.path.lexists(self.folder / name):
            unread = [name, *_UNREAD]
            self._database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", unread)
            self._complain(name, 0, error.strerror or str(error))

    def _complain(self, name: str, number: int, why: str) -> None:
        """Note a line that cannot be read, by its number from 1; 0: the whole file."""
        problem = [name, number, _storable(why)]
        self._database.execute("INSERT INTO unreadable VALUES (?, ?, ?)", problem)

    def _add(self, name: str, number: int, start: int, entry: IndexEntry) -> None:
        lengths = [(author, length) for author, _, length, _ in entry.segments]
        values = msgspec.structs.asdict(entry) | {
            "group": entry.group,
            "masked": entry.why_masked,
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
        text = _storable(bare("\n".join(text for _, _, _, text in entry.segments)))
        self._database.execute(
            "INSERT INTO texts (rowid, text) VALUES (?, ?)", [cursor.lastrowid, text]
        )


def _time_and_size(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return _UNREAD
    return stat.st_mtime_ns, stat.st_size


def _whole_lines(lines: Any, size: int) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes) of each line that ends with a newline."""
    start = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") or start + len(line) > size:
            return
        if line.strip():
            yield number, start, line
        start += len(line)


def _match(words: Sequence[str]) -> str:
    """An FTS5 query for all words; quotes keep operators inert, `*` lets the last word go on."""
    quoted = ['"' + word.replace('"', '""').replace("\0", "") + '"' for word in words]
    return " ".join(quoted) + "*"


def _storable(value: Any) -> Any:
    """A value that SQLite stores: text without lone surrogates, NULL for NaN and infinities."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
