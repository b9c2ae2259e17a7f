"""Waiting, refusing, pushing back and sharing, on a clock that moves only in sleeps."""

import asyncio
import os
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


async def test_entering_the_limiter_waits_for_one_call(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock, burst=2)
    with limiter as waited_s:
        assert waited_s == 0.0
    async with limiter as waited_s:
        assert waited_s == 0.0
    with limiter as waited_s:
        assert waited_s == 0.5
    async with limiter as waited_s:
        assert waited_s == 0.5
    assert limiter.snapshot().granted == 4


def test_the_burst_is_one_unless_given(path: Path, clock: FakeClock):
    limiter = FileRateLimiter(path, 60, clock_ns=clock)
    assert [limiter.try_acquire() for _ in range(2)] == [True, False]


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
    again: FileRateLimiter = pickle.loads(pickle.dumps(limiter))
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


@pytest.mark.parametrize("n", [0, -1])
async def test_fewer_calls_than_one_are_refused(path: Path, clock: FakeClock, n: int):
    limiter = limiter_at(path, clock)
    with pytest.raises(ValueError, match="n must be at least 1"):
        limiter.acquire(n)
    with pytest.raises(ValueError, match="n must be at least 1"):
        await limiter.acquire_async(n)


async def test_more_calls_than_a_burst_are_served_over_time(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    assert limiter.acquire(5) == 1.0
    assert await limiter.acquire_async(4) == 2.0


def test_the_least_interval_holds_between_sharers(path: Path, clock: FakeClock):
    first, second = (limiter_at(path, clock, burst=9, min_interval_s=0.2) for _ in range(2))
    assert [first.acquire(), second.acquire(), first.acquire()] == [0.0, 0.2, 0.2]


def test_another_rate_on_the_same_path_is_told_when_opening(path: Path, clock: FakeClock):
    limiter_at(path, clock)
    with pytest.raises(ValueError, match=r"per_minute=120\.0 .* asked for is per_minute=60\.0"):
        limiter_at(path, clock, per_minute=60)


def test_a_penalty_holds_up_every_sharer(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.penalise(10)
    assert second.acquire() == 10.0
    assert first.acquire() == 0.5  # no burst after it


def test_a_penalty_holds_up_those_who_already_wait(path: Path, clock: FakeClock):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    clock.meanwhile = lambda: second.penalise(10)
    assert first.acquire() == 10.0
    assert clock.slept_s == [0.5, 9.5]


def test_a_waiter_whose_timeout_does_not_reach_past_the_penalty_is_refused(
    path: Path, clock: FakeClock
):
    first, second = limiter_at(path, clock), limiter_at(path, clock)
    first.acquire(3)
    clock.meanwhile = lambda: second.penalise(10)
    with pytest.raises(LimiterTimeout, match=r"10\.000 s away, beyond timeout_s=5"):
        first.acquire(timeout_s=5)


async def test_a_coroutine_may_penalise(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    await limiter.penalise_async(2)
    assert await limiter.acquire_async() == 2.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_penalty_by_no_time_is_refused(path: Path, clock: FakeClock, seconds: float):
    with pytest.raises(ValueError, match="cannot penalise by retry_after_s="):
        limiter_at(path, clock).penalise(seconds)


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


def test_a_deletion_between_calls_that_need_not_wait_is_noticed(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock, per_minute=6_000_000, burst=1000)
    for _ in range(3):
        assert limiter.try_acquire()
    path.unlink()
    clock.now_ns += SECOND_NS
    limiter.try_acquire()
    assert path.exists()


def test_garbage_in_the_file_gives_no_second_burst(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    path.write_bytes(b"\xff" * 40)
    assert not limiter.try_acquire()
    clock.now_ns += SECOND_NS // 2
    assert limiter.try_acquire()


async def test_coroutines_come_back_on_a_timer_while_another_holds_the_file(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=3)
    holder = StateFile(path, limiter.rate, boottime_ns)
    assert holder.lock(blocking=False)
    waiters = [asyncio.create_task(limiter.acquire_async()) for _ in range(3)]
    late = asyncio.create_task(limiter.acquire_async(timeout_s=0.0))
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        await late
    assert not any(waiter.done() for waiter in waiters)
    holder.unlock()
    await asyncio.gather(*waiters)
    assert not limiter.try_acquire()  # the burst, no more: who left in time took nothing


def test_a_file_held_for_good_ends_in_a_timeout(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    holder = StateFile(path, limiter.rate, clock)
    assert holder.lock(blocking=False)
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        limiter.acquire(timeout_s=1.0)
    assert not limiter.try_acquire()
    holder.unlock()
    assert limiter.try_acquire()


async def test_a_coroutine_that_a_held_file_keeps_too_long_is_refused_and_counted(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=3)
    assert limiter.try_acquire()
    holder = StateFile(path, limiter.rate, boottime_ns)
    assert holder.lock(blocking=False)
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        await limiter.acquire_async(timeout_s=0.01, source="nq")
    holder.unlock()
    assert limiter.snapshot().sources["nq"].refused == 1
    assert await limiter.acquire_async(2, timeout_s=0.0) == 0.0  # the refused call took nothing


async def begin_waiting(*waiters: asyncio.Task[float]) -> None:
    """Until they have reserved: a tick to ask, one to reserve, one to sleep."""
    for _ in range(4):
        await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)


async def cancel(*waiters: asyncio.Task[float]) -> None:
    for waiter in waiters:
        waiter.cancel()
    for outcome in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError)


async def test_one_cancelled_before_the_grant_takes_nothing(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=2)
    waiter = asyncio.create_task(limiter.acquire_async())
    await asyncio.sleep(0)
    await cancel(waiter)
    assert limiter.try_acquire(2)


async def test_one_cancelled_after_its_batch_was_granted_is_counted(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=2)
    first = asyncio.create_task(limiter.acquire_async())
    second = asyncio.create_task(limiter.acquire_async())
    await asyncio.sleep(0)  # both have asked
    asyncio.get_running_loop().call_soon(second.cancel)
    await cancel(second)
    assert await first == 0.0
    assert (
        limiter.snapshot().abandoned + limiter.try_acquire() == 1
    )  # granted or not, none is lost unseen


async def test_the_last_slots_reserved_go_back_when_their_waiters_are_cancelled(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=1)
    other = FileRateLimiter(path, per_minute=1, burst=1)
    assert limiter.try_acquire()
    waiters = [asyncio.create_task(limiter.acquire_async()) for _ in range(5)]
    await begin_waiting(*waiters)
    await cancel(*waiters)
    with pytest.raises(LimiterTimeout, match=r"the next is (59\.9|60\.0)"):
        other.acquire(timeout_s=0.0)


async def test_a_cancelled_waiters_slot_is_used_by_the_next_caller_of_the_process(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=1)
    assert limiter.try_acquire()
    first = asyncio.create_task(limiter.acquire_async())
    second = asyncio.create_task(limiter.acquire_async())
    await begin_waiting(first, second)
    await cancel(first)  # another reserved after it
    third = asyncio.create_task(limiter.acquire_async(timeout_s=61.0))
    await begin_waiting(second, third)
    await cancel(second, third)


async def test_a_slot_that_nobody_could_use_is_counted(path: Path, clock: FakeClock):
    asleep = asyncio.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    limiter = FileRateLimiter(path, 60, 1, clock_ns=clock, sleep_async=sleep)
    assert limiter.try_acquire()
    waiter = asyncio.create_task(limiter.acquire_async())
    await asleep.wait()
    clock.now_ns += 10 * SECOND_NS
    await cancel(waiter)
    assert limiter.snapshot().abandoned == 1


async def test_coroutines_that_ask_together_reserve_in_the_order_they_asked(
    path: Path, clock: FakeClock
):
    limiter, passed = limiter_at(path, clock, burst=1), []

    async def call(name: int) -> None:
        await limiter.acquire_async()
        passed.append(name)

    await asyncio.gather(*(call(name) for name in range(20)))
    assert passed == list(range(20))


async def test_acquire_async_lets_the_loop_go_on_even_without_a_wait(path: Path):
    limiter, others = FileRateLimiter(path, per_minute=60, burst=10), []
    asyncio.get_running_loop().call_soon(others.append, "went on")
    await limiter.acquire_async()
    assert others == ["went on"]


def test_a_limiter_works_in_one_event_loop_after_another(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=3)
    assert [asyncio.run(limiter.acquire_async()) for _ in range(3)] == [0.0] * 3
    assert not limiter.try_acquire()


async def test_one_in_a_batch_whose_slot_is_too_late_is_refused_alone(path: Path):
    limiter = FileRateLimiter(path, per_minute=1, burst=2)
    outcomes = await asyncio.gather(
        *(limiter.acquire_async(timeout_s=0.0) for _ in range(4)), return_exceptions=True
    )
    assert outcomes[:2] == [0.0, 0.0]
    assert all(isinstance(outcome, LimiterTimeout) for outcome in outcomes[2:])


def test_a_storm_slows_an_adaptive_limiter_down_for_every_sharer(path: Path, clock: FakeClock):
    limiter = FileRateLimiter(path, 60, 1, adaptive=True, clock_ns=clock, sleep=clock.sleep)
    other = limiter_at(path, clock, per_minute=60, burst=1)
    for _ in range(3):
        limiter.penalise()
    assert [other.acquire() for _ in range(3)][:2] == [0.0, 2.0]


def test_without_adaptive_a_storm_changes_nothing(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock, per_minute=60, burst=1)
    for _ in range(9):
        limiter.penalise()
    assert [limiter.acquire() for _ in range(3)] == [0.0, 1.0, 1.0]


def test_an_adopted_rate_is_followed_by_all_who_have_the_file_open(path: Path, clock: FakeClock):
    first = limiter_at(path, clock, per_minute=60, burst=1)
    first.acquire()
    FileRateLimiter(path, 600, 1, on_config_change="adopt", clock_ns=clock)
    waits_s = [first.acquire() for _ in range(3)]
    assert waits_s[1:] == [pytest.approx(0.1), pytest.approx(0.1)]
    assert first.rate.per_minute == 600


def test_a_second_on_the_wall_clock_is_nobodys_business(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    limiter = FileRateLimiter(path, per_minute=1, burst=1)
    assert limiter.try_acquire()
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert not limiter.try_acquire()


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


def test_a_child_does_not_use_the_slots_that_its_parent_kept(path: Path):
    """Both would pass in one slot."""
    limiter = FileRateLimiter(path, per_minute=60, burst=1)

    async def cancel_the_first_of_two() -> None:
        limiter.acquire()
        waiters = [asyncio.ensure_future(limiter.acquire_async()) for _ in range(2)]
        while limiter.snapshot().waiting < 2:  # noqa: ASYNC110 - the waiters run meanwhile
            await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.gather(waiters[0], return_exceptions=True)
        assert len(limiter._left) == 1
        child = os.fork()
        if not child:
            os._exit(len(limiter._left))
        assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
        waiters[1].cancel()
        await asyncio.gather(waiters[1], return_exceptions=True)

    asyncio.run(cancel_the_first_of_two())


async def test_who_asks_after_a_cancelled_one_does_not_ask_with_it(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    asking = asyncio.ensure_future(limiter.acquire_async())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    clock.now_ns += SECOND_NS // 4
    assert await limiter.acquire_async(timeout_s=0.3) == 0.25


@pytest.mark.parametrize("n", [0, -1, 10**9, 10**30])
async def test_calls_of_more_than_a_year_are_refused(path: Path, clock: FakeClock, n: int):
    for shares in (None, {"nq": 1}):
        limiter = FileRateLimiter(path, 60, 5, shares=shares, on_config_change="adopt")
        with pytest.raises(ValueError, match=f"cannot acquire n={n}"):
            limiter.acquire(n, timeout_s=1)
        with pytest.raises(ValueError, match=f"cannot acquire n={n}"):
            await limiter.acquire_async(n)


def test_a_line_of_more_than_a_year_is_refused_and_harms_nobody(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock, per_minute=1)
    clock.meanwhile = lambda: limiter_at(path, clock, per_minute=1).acquire(300_000)
    with pytest.raises(OverflowError, match="more than a year away"):
        limiter.acquire(300_000)
    assert limiter.try_acquire(3)


def test_a_wait_without_end_may_be_said_in_two_ways(path: Path, clock: FakeClock):
    limiter = limiter_at(path, clock)
    limiter.acquire(3)
    assert limiter.acquire(timeout_s=float("inf")) == 0.5
    with pytest.raises(ValueError, match="timeout_s=nan"):
        limiter.acquire(timeout_s=float("nan"))


def test_threads_go_on_while_another_closes(path: Path):
    limiter = FileRateLimiter(path, per_minute=6e9, burst=10**6)
    errors: list[Exception] = []

    def call() -> None:
        try:
            for _ in range(3000):
                limiter.acquire()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        limiter.close()
    assert errors == []
    assert limiter.snapshot().granted == 9000
