"""Waiting, refusing, pushing back and sharing, on a clock that moves only in sleeps."""

import asyncio
import pickle
import threading
from pathlib import Path

import pytest

from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout, boottime_ns
from rate_limit.state_file import StateFile
from tests.rate_limit.fake_clock import SECOND_NS, FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rate"


def limiter_at(
    path: Path,
    clock: FakeClock,
    per_minute: float = 120,
    burst: int = 3,
    min_interval_s: float = 0.0,
) -> FileRateLimiter:
    return FileRateLimiter(
        path,
        per_minute,
        burst,
        min_interval_s,
        clock_ns=clock,
        sleep=clock.sleep,
        sleep_async=clock.sleep_async,
    )


def test_burst_passes_at_once_then_one_per_emission_interval(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    assert [limiter.acquire() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]


async def test_coroutines_wait_the_same(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    assert [await limiter.acquire_async() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]


def test_a_wait_is_one_sleep(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    limiter.acquire(2)
    assert clock.slept_s == [1.0]


def test_sharers_of_a_file_share_the_rate(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    assert not second.try_acquire()
    assert second.acquire() == 0.5


def test_another_file_is_another_rate(path: Path, clock: FakeClock):
    limiter_at(path, clock).acquire(3)
    assert limiter_at(path.with_name("other"), clock).try_acquire(3)


def test_a_pickled_limiter_shares_the_rate(path: Path):
    limiter = FileRateLimiter(path, 1, 2, 0.25)
    again = pickle.loads(pickle.dumps(limiter))
    assert again.rate == limiter.rate
    assert again.try_acquire()
    assert not limiter.try_acquire()  # kept apart by min_interval_s


def test_try_acquire_takes_nothing_when_it_refuses(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    assert limiter.try_acquire(2)
    assert not limiter.try_acquire(2)
    assert limiter.try_acquire(1)
    assert clock.slept_s == []


def test_a_timeout_refuses_at_once_and_reserves_nothing(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    with pytest.raises(LimiterTimeout, match=r"the next is 0\.500 s away, beyond timeout_s=0\.4"):
        limiter.acquire(timeout_s=0.4)
    assert clock.slept_s == []
    assert limiter.acquire(timeout_s=0.5) == 0.5


def test_a_limiter_timeout_is_a_timeout_error_and_pickles():
    error = pickle.loads(pickle.dumps(LimiterTimeout("no slot")))
    assert type(error) is LimiterTimeout
    assert isinstance(error, TimeoutError)
    assert str(error) == "no slot"


@pytest.mark.parametrize("n", [0, -1, 4])
def test_more_calls_than_a_burst_or_fewer_than_one_are_refused(
    path: Path, clock: FakeClock, n: int
):
    with pytest.raises(ValueError, match="n must be 1 to burst=3"):
        limiter_at(path, clock).acquire(n)


def test_the_least_interval_holds_between_sharers(path: Path, clock: FakeClock):
    first, second = (limiter_at(path, clock, burst=9, min_interval_s=0.2) for _ in range(2))
    assert [first.acquire(), second.acquire(), first.acquire()] == [0.0, 0.2, 0.2]


def test_another_rate_on_the_same_path_is_told_when_opening(path: Path, clock: FakeClock):
    limiter_at(path, clock)
    with pytest.raises(ValueError, match=r"per_minute=120\.0 .* asked for is per_minute=60\.0"):
        limiter_at(path, clock, per_minute=60)


def test_a_push_back_holds_up_every_sharer(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.push_back(10)
    assert second.acquire() == 10.0
    assert first.acquire() == 0.5  # no burst after it


def test_a_push_back_holds_up_those_who_already_wait(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    clock.meanwhile = lambda: second.push_back(10)
    assert first.acquire() == 10.0
    assert clock.slept_s == [0.5, 9.5]


def test_a_waiter_whose_timeout_does_not_reach_past_the_push_back_is_refused(
    path: Path, clock: FakeClock
):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    clock.meanwhile = lambda: second.push_back(10)
    with pytest.raises(LimiterTimeout, match=r"10\.000 s away, beyond timeout_s=5"):
        first.acquire(timeout_s=5)


async def test_a_coroutine_may_push_back(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    await limiter.push_back_async(2)
    assert await limiter.acquire_async() == 2.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_push_back_by_no_time_is_refused(path: Path, clock: FakeClock, seconds: float):
    with pytest.raises(ValueError, match="cannot push back by seconds="):
        limiter_at(path, clock).push_back(seconds)


def test_a_waiter_reserves_again_when_the_state_is_lost_meanwhile(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    clock.meanwhile = lambda: path.write_bytes(b"rubble")
    assert limiter.acquire() == 1.0  # found at 0.5 s: the burst counts as used up then


def test_deleting_the_file_gives_no_second_burst(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    path.unlink()
    assert not second.try_acquire()
    assert not first.try_acquire()
    assert not limiter_at(path, clock).try_acquire()


def test_garbage_in_the_file_gives_no_second_burst(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    path.write_bytes(b"\xff" * 40)
    assert not limiter.try_acquire()
    clock.now_ns += SECOND_NS // 2
    assert limiter.try_acquire()


async def test_a_coroutine_comes_back_on_a_timer_while_another_holds_the_file(
    path: Path, clock: FakeClock
):
    limiter = limiter_at(path, clock)
    holder = StateFile(path, limiter.rate)
    assert holder.lock(blocking=False)

    def third_time_lucky() -> None:
        if len(clock.slept_s) < 3:
            clock.meanwhile = third_time_lucky
        else:
            holder.unlock()

    clock.meanwhile = third_time_lucky
    assert await limiter.acquire_async() == pytest.approx(sum(clock.slept_s))
    assert clock.slept_s == [0.0002, 0.0004, 0.0008]


async def test_a_file_held_for_good_ends_in_a_timeout(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    holder = StateFile(path, limiter.rate)
    assert holder.lock(blocking=False)
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        limiter.acquire(timeout_s=1.0)
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        await limiter.acquire_async(timeout_s=1.0)
    assert not limiter.try_acquire()
    holder.unlock()
    assert limiter.try_acquire()


async def test_a_cancelled_waiter_leaves_the_file_free(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=1)
    assert limiter.try_acquire()
    waiter = asyncio.create_task(limiter.acquire_async())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    with pytest.raises(LimiterTimeout, match="the next is"):
        await limiter.acquire_async(timeout_s=0.0)


def test_threads_together_get_one_burst(path: Path):
    limiter = FileRateLimiter(path, per_minute=0.01, burst=50)
    passed: list[bool] = []

    def call_often() -> None:
        passed.extend(limiter.try_acquire() for _ in range(40))

    threads = [threading.Thread(target=call_often) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(passed), sum(passed)) == (240, 50)


def test_the_clock_never_goes_back():
    times_ns = [boottime_ns() for _ in range(1000)]
    assert times_ns == sorted(times_ns)
