"""What a limiter says it has done, and what that costs nobody."""

import asyncio
import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout
from rate_limit.snapshot import SourceSnapshot
from rate_limit.state_file import boottime_ns
from rate_limit.stats import reset, snapshot_of
from tests.rate_limit.fake_clock import SECOND_NS, FakeClock

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def limiter_at(path: Path, clock: FakeClock, per_minute: float = 60, burst: int = 2):
    return FileRateLimiter(
        path,
        per_minute=per_minute,
        burst=burst,
        clock_ns=clock,
        sleep=clock.sleep,
        sleep_async=clock.sleep_async,
    )


def test_calls_waits_and_refusals_are_told_by_source(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    limiter.acquire(source="nq")
    limiter.acquire(source="taco")
    limiter.acquire(source="taco")
    asyncio.run(limiter.acquire_async(source="nq"))
    with pytest.raises(LimiterTimeout):
        limiter.acquire(2, timeout_s=0.5, source="nq")
    found = limiter.snapshot()
    assert found.granted == 4
    assert found.sources == {
        "nq": SourceSnapshot(
            granted=2, waited_s=1.0, waits=(0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0), refused=2
        ),
        "taco": SourceSnapshot(granted=2, waited_s=1.0, waits=(0, 0, 0, 0, 0, 0, 1, *[0] * 5)),
    }
    assert (found.waiting, found.waited_s, found.abandoned) == (0, 2.0, 0)
    assert (found.per_minute, found.burst) == (60.0, 2)


def test_a_single_call_is_seen_by_others_at_once(tmp_path: Path):
    clock = FakeClock()
    limiter = limiter_at(tmp_path / "rate", clock, burst=5)
    for seen in (1, 2):
        limiter.acquire(source="nq")
        assert snapshot_of(tmp_path / "rate", clock).sources["nq"].granted == seen
        clock.now_ns += SECOND_NS // 100


def test_who_waits_is_seen_while_it_waits(tmp_path: Path):
    clock = FakeClock()
    limiter = limiter_at(tmp_path / "rate", clock)
    limiter.acquire(2)
    seen: list[int] = []
    clock.meanwhile = lambda: seen.append(limiter.snapshot().sources["math"].waiting)
    limiter.acquire(source="math")
    assert seen == [1]
    assert limiter.snapshot().waiting == 0


async def test_a_cancelled_waiter_is_no_grant(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=1, burst=1)
    limiter.acquire()
    waiter = asyncio.ensure_future(limiter.acquire_async(source="nq"))
    while not limiter.snapshot().waiting:  # noqa: ASYNC110 - another task begins to
        await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    found = limiter.snapshot()
    assert found.sources["nq"] == SourceSnapshot()
    assert (found.granted, found.abandoned) == (1, 0)


async def test_a_slot_that_nobody_could_use_is_counted(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock())

    async def cancel_the_other() -> None:
        await asyncio.sleep(0)
        also_asking.cancel()

    asking = asyncio.ensure_future(limiter.acquire_async())  # and reserves for both
    cancelling = asyncio.ensure_future(cancel_the_other())
    also_asking = asyncio.ensure_future(limiter.acquire_async())
    await asyncio.gather(asking, cancelling, also_asking, return_exceptions=True)
    assert also_asking.cancelled()
    found = limiter.snapshot()
    assert (found.granted, found.abandoned) == (2, 1)


def test_utilisation_is_that_of_the_last_minute(tmp_path: Path):
    clock = FakeClock()
    limiter = limiter_at(tmp_path / "rate", clock, per_minute=60, burst=30)
    for _ in range(30):
        limiter.acquire()
    assert limiter.snapshot().utilisation == 0.5
    clock.now_ns += 30 * SECOND_NS
    limiter.acquire(15)
    assert limiter.snapshot().utilisation == 0.75
    clock.now_ns += 31 * SECOND_NS
    assert limiter.snapshot().utilisation == 0.25
    clock.now_ns += 31 * SECOND_NS
    assert limiter.snapshot().utilisation == 0.0


def test_penalties_pauses_and_the_rate_in_force_are_told(tmp_path: Path):
    clock = FakeClock()
    path = tmp_path / "rate"
    limiter = FileRateLimiter(path, 60, 2, adaptive=True, clock_ns=clock, sleep=clock.sleep)
    for _ in range(3):
        limiter.penalise(7.0)
    found = limiter.snapshot()
    assert (found.penalties, found.paused_s, found.rate_factor) == (3, 7.0, 0.5)


def acquire_and_report(limiter: FileRateLimiter, source: str, report: Connection) -> None:
    for _ in range(100):
        limiter.acquire(source=source)
    limiter.snapshot()  # writes the calls of the last 10 ms too
    report.send(os.getpid())
    signal.pause()


def acquire_for_ever(limiter: FileRateLimiter) -> None:
    limiter.acquire(1000, source="nq")


def test_who_was_killed_while_it_waited_waits_no_longer(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=1)
    process = FORK.Process(target=acquire_for_ever, args=(limiter,))
    process.start()
    while limiter.snapshot().waiting != 1:
        pass
    process.kill()
    process.join()
    assert limiter.snapshot().waiting == 0
    limiter.try_acquire()  # now the cell is this process's
    assert limiter.snapshot().waiting == 0


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_what_killed_processes_did_stays_and_their_cells_are_used_again(tmp_path: Path, context):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=6e9, burst=1000)
    limiter.acquire(source="taco")
    sizes: list[int] = []
    for turn in range(1, 4):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (limiter, "taco", sender)
        running = [context.Process(target=acquire_and_report, args=arguments) for _ in range(2)]
        for process in running:
            process.start()
        for _ in running:
            receiver.recv()
        assert limiter.snapshot().sources["taco"].granted == 1 + 200 * turn
        for process in running:
            process.kill()
            process.join()
        sizes.append((tmp_path / "rate.stats").stat().st_size)
    assert limiter.snapshot().granted == limiter.snapshot().sources["taco"].granted == 601
    assert len(set(sizes)) == 1


def test_a_file_that_cannot_be_used_stops_no_call(tmp_path: Path, caplog):
    (tmp_path / "rate.stats").mkdir()
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    with caplog.at_level(logging.WARNING):
        limiter.acquire(2)
        limiter.acquire()
    assert len(caplog.records) == 1
    assert str(tmp_path / "rate.stats") in caplog.text


def test_more_sources_than_there_is_room_for_count_as_one(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock(), burst=100)
    for i in range(40):
        limiter.acquire(source=f"source{i}")
    found = limiter.snapshot().sources
    assert sum(source.granted for source in found.values()) == 40
    assert found["(others)"].granted == 40 - (len(found) - 1)


def test_names_may_be_any_text(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock(), burst=100)
    limiter.acquire(source="数学/ß")
    limiter.acquire(source="")
    assert list(limiter.snapshot().sources) == ["", "数学/ß"]


def test_reset_begins_anew_with_an_empty_bucket(tmp_path: Path):
    path = tmp_path / "rate"
    limiter = FileRateLimiter(path, per_minute=60, burst=5, adaptive=True)
    limiter.acquire(3, source="nq")
    for _ in range(3):
        limiter.penalise(3600.0)
    reset(path)
    found = limiter.snapshot()
    assert (found.granted, found.penalties, found.rate_factor, found.paused_s) == (0, 0, 1.0, 0.0)
    assert (found.sources["nq"], found.utilisation) == (SourceSnapshot(), 0.0)
    assert not limiter.try_acquire(source="nq")
    limiter.acquire(source="nq")
    assert limiter.snapshot().granted == 1


def test_no_snapshot_of_what_is_no_limiter(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        snapshot_of(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    with pytest.raises(ValueError, match="no record of a limiter"):
        snapshot_of(tmp_path / "junk")


def test_a_file_cut_short_or_deleted_harms_nobody(tmp_path: Path):
    clock = FakeClock()
    limiter = limiter_at(tmp_path / "rate", clock, burst=100)
    limiter.acquire(source="nq")
    stats = tmp_path / "rate.stats"
    os.truncate(stats, 0)
    limiter.acquire(source="nq")
    assert limiter.snapshot().sources["nq"].granted == 2
    stats.unlink()
    clock.now_ns += SECOND_NS
    limiter.acquire(source="nq")
    assert limiter.snapshot().sources["nq"].granted == 3


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, caplog):
    (tmp_path / "victim").write_bytes(b"v" * 10_000)
    (tmp_path / "rate.stats").symlink_to(tmp_path / "victim")
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    limiter.acquire()
    reset(tmp_path / "rate")
    assert limiter.snapshot().sources == {}
    assert (tmp_path / "victim").read_bytes() == b"v" * 10_000
    (tmp_path / "rate.stats").unlink()
    os.mkfifo(tmp_path / "rate.stats")
    assert limiter.snapshot().sources == {}


def test_a_long_name_is_the_same_source_after_a_restart(tmp_path: Path):
    for _ in range(4):
        limiter = limiter_at(tmp_path / "rate", FakeClock(), burst=100)
        limiter.acquire(source="nq")
        limiter.acquire(source="x" * 100)
        limiter.close()
    found = snapshot_of(tmp_path / "rate").sources
    assert {name: source.granted for name, source in found.items()} == {"nq": 4, "x" * 63: 4}


@pytest.mark.parametrize("source", [None, 5, "\ud800"])
def test_a_name_that_is_none_stops_no_call(tmp_path: Path, source):
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    limiter.acquire(source=source)
    assert sum(found.granted for found in limiter.snapshot().sources.values()) == 1


def test_n_calls_that_wait_together_are_n_waits(tmp_path: Path):
    limiter = limiter_at(tmp_path / "rate", FakeClock())
    limiter.acquire(2)
    limiter.acquire(2, source="nq")
    found = limiter.snapshot().sources["nq"]
    assert sum(found.waits) == found.granted == 2
    assert found.waited_s == 4.0


def test_a_reset_is_heard_by_the_living_before_their_next_call(tmp_path: Path):
    clock = FakeClock()
    clock.now_ns = boottime_ns() + 60 * SECOND_NS  # the bucket is full after the reset
    limiter = limiter_at(tmp_path / "rate", clock, burst=100)
    for _ in range(3):
        limiter.acquire(source="nq")
    assert not limiter.try_acquire(100, source="nq")
    reset(tmp_path / "rate")
    limiter.acquire(source="nq")  # at once, and within 10 ms
    assert not limiter.try_acquire(100, source="nq")
    found = limiter.snapshot()
    assert (found.sources["nq"].granted, found.sources["nq"].refused) == (1, 100)
    assert found.granted == 1
