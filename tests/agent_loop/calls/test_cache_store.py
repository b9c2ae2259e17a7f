"""Results that processes share, with real processes."""

import asyncio
import logging
import multiprocessing
import os
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.calls import result_store
from agent_loop.calls.client import shared_client, store_of
from agent_loop.calls.result_store import ResultStore
from config.schema import ToolCacheConfig, ToolConfig
from tests.agent_loop.calls.test_client import CALL, GOOD, RecordingLimiter, client, mixed_in
from tests.fakes.tool_server import running
from tool_server.wire.protocol import ToolCall, ToolUnavailable

OTHER = ToolCall(tool="calculate", payload={"expression": "other"})
BODY = b'{"result": "2"}'


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[ResultStore]:
    store = ResultStore(path, **{"max_bytes": 2**20, "ttl_s": 100.0} | settings)
    try:
        yield store
    finally:
        await store.close()


async def fill(path: Path, bodies: dict[str, bytes], **settings: Any) -> None:
    """Closing sees them written."""
    async with opened(path, **settings) as store:
        for key, body in bodies.items():
            store.put(key, body)


async def test_what_one_wrote_another_reads(tmp_path):
    path = tmp_path / "folder" / "cache.sqlite"
    await fill(path, {"a": BODY})
    async with opened(path) as store:
        assert store.get("a") == BODY
        assert store.get("b") is None


async def test_a_result_is_gone_when_its_time_is_over(tmp_path):
    now, path = [1000.0], tmp_path / "cache"
    await fill(path, {"a": BODY}, clock=lambda: now[0])
    async with opened(path, clock=lambda: now[0]) as store:
        now[0] += 99
        assert store.get("a") == BODY
        now[0] += 2
        assert store.get("a") is None


async def test_the_file_stays_below_its_bound_and_the_oldest_make_room(tmp_path):
    path = tmp_path / "cache"
    for start in range(0, 300, 20):
        await fill(path, {str(n): b"y" * 10_000 for n in range(start, start + 20)})
        assert path.stat().st_size <= 2**20 + 300_000  # one transaction more
    async with opened(path) as store:
        there = [n for n in range(300) if store.get(str(n)) is not None]
    assert there == list(range(there[0], 300)) and 50 < len(there) < 105


async def test_what_is_too_large_is_not_kept(tmp_path):
    path = tmp_path / "cache"
    await fill(path, {"large": b"y" * 2**18, "small": BODY})
    async with opened(path) as store:
        assert [store.get(key) for key in ("large", "small")] == [None, BODY]


def corrupt(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def a_folder(path: Path) -> None:
    path.mkdir()


def of_other_bytes(path: Path) -> None:
    asyncio.run(fill(path, {"a": BODY}))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE results_v1 SET body = x'c1'")
    connection.close()


def with_another_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE results_v1 (x)")
    connection.close()


@pytest.mark.parametrize("spoil", [corrupt, a_folder, of_other_bytes, with_another_table])
def test_a_file_that_cannot_be_used_fails_no_call(tmp_path, caplog, spoil):
    path = tmp_path / "cache"
    spoil(path)

    async def use() -> None:
        async with (
            running([GOOD]) as server,
            client(server.url, open_store=lambda: ResultStore(path, 2**20, 100.0)) as tools,
        ):
            for expression in ("1", "2", "1"):
                call = ToolCall(tool="calculate", payload={"expression": expression})
                assert (await tools.call(call)).body == GOOD
        assert len(server.seen) == 2

    asyncio.run(use())
    if spoil is not of_other_bytes:  # those are read by nobody
        assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
        assert str(path) in caplog.text


async def test_a_file_that_another_process_locks_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(result_store, "_PATIENCE_S", 0.0)
    path = tmp_path / "cache"
    await fill(path, {"a": BODY})
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    async with opened(path) as store:
        store.get("a")
        store.put("b", BODY)
    other.execute("ROLLBACK")
    other.close()
    async with opened(path) as store:
        assert store.get("a") == BODY
        assert store.get("b") is None


@pytest.mark.parametrize(
    "value", ["text", 5, 1.5, b"", b"\x81\xa1a\xc7\x01\x05a", b"{}", b"[" * 200_000], ids=repr
)
async def test_any_value_in_the_file_is_no_result_and_fails_no_call(tmp_path, value):
    path = tmp_path / "cache"

    def store() -> ResultStore:
        return ResultStore(path, 2**20, 100.0)

    async with running([GOOD]) as server:
        async with client(server.url, open_store=store) as tools:
            first = await tools.call(CALL)
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE results_v1 SET body = ?", (value,))
        connection.close()
        async with client(server.url, open_store=store) as tools:
            tools.route.servers.origins["calculate"] = first.origin
            again = await tools.call(CALL)
    assert (again.body, again.cached) == (GOOD, False)


SPAWN = multiprocessing.get_context("spawn")


def write_some(path: Path, first: int) -> None:
    asyncio.run(fill(path, {str(n): b"%d" % n for n in range(first, first + 200)}))


@pytest.mark.slow
async def test_processes_write_at_once_and_nothing_is_torn(tmp_path):
    path = tmp_path / "cache"
    writers = [SPAWN.Process(target=write_some, args=(path, 200 * n)) for n in range(3)]
    for writer in writers:
        writer.start()
    async with opened(path) as store:
        for number in range(100):
            assert store.get(str(number)) in (None, b"%d" % number)
    for writer in writers:
        await asyncio.to_thread(writer.join)
    async with opened(path) as store:
        assert [store.get(str(n)) for n in range(600)] == [b"%d" % n for n in range(600)]
    assert [writer.exitcode for writer in writers] == [0, 0, 0]


def config_of(url: str, **cache: Any) -> ToolConfig:
    return ToolConfig(server_url=url, max_retries=0, cache=ToolCacheConfig(**cache))


async def ask(config: ToolConfig, folder: Path, call: ToolCall = CALL) -> tuple[Any, bool]:
    tools = await shared_client(config, mixed_in(folder))
    try:
        await tools.call(OTHER)  # its answer names what answers
        result = await tools.call(call)
    finally:
        await tools.__aexit__(None, None, None)
    return result.body, result.cached


def ask_once(config: ToolConfig, folder: Path, report: Any) -> None:
    report.send(asyncio.run(ask(config, folder)))


@pytest.mark.slow
async def test_a_run_that_goes_on_finds_the_results_of_before_in_its_folder(tmp_path):
    async with running([GOOD]) as server:
        config = config_of(server.url)
        answers = []
        for _ in range(2):  # each process ends, as a run that is stopped
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=ask_once, args=(config, tmp_path, theirs))
            process.start()
            assert await asyncio.to_thread(ours.poll, 60)
            answers.append(ours.recv())
            await asyncio.to_thread(process.join)
    assert answers == [(GOOD, False), (GOOD, True)]
    assert len(server.seen) == 3
    assert (tmp_path / f"tool_cache.{socket.gethostname()}.sqlite").exists()


@pytest.mark.parametrize(("store", "cached"), [("memory", True), ("none", False)])
async def test_results_may_be_kept_in_memory_only_or_not_at_all(tmp_path, store, cached):
    async with running([GOOD]) as server:
        tools = await shared_client(config_of(server.url, store=store), mixed_in(tmp_path))
        assert [(await tools.call(CALL)).cached for _ in range(2)] == [False, cached]
        await tools.__aexit__(None, None, None)
    assert not list(tmp_path.glob("tool_cache*"))


async def test_a_stored_result_passes_neither_limiter_nor_slot(tmp_path):
    def no_slots(timeout_s: float) -> Any:
        raise AssertionError("a slot was asked for")

    path, limiter = tmp_path / "cache", RecordingLimiter()

    def store() -> ResultStore:
        return ResultStore(path, 2**20, 100.0)

    async with running([GOOD]) as server:
        async with client(server.url, open_store=store) as tools:
            first = await tools.call(CALL)
        async with client(server.url, open_store=store, limiter=limiter, slots=no_slots) as tools:
            tools.route.servers.origins["calculate"] = first.origin
            results = await asyncio.gather(*(tools.call(CALL) for _ in range(4)))
    assert all(result.cached and result.body == GOOD for result in results)
    assert (limiter.acquired, len(server.seen)) == (0, 1)


async def test_failures_are_never_kept(tmp_path):
    def store() -> ResultStore:
        return ResultStore(tmp_path / "cache", 2**20, 100.0)

    late = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
    run = ToolCall(tool="run_code", payload={"code": "1"})
    wrong = ToolCall(tool="calculate", payload={"expression": "too slow"})
    script = [late, {"error": "took too long"}, 500, late, {"error": "took too long"}, GOOD]
    async with running(script) as server:
        for last in (False, True):
            async with client(server.url, open_store=store, max_retries=0) as tools:
                assert (await tools.call(run)).body == late
                assert "error" in (await tools.call(wrong)).body
                if last:
                    assert (await tools.call(CALL)).body == GOOD
                else:
                    with pytest.raises(ToolUnavailable):
                        await tools.call(CALL)
    assert len(server.seen) == 6


def test_the_config_names_the_store(tmp_path):
    assert store_of(ToolCacheConfig(store="memory"), str(tmp_path)) is None
    assert store_of(ToolCacheConfig(store="none"), str(tmp_path)) is None
    assert isinstance(store_of(ToolCacheConfig(), str(tmp_path)), ResultStore)
    for wrong in ({"store": "disk"}, {"store": "redis://"}):
        with pytest.raises(ValueError):
            ToolCacheConfig.model_validate(wrong)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1/", ["http://a:1"]),
        ("http://a:1, https://b", ["http://a:1", "https://b"]),
        (["http://a:1", "http://b:2/"], ["http://a:1", "http://b:2"]),
    ],
)
def test_the_config_names_one_server_or_several(given, urls):
    assert ToolConfig(server_url=given).server_urls == urls


@pytest.mark.parametrize("wrong", ["", "a:1", "http://a,", []])
def test_what_is_no_url_is_refused(wrong):
    with pytest.raises(ValueError, match="no base URL"):
        ToolConfig(server_url=wrong)
