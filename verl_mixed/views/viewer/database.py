"""The SQLite file of the viewer's index: in the run's folder, or in the user's cache.

The cache is used if the run's folder is not writable. A damaged file, and a file of another version
of the tables, is created again, because it holds nothing but an index.
"""

import hashlib
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from verl_mixed.run.user_cache import user_cache

FILE_NAME = "viewer.sqlite"

_VERSION = 4
"""Version of the tables."""

_TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, mtime_ns INTEGER, size INTEGER);
CREATE TABLE trajectories (
  id INTEGER PRIMARY KEY, file TEXT NOT NULL, line INTEGER NOT NULL, start INTEGER NOT NULL,
  step INTEGER, key TEXT, "group" TEXT, session TEXT, source TEXT, row_id TEXT, reward REAL,
  acc REAL, advantage REAL, stop_reason TEXT, masked TEXT, length INTEGER, trained INTEGER,
  turns INTEGER, calls INTEGER, errors INTEGER, cause TEXT, parent INTEGER, request INTEGER);
CREATE INDEX by_place ON trajectories (step, file, line);
CREATE INDEX by_file ON trajectories (file);
CREATE INDEX by_group ON trajectories ("group");
CREATE INDEX by_session ON trajectories (session, step, file, line);
CREATE TABLE unreadable (file TEXT, line INTEGER, why TEXT);
"""


def open_database(run_dir: Path) -> tuple[Path, sqlite3.Connection]:
    """The index file of a run, and a connection to it.

    Raises:
        OSError, sqlite3.DatabaseError: neither the run's folder nor the cache can be written.
    """
    beside = run_dir / FILE_NAME
    with suppress(OSError, sqlite3.OperationalError):  # not writable
        return beside, _connect(beside)
    name = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
    path = user_cache() / f"viewer-{name}.sqlite"
    return path, _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    """The database with its tables; a file that is not a database is replaced."""
    database = sqlite3.connect(path, timeout=30.0)
    try:
        _make_tables(database)
    except sqlite3.OperationalError:
        database.close()
        raise
    except sqlite3.DatabaseError:  # damaged, or not a database
        database.close()
        path.unlink()
        database = sqlite3.connect(path, timeout=30.0)
        _make_tables(database)
    return database


def _make_tables(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA synchronous = OFF")  # a damaged index is created again
    database.execute("PRAGMA cache_size = -16000")
    database.execute("BEGIN IMMEDIATE")  # raises here if the file cannot be written
    with database:
        if database.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
            return
        old = database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN "
            "('files', 'trajectories', 'unreadable', 'texts')"
        ).fetchall()
        for (name,) in old:
            database.execute(f"DROP TABLE {name}")
        for statement in _TABLES.split(";"):
            database.execute(statement)
        try:
            database.execute("CREATE VIRTUAL TABLE texts USING fts5(text)")
        except sqlite3.OperationalError:  # SQLite without full text search: LIKE is used
            database.execute("CREATE TABLE texts (text TEXT)")
        database.execute(f"PRAGMA user_version = {_VERSION}")


def has_words(database: sqlite3.Connection) -> bool:
    """Whether the texts are indexed by word."""
    created = database.execute("SELECT sql FROM sqlite_master WHERE name = 'texts'").fetchone()[0]
    return "fts5" in created
