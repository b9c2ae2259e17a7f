"""Tool results shared between processes: in an SQLite file of a host, or on a Redis server.

The store only saves work. If the file is corrupt, locked or full, or the server does not answer,
one warning is logged and calls go on without the store.

`SqliteStore` reads in the event loop, because a read of a cached file takes about ten microseconds;
a thread writes. The library diskcache is not used: it has had no release since 2023, and it
unpickles what it finds in the file.
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
from tool_server.wire.responses import MAX_ANSWER_BYTES

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = max(MAX_ANSWER_BYTES.values())
"""Largest body that is stored or read: none that the client accepts is larger."""

_MOST_PENDING = 4096
"""Results that may wait to be written; further results are dropped."""

_REST_S = 1.0
"""How long a locked file is not read."""

_WRITER_PATIENCE_S = 2.0
"""How long the writing thread waits for another process's transaction."""

_CLOSE_S = 2.0
_REDIS_TIMEOUT_S = 0.25
_REDIS_PAUSE_S = 30.0
"""How long a Redis server is not asked after it failed."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS results_v1 (
  number INTEGER PRIMARY KEY,  -- in order of creation: the lowest numbers are deleted first
  key TEXT UNIQUE NOT NULL,
  made_at REAL NOT NULL,  -- seconds since 1970
  body BLOB NOT NULL
)
"""


class Store(Protocol):
    """Stores JSON bodies of responses by key."""

    async def get(self, key: str) -> dict[str, Any] | None:
        """The body of a key; None if there is none. Never raises."""
        ...

    def put(self, key: str, body: dict[str, Any]) -> None:
        """Store a body, possibly later or not at all. Never blocks, never raises."""
        ...

    async def close(self) -> None:
        """Write what is still to be written, and close."""
        ...


class SqliteStore:
    """An SQLite file that the processes of a host share.

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
        self._is_broken = False
        self._try_again_at = -math.inf

    async def get(self, key: str) -> dict[str, Any] | None:
        if self._is_broken or self._clock() < self._try_again_at:
            return None
        try:
            if self._reader is None:
                self._reader = self._connect(timeout_s=0.0)
            row = self._reader.execute(
                "SELECT body FROM results_v1 WHERE key = ? AND made_at > ? "
                "AND typeof(body) = 'blob' AND length(body) <= ?",
                (key, self._clock() - self._ttl_s, MAX_BODY_BYTES),
            ).fetchone()
            return None if row is None else _body_of(row[0])
        except sqlite3.OperationalError as error:
            # locked, for example while another process creates the file
            self._try_again_at = self._clock() + _REST_S
            _log.debug("cache=%s: %s", self._path, error)
        except (sqlite3.Error, OSError, ValueError) as error:
            self._give_up(error)
        return None

    def put(self, key: str, body: dict[str, Any]) -> None:
        if self._is_broken or self._pending.qsize() >= _MOST_PENDING:
            return
        packed = _packed(body)
        if packed is None or len(packed) > min(MAX_BODY_BYTES, self._max_bytes / 8):
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
            connection.execute("PRAGMA synchronous = OFF")  # a power cut ends the run anyway
            connection.execute(f"PRAGMA journal_size_limit = {4 << 20}")
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _write_all(self) -> None:
        """The writing thread: writes all pending results in one transaction, until None comes."""
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
                    self._warn(error)  # locked, or the disk is full: these results are lost
                except (sqlite3.Error, OSError) as error:
                    self._give_up(error)
                if None in batch:
                    return
        finally:
            if connection is not None:
                connection.close()

    def _write(self, connection: sqlite3.Connection, rows: list[tuple[str, float, bytes]]) -> None:
        with connection:  # commits, or rolls back after an error
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT OR REPLACE INTO results_v1 (key, made_at, body) VALUES (?, ?, ?)", rows
            )
            self._make_room(connection)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete the oldest rows until the used part of the file is within `max_bytes`."""

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
        _warn_once(
            str(self._path), error, "results are not shared; delete the file if no run uses it"
        )


class RedisStore:
    """A Redis server that hosts share; its `maxmemory` bounds the size of the store.

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
            _warn_once(self._place, error, "does another program write keys of this name?")
        return None

    def put(self, key: str, body: dict[str, Any]) -> None:
        if self._clock() < self._not_before or len(self._writes) >= _MOST_PENDING:
            return
        packed = _packed(body)
        if packed is not None and len(packed) <= MAX_BODY_BYTES:
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
        _warn_once(
            self._place, error, f"results are not shared for {_REDIS_PAUSE_S:.0f} s; is Redis up?"
        )


def open_store_of(config: ToolCacheConfig, run_dir: str) -> Store | None:
    """The store of a run's settings; None if processes do not share results.

    Raises:
        ImportError: the store is a Redis server, and redis-py is not installed.
    """
    if config.store in ("memory", "none"):
        return None
    if config.store == "sqlite":
        # One file per host, because SQLite's log needs memory that only processes of one host
        # share.
        path = Path(run_dir) / f"tool_cache.{socket.gethostname()}.sqlite"
        return SqliteStore(path, config.max_mb * 2**20, config.ttl_s)
    return RedisStore(config.store, config.ttl_s)


_REDIS_PREFIX = "verl-mixed:result:"


def _packed(body: dict[str, Any]) -> bytes | None:
    """A body as msgpack; None if msgpack cannot hold it, for example an integer of 30 digits."""
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, ValueError, TypeError):
        return None


def _body_of(packed: object) -> dict[str, Any]:
    """The body that was packed; raises ValueError if these are no bytes of a packed body."""
    if not isinstance(packed, bytes) or len(packed) > MAX_BODY_BYTES:
        raise ValueError("a stored result is no body")
    try:
        return _UNPACKER.decode(packed)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a stored result is no body: {error}") from error


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"a stored result has a value of type {code}, which JSON does not have")


_UNPACKER = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_no_extension)

_warned: set[str] = set()


def _warn_once(place: str, error: Exception, advice: str) -> None:
    if place not in _warned:
        _warned.add(place)
        _log.warning("cannot use cache=%s: %s: %s; %s", place, type(error).__name__, error, advice)
