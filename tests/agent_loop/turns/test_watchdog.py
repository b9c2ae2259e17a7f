"""Who is named as stuck, and how often."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from agent_loop import watchdog
from agent_loop.watchdog import Watchdog, following, start_for_all, waits_for
from tests.fakes.virtual_loop import run_virtual


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What `waits_for` reads, too."""
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_a_long_wait_is_named_with_whose_it_is_and_again_when_it_has_doubled(clock, caplog):
    dog = Watchdog(60.0, clock)
    named_at = []
    with caplog.at_level(logging.WARNING), dog.watch("nq", "nq:7"):
        waits_for("limiter", turn=2)
        for clock.now in range(1, 500):
            named_at += [clock.now] * len(dog.report())
    assert named_at == [60, 120, 240, 480]
    assert caplog.messages[0] == "stuck source=nq row_id=nq:7 turn=2 waits_for=limiter for_s=60"
    assert dog.report() == []


def test_whatever_goes_on_is_not_named(clock):
    dog = Watchdog(60.0, clock)
    with dog.watch("nq", "nq:7") as activity:
        for clock.now in range(0, 500, 50):
            waits_for("engine", turn=1 + clock.now // 50)
            assert dog.report() == []
    assert activity.turn == 10


def test_who_never_began_to_wait_is_named_since_the_start(clock):
    dog = Watchdog(60.0, clock)
    with dog.watch("nq", "nq:7"):
        clock.now = 61.0
        assert "turn=0 waits_for=start" in dog.report()[0]


def test_concurrent_trajectories_and_their_calls_do_not_mix(clock):
    dog = Watchdog(60.0, clock)

    async def call(what: str) -> None:
        await asyncio.sleep(1)
        waits_for(what)
        await asyncio.sleep(1)

    async def trajectory(source: str) -> None:
        with dog.watch(source, f"{source}:1"):
            waits_for("engine", turn=1)
            await asyncio.gather(call(f"tool of {source}"))

    async def both() -> list[str]:
        tasks = [asyncio.ensure_future(trajectory(source)) for source in ("nq", "math")]
        await asyncio.sleep(1.5)
        clock.now = 60.0
        lines = dog.report()
        await asyncio.gather(*tasks)
        return lines

    lines, _ = run_virtual(both())
    assert ["waits_for=tool of nq" in lines[0], "waits_for=tool of math" in lines[1]] == [True] * 2
    assert dog.under_way == {}


def test_an_inner_trajectory_gives_way_to_the_outer_one_and_none_may_be_there(clock):
    dog = Watchdog(60.0, clock)
    with dog.watch("outer", "o") as outer:
        with pytest.raises(ValueError), dog.watch("inner", "i") as inner:
            waits_for("tool")
            raise ValueError
        waits_for("engine")
    waits_for("nobody")
    assert (inner.waits_for, outer.waits_for) == ("tool", "engine")
    assert dog.under_way == {}


def test_it_looks_four_times_in_the_time_that_is_too_long():
    looks = []

    class Counting(Watchdog):
        def report(self) -> list[str]:
            looks.append(asyncio.get_running_loop().time())
            return []

    async def while_it_runs() -> None:
        task = asyncio.ensure_future(Counting(60.0).run())
        await asyncio.sleep(61)
        task.cancel()
        await asyncio.wait([task])

    run_virtual(while_it_runs())
    assert looks == [15, 30, 45, 60]


def test_work_for_all_is_what_those_wait_for_who_follow_it_and_nobody_else(clock):
    dog = Watchdog(60.0, clock)
    seen: list[tuple[str, str]] = []

    async def work() -> None:
        waits_for("limiter")
        await asyncio.sleep(2)
        waits_for("tool")

    async def together() -> None:
        async def trajectory(joins_at: float, leaves_at: float) -> None:
            with dog.watch("nq", "nq:7") as mine:
                await asyncio.sleep(joins_at)
                with following(activity):
                    await asyncio.sleep(0)
                    now = mine.waits_for
                    await asyncio.sleep(leaves_at - joins_at)
                if leaves_at < 2:
                    waits_for("engine")
                await asyncio.sleep(3 - leaves_at)
                seen.append((now, mine.waits_for))

        with dog.watch("math", "math:1") as starter:
            task, activity = start_for_all(work())
            await asyncio.gather(trajectory(0, 1), trajectory(1, 3), task)
        with following(activity):
            pass
        assert starter.waits_for == "start"

    run_virtual(together())
    assert seen == [("limiter", "engine"), ("limiter", "tool")]


def test_two_trajectories_may_wait_for_each_other_and_for_themselves(clock):
    dog = Watchdog(60.0, clock)
    with (
        dog.watch("nq", "nq:1") as one,
        dog.watch("nq", "nq:2") as two,
        following(one),
        following(two),
    ):
        two.followers.append(one)
        one.note("tool")
    assert (one.waits_for, two.waits_for) == ("tool", "tool")
