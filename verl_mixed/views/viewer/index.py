"""The index of a run's trajectories: their places in files, outcomes and texts, in SQLite.

The index follows the files: a file that was rewritten or has grown is read again. A last line
without its newline is left out until it is complete. The index holds no tokens: a trajectory is
read from its file when it is shown.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from agent_loop.records.mask_audit import session_problems
from agent_loop.records.run_folder import trajectory_files
from agent_loop.records.trajectory_record import TrajectoryRecord, read_line
from config.disk import MOST_LINE, open_plain
from verl_mixed.views.viewer.database import has_words, open_database
from verl_mixed.views.viewer.filters import Filter, bare, words_of
from verl_mixed.views.viewer.tree import as_tree

_COLUMNS = (
    *("step", "key", "group", "session", "source", "row_id", "reward", "acc", "advantage"),
    *("stop_reason", "masked", "length", "trained", "turns", "calls", "errors"),
    *("cause", "parent", "request"),
)
_ROW = ", ".join(f'"{name}"' for name in _COLUMNS)

_GROUP_SIZE = (
    "(SELECT count(DISTINCT session) FROM trajectories AS other "
    'WHERE other."group" = trajectories."group")'
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
            f"SELECT count(DISTINCT session) FROM trajectories WHERE {where}", values
        ).fetchone()[0]

    def rows(self, chosen: Filter, *, offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """All rows of some of the chosen trajectories, in order of steps and lines; those of one
        session in the order of their tree. `offset` and `limit` count trajectories.

        Returns:
            A dictionary for each row: `id` (file and line from 1, as `7.13`), its columns,
            `outcomes` (names of all that apply), `group_size` (members of its group in the files),
            `fits` (whether the row itself is chosen), `depth` in the tree.
        """
        where, values = self._where(chosen)
        fits = ", ".join(OUTCOMES.values())
        cursor = self._database.execute(
            f"SELECT file, line, {_GROUP_SIZE}, {where}, {fits}, {_ROW} FROM trajectories "
            f"WHERE session IN (SELECT session FROM trajectories WHERE {where} GROUP BY session "
            "ORDER BY min(step), min(file), min(line) LIMIT ? OFFSET ?) ORDER BY step, file, line",
            [*values, *values, limit, offset],
        )
        sessions = defaultdict[str, list[dict[str, Any]]](list)
        for file, line, group_size, is_chosen, *rest in cursor:
            row = dict(zip(_COLUMNS, rest[len(OUTCOMES) :], strict=True))
            outcomes = [name for name, fit in zip(OUTCOMES, rest, strict=False) if fit]
            row |= {"id": f"{Path(file).stem}.{line}", "group_size": group_size}
            row |= {"outcomes": [*outcomes, row["stop_reason"]], "fits": bool(is_chosen)}
            sessions[row["session"]].append(row)
        return [row for rows in sessions.values() for row in as_tree(rows)]

    def session(self, name: str) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows of a session, as in `rows`, and what the audit of masks says about them.

        Raises:
            OSError, ValueError: the file or a line cannot be read.
        """
        rows = self.rows(Filter(session=name), limit=1)
        return rows, session_problems([self.record(row["id"]) for row in rows])

    def record(self, identity: str) -> TrajectoryRecord:
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
        with open_plain(self.folder / file) as lines:
            lines.seek(start)
            return read_line(lines.readline())

    def counts(self, column: Literal["source", "stop_reason"]) -> dict[str, int]:
        """Source or stop reason -> number of trajectories."""
        return dict(
            self._database.execute(
                f"SELECT {column}, count(DISTINCT session) FROM trajectories "
                f"GROUP BY {column} ORDER BY {column}"
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
        if chosen.session is not None:
            add("session = ?", _storable(chosen.session))
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
        with open_plain(self.folder / name) as lines:
            stat = os.fstat(lines.fileno())  # not of a file that replaced it
            read = [name, stat.st_mtime_ns, stat.st_size]
            self._database.execute("INSERT INTO files VALUES (?, ?, ?)", read)
            for number, start, line in _whole_lines(lines, stat.st_size):
                try:
                    entry = read_line(line)
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

    def _add(self, name: str, number: int, start: int, entry: TrajectoryRecord) -> None:
        whole = sum(s.length for s in entry.segments)
        model = sum(s.length for s in entry.segments if s.author == "model")
        values = msgspec.structs.asdict(entry) | {
            "group": entry.uid,
            "session": entry.session,
            "request": entry.request,
            "masked": entry.why_masked,
            "length": whole,
            "trained": 0 if entry.why_masked else model if entry.state_masking else whole,
            "turns": len(entry.turns),
            "calls": len(entry.calls),
            "errors": sum(call.status != "ok" for call in entry.calls),
        }
        marks = ", ".join("?" * (3 + len(_COLUMNS)))
        cursor = self._database.execute(
            f"INSERT INTO trajectories (file, line, start, {_ROW}) VALUES ({marks})",
            [name, number, start, *(_storable(values[column]) for column in _COLUMNS)],
        )
        text = _storable(bare("\n".join(s.text for s in entry.segments)))
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
    for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
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
    """A value that SQLite stores: text without lone surrogates, NULL for NaN, infinities and whole
    numbers that do not fit in its 64 bits."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and abs(value) >= 2**63:
        return None
    return value
