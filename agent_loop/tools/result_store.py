"""Results of pure tools that processes share: an SQLite file on a host, or a Redis server.

It only ever saves work. A file that is corrupt, locked or full, and a server that is gone, are said
once and then done without: no call fails by them.

`SqliteStore` reads in the event loop, which takes some ten microseconds of a file that is in
memory, and writes from a thread of its own. sqlite3 of the standard library does; diskcache, looked
at for this, has had no release since 2023 and unpickles what it finds in the file.
"""

import asyncio
import logging
import math
import os
import queue
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from config.schema import ToolCacheConfig

_log = logging.getLogger(__name__)

_MOST_PENDING = 4096
"""Results that wait to be written; more are not kept."""

_REST_S = 1.0
"""A file that is locked is not read for so long."""

_WRITER_PATIENCE_S = 2.0
"""How long the writing thread waits for another process's transaction."""

_CLOSE_S = 2.0
_REDIS_TIMEOUT_S = 0.25
_REDIS_PAUSE_S = 30.0
"""A Redis that failed is left alone so long."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS results_v1 (
  number INTEGER PRIMARY KEY,  -- in the order they were made: the lowest make room
  key TEXT UNIQUE NOT NULL,
  made_at REAL NOT NULL,  -- seconds since 1970
  body BLOB NOT NULL
)
"""


class Store(Protocol):
    """Bodies of answers by key."""

    async def get(self, key: str) -> dict[str, Any] | None:
        """The body kept for a key; raises nothing."""
        ...

    def put(self, key: str, body: dict[str, Any]) -> None:
        """Keep a body, now or a little later or not at all; waits for nothing, raises nothing."""
        ...

    async def close(self) -> None:
        """After the last use; what is still to be written is written."""
        ...


class SqliteStore:
    """A file that the processes of a host share.

    Args:
        path: the file; made with its folder where missing.
        max_bytes: its size, but for the log beside it (`-wal`, some megabytes).
        ttl_s: seconds that a result is kept.
        clock: seconds since 1970: the processes compare it.
    """

    def __init__(
        self, path: Path, max_bytes: float, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._max_bytes, self._ttl_s, self._clock = path, max_bytes, ttl_s, clock
        self._pending: queue.SimpleQueue[tuple[str, float, bytes] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._reader: sqlite3.Connection | None = None
        self._is_broken = False
        self._try_again_at = -math.inf

    async def get(self, key: str) -> dict[str, Any] | None:
        if self._is_broken or self._clock() < self._try_again_at:
            return None
        try:
            if self._reader is None:
                self._reader = self._connect(timeout_s=0.0)
            row = self._reader.execute(
                "SELECT body FROM results_v1 WHERE key = ? AND made_at > ?",
                (key, self._clock() - self._ttl_s),
            ).fetchone()
            return None if row is None else _body_of(row[0])
        except sqlite3.OperationalError as error:
            # locked, as while another process makes the file
            self._try_again_at = self._clock() + _REST_S
            _log.debug("cache=%s: %s", self._path, error)
        except (sqlite3.Error, OSError, ValueError) as error:
            self._give_up(error)
        return None

    def put(self, key: str, body: dict[str, Any]) -> None:
        if self._is_broken or self._pending.qsize() >= _MOST_PENDING:
            return
        packed = _packed(body)
        if packed is None or len(packed) > self._max_bytes / 8:
            return
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, daemon=True, name="tool cache")
            self._writer.start()
        self._pending.put((key, self._clock(), packed))

    async def close(self) -> None:
        if self._writer is not None:
            self._pending.put(None)
            await asyncio.to_thread(self._writer.join, _CLOSE_S)
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
            connection.execute("PRAGMA synchronous = OFF")  # after a power cut there is no run
            connection.execute(f"PRAGMA journal_size_limit = {4 << 20}")
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _write_all(self) -> None:
        """The writing thread: all that is pending in one transaction, until None comes."""
        connection: sqlite3.Connection | None = None
        try:
            while (batch := [self._pending.get()])[0] is not None:
                while not self._pending.empty():
                    batch.append(self._pending.get())
                rows = [row for row in batch if row is not None]
                try:
                    connection = connection or self._connect(timeout_s=_WRITER_PATIENCE_S)
                    self._write(connection, rows)
                except sqlite3.OperationalError as error:
                    self._warn(error)  # locked, or the disk is full: these are not kept
                except (sqlite3.Error, OSError) as error:
                    self._give_up(error)
                if None in batch:
                    return
        finally:
            if connection is not None:
                connection.close()

    def _write(self, connection: sqlite3.Connection, rows: list[tuple[str, float, bytes]]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(
                "INSERT OR REPLACE INTO results_v1 (key, made_at, body) VALUES (?, ?, ?)", rows
            )
            self._make_room(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete the oldest rows until what is in use of the file is below its bound."""

        def pragma(name: str) -> int:
            return connection.execute(f"PRAGMA {name}").fetchone()[0]

        page_bytes = pragma("page_size")
        while (pragma("page_count") - pragma("freelist_count")) * page_bytes > self._max_bytes:
            (rows,) = connection.execute("SELECT count(*) FROM results_v1").fetchone()
            if not rows:
                return
            connection.execute(
                "DELETE FROM results_v1 WHERE number IN "
                "(SELECT number FROM results_v1 ORDER BY number LIMIT ?)",
                (rows // 8 + 1,),
            )

    def _give_up(self, error: Exception) -> None:
        self._warn(error)
        self._is_broken = True

    def _warn(self, error: Exception) -> None:
        _warn_once(str(self._path), error, "results are not shared; delete it if no run uses it")


class RedisStore:
    """A Redis server, which all hosts may share; how much it keeps is its `maxmemory`.

    Args:
        url: as redis-py takes it.
        ttl_s: seconds that a result is kept.
        clock: monotonic seconds.

    Raises:
        ImportError: redis-py is not installed.
    """

    def __init__(self, url: str, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        import redis.asyncio

        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        )
        self._errors = (redis.RedisError, OSError)
        self._place = url.rpartition("@")[2]  # without the password
        self._ttl_ms, self._clock = int(ttl_s * 1000), clock
        self._not_before = 0.0
        self._writes: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> dict[str, Any] | None:
        if self._clock() < self._not_before:
            return None
        try:
            packed = await self._redis.get(_REDIS_PREFIX + key)
            return _body_of(packed) if isinstance(packed, bytes) else None
        except self._errors as error:
            self._rest(error)
        except ValueError as error:
            _warn_once(self._place, error, "another program's key?")
        return None

    def put(self, key: str, body: dict[str, Any]) -> None:
        if self._clock() < self._not_before or len(self._writes) >= _MOST_PENDING:
            return
        if (packed := _packed(body)) is not None:
            write = asyncio.ensure_future(self._write(key, packed))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def close(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes, timeout=_CLOSE_S)
        await self._redis.aclose()

    async def _write(self, key: str, packed: bytes) -> None:
        try:
            await self._redis.set(_REDIS_PREFIX + key, packed, px=self._ttl_ms)
        except self._errors as error:
            self._rest(error)

    def _rest(self, error: Exception) -> None:
        self._not_before = self._clock() + _REDIS_PAUSE_S
        _warn_once(self._place, error, "results are not shared meanwhile; is Redis up?")


def open_store_of(config: ToolCacheConfig, run_dir: str) -> Store | None:
    """The store that a run asks for; None where each process keeps its own.

    Raises:
        ImportError: it is on Redis, and redis-py is not installed.
    """
    if config.store in ("memory", "none"):
        return None
    if config.store == "sqlite":
        # One file a host: its log is in memory that only the processes of one host share.
        path = Path(run_dir) / f"tool_cache.{socket.gethostname()}.sqlite"
        return SqliteStore(path, config.max_mb * 2**20, config.ttl_s)
    return RedisStore(config.store, config.ttl_s)


_REDIS_PREFIX = "verl-mixed:result:"


def _packed(body: dict[str, Any]) -> bytes | None:
    """A body as bytes; None where it has what they cannot hold, as an integer of 30 digits."""
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, ValueError, TypeError):
        return None


def _body_of(packed: bytes) -> dict[str, Any]:
    """
    Raises:
        ValueError: these bytes are no body.
    """
    return msgspec.msgpack.decode(packed, type=dict[str, Any])


_warned: set[str] = set()


def _warn_once(place: str, error: Exception, then: str) -> None:
    if place not in _warned:
        _warned.add(place)
        _log.warning("cannot use cache=%s: %s: %s; %s", place, type(error).__name__, error, then)
