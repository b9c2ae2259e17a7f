"""Tool results that the processes of a host share, in an SQLite file of the run's folder.

The store only saves work. If the file is corrupt, locked or full, one warning is logged and the
process goes on without it.

Reads are made in the event loop, because a read of a cached file takes about ten microseconds; a
thread writes. The library diskcache is not used: it has had no release since 2023, and it unpickles
what it finds in the file.
"""

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

_MOST_PENDING = 4096
"""Results that may wait to be written; further results are dropped."""

_PATIENCE_S = 30.0
"""How long the writing thread waits for another process's transaction."""

_CLOSE_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS results_v1 (
  number INTEGER PRIMARY KEY,  -- in order of creation: the lowest numbers are deleted first
  key TEXT UNIQUE NOT NULL,
  made_at REAL NOT NULL,  -- seconds since 1970
  body BLOB NOT NULL
)
"""


class ResultStore:
    """Bodies of answers, as JSON, by key.

    Args:
        path: the file; created with its folder if missing.
        max_bytes: largest size of the file, without its log (`-wal`, some megabytes).
        ttl_s: seconds that a result is kept.
        clock: seconds since 1970, because all processes must agree on it.
    """

    def __init__(
        self, path: Path, max_bytes: float, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._max_bytes, self._ttl_s, self._clock = path, max_bytes, ttl_s, clock
        self._pending: queue.SimpleQueue[tuple[str, float, bytes] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._reader: sqlite3.Connection | None = None
        self._is_given_up = False

    def get(self, key: str) -> bytes | None:
        """The body of a key; None if there is none. Never raises."""
        if self._is_given_up:
            return None
        try:
            if self._reader is None:
                self._reader = self._connect(timeout_s=0.0)
            row = self._reader.execute(
                "SELECT body FROM results_v1 WHERE key = ? AND made_at > ?",
                (key, self._clock() - self._ttl_s),
            ).fetchone()
            return None if row is None else row[0]
        except sqlite3.OperationalError:
            pass  # locked, for example while another process creates the file
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
        return None

    def put(self, key: str, body: bytes) -> None:
        """Store a body, possibly later or not at all. Never blocks, never raises."""
        is_too_large = len(body) > self._max_bytes / 8
        if is_too_large or self._is_given_up or self._pending.qsize() >= _MOST_PENDING:
            return
        if self._writer is None:
            self.get(key)  # opens the file for reading, before our own writer may lock it
            self._writer = threading.Thread(target=self._write_all, daemon=True, name="tool cache")
            self._writer.start()
        self._pending.put((key, self._clock(), body))

    async def close(self) -> None:
        """Write what is still to be written, and close."""
        if (writer := self._writer) is not None:
            self._pending.put(None)
            await asyncio.to_thread(writer.join, _CLOSE_S)
            self._writer = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=timeout_s, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # a power cut ends the run anyway
            connection.execute(f"PRAGMA journal_size_limit = {4 << 20}")
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _write_all(self) -> None:
        """The writing thread: writes what is pending, until None comes."""
        connection: sqlite3.Connection | None = None
        try:
            connection = self._connect(timeout_s=_PATIENCE_S)
            while (row := self._pending.get()) is not None:
                self._write(connection, row)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
        finally:
            if connection is not None:
                connection.close()

    def _write(self, connection: sqlite3.Connection, row: tuple[str, float, bytes]) -> None:
        """Write a row; if the used part of the file is out of bounds, delete the oldest eighth."""

        def number(sql: str) -> int:
            return connection.execute(sql).fetchone()[0]

        connection.execute(
            "INSERT OR REPLACE INTO results_v1 (key, made_at, body) VALUES (?, ?, ?)", row
        )
        pages = number("PRAGMA page_count") - number("PRAGMA freelist_count")
        if pages * number("PRAGMA page_size") > self._max_bytes:
            connection.execute(
                "DELETE FROM results_v1 WHERE number IN (SELECT number FROM results_v1 "
                "ORDER BY number LIMIT (SELECT count(*) / 8 + 1 FROM results_v1))"
            )

    def _give_up(self, error: Exception) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            _log.warning(
                "cannot use cache=%s: %s: %s; results are not shared; delete the file if no run "
                "uses it",
                *(self._path, type(error).__name__, error),
            )
