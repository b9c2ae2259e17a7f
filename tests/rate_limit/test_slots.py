"""Slots: never more at once than there are, given back on every way out."""

import asyncio
import errno
import fcntl
import logging
import os
import pickle
import random
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rate_limit.gcra import LimiterTimeout
from rate_limit.queues import CallerQueue, TaskPlace, ThreadPlace
from rate_limit.slots import FileSlots
from tests.rate_limit.slots_seen import in_use, waiting_in


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def free_slots(slots: FileSlots) -> int:
    held = []
    try:
        while True:
            slot = slots.hold(timeout_s=0.0)
            slot.__enter__()
            held.append(slot)
    except LimiterTimeout:
        return len(held)
    finally:
        for slot in held:
            slot.__exit__(None, None, None)


def test_there_are_as_many_slots_as_asked_for(path: Path):
    assert free_slots(FileSlots(path, 5)) == 5


def test_sharers_of_a_file_share_its_slots(path: Path):
    first, second = FileSlots(path, 3), FileSlots(path, 3)
    with first, second.hold():
        assert free_slots(first) == free_slots(second) == 1
    assert free_slots(first) == 3


def test_a_free_slot_costs_no_wait(path: Path):
    with FileSlots(path, 1) as waited_s:
        assert waited_s == 0.0


def test_a_slot_is_given_back_when_the_body_raises(path: Path):
    slots = FileSlots(path, 1)
    with pytest.raises(KeyError), slots:
        raise KeyError
    with pytest.raises(KeyError), slots.hold():
        raise KeyError
    assert free_slots(slots) == 1


def test_a_wait_ends_when_a_slot_comes_free(path: Path):
    held = FileSlots(path, 1)
    held.__enter__()
    now, slept_s = [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept_s.append(seconds)
        if len(slept_s) == 3:
            held.__exit__(None, None, None)

    with FileSlots(path, 1, clock=lambda: now[0], sleep=sleep) as waited_s:
        assert waited_s == pytest.approx(sum(slept_s))
    assert slept_s == [0.001, 0.002, 0.002]


def test_a_timeout_says_which_slots(path: Path):
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    slots = FileSlots(path, 2, clock=lambda: now[0], sleep=sleep)
    with (
        slots,
        slots,
        pytest.raises(LimiterTimeout, match=r"slots=2 at .* within timeout_s=0\.5"),
        slots.hold(timeout_s=0.5),
    ):
        pass
    assert now[0] == pytest.approx(100.5)
    assert free_slots(slots) == 2


async def test_tasks_of_one_loop_never_hold_more_than_there_are(path: Path):
    slots, inside, most = FileSlots(path, 3), 0, 0

    async def work(own_timeout: bool) -> None:
        nonlocal inside, most
        async with slots.hold_async(timeout_s=60) if own_timeout else slots:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work(turn % 2 == 0) for turn in range(20)))
    assert most == 3
    assert free_slots(slots) == 3


async def test_a_cancelled_waiter_takes_no_slot(path: Path):
    slots = FileSlots(path, 1)
    async with slots:
        waiter = asyncio.create_task(slots.__aenter__())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    assert free_slots(slots) == 1


async def test_a_coroutine_waits_no_longer_than_its_timeout(path: Path):
    slots = FileSlots(path, 1)
    async with slots:
        with pytest.raises(LimiterTimeout):
            async with slots.hold_async(timeout_s=0.0):
                pass


def test_pickled_slots_are_the_same_slots(path: Path):
    slots = FileSlots(path, 2)
    with pickle.loads(pickle.dumps(slots)):
        assert free_slots(slots) == 1


def test_another_number_on_the_same_path_is_an_error_that_names_both(path: Path):
    FileSlots(path, 2)
    with pytest.raises(ValueError, match=r"slots=3 at .* the file is for slots=2"):
        FileSlots(path, 3)


@pytest.mark.parametrize("content", [b"", b"slots=", b"slots=x\n", b"rubble"])
def test_a_broken_file_is_written_anew_and_keeps_its_holders(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
):
    slots = FileSlots(path, 2)
    with slots, caplog.at_level(logging.WARNING, logger="rate_limit"):
        path.write_bytes(content)
        assert free_slots(FileSlots(path, 2)) == 1
    assert len(caplog.records) == 1
    assert path.read_bytes() == b"slots=2\n"


def test_a_deleted_file_is_made_again(path: Path):
    now = [100.0]
    slots = FileSlots(path, 2, clock=lambda: now[0])
    with slots:
        path.unlink()
        now[0] += 0.05
        with slots:
            assert in_use(slots) == 1
    assert free_slots(slots) == 2
    assert path.read_bytes() == b"slots=2\n"


def test_a_replaced_file_is_noticed_by_who_waits(path: Path):
    now, slept_s = [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept_s.append(seconds)
        assert waiting_in(holder) == 1
        path.with_name("another").write_bytes(b"slots=1\n")
        path.with_name("another").replace(path)

    holder = FileSlots(path, 1)
    with holder, FileSlots(path, 1, clock=lambda: now[0], sleep=sleep):
        assert in_use(holder) == 1
    assert slept_s == [0.001]
    assert (in_use(holder), waiting_in(holder)) == (0, 0)


def test_handles_do_not_grow_in_number_with_holds_and_deletions(path: Path):
    slots = FileSlots(path, 8, clock=count().__next__)
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with slots:
            path.unlink()
            assert in_use(slots) == 0
            with slots, slots, slots:
                assert in_use(slots) == 3
    assert len(os.listdir("/proc/self/fd")) == handles


def test_no_slots_at_all_are_refused(path: Path):
    with pytest.raises(ValueError, match="need at least 1"):
        FileSlots(path, 0)


async def stand_in_line(slots: FileSlots, log: list[str], name: str) -> None:
    async with slots:
        log.append(name)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Turns:
    """A clock for several sleepers: time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept_s: list[float] = []
        self._sleepers: list[asyncio.Event] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._sleepers.append(asyncio.Event())
        await self._sleepers[-1].wait()

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and everybody look once."""
        self.now += seconds
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.set()
        await settle()


async def test_sharers_are_served_in_the_order_they_came(path: Path):
    turns, log = Turns(), []
    sharers = [FileSlots(path, 1, clock=turns, sleep_async=turns.sleep) for _ in range(4)]
    async with FileSlots(path, 1):
        tasks = []
        for name, slots in zip("abcd", sharers, strict=True):
            tasks.append(asyncio.create_task(stand_in_line(slots, log, name)))
            await settle()
        assert turns.slept_s == [0.001, 0.002, 0.004, 0.006]
        assert waiting_in(sharers[0]) == 4
    for _ in range(8):
        await turns.pass_s(0.001)
    assert log == ["a", "b", "c", "d"]
    assert waiting_in(sharers[0]) == 0
    await asyncio.gather(*tasks)


async def test_a_newcomer_takes_no_free_slot_past_the_line(path: Path):
    turns, log = Turns(), []
    first = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    newcomer = FileSlots(path, 1)
    async with FileSlots(path, 1):
        task = asyncio.create_task(stand_in_line(first, log, "first"))
        await settle()
    with pytest.raises(LimiterTimeout), newcomer.hold(timeout_s=0.0):
        pass
    await turns.pass_s(0.001)
    await task
    with newcomer.hold(timeout_s=0.0):
        pass


async def test_a_stopped_first_in_line_is_passed_over_until_it_is_gone(
    path: Path, caplog: pytest.LogCaptureFixture
):
    turns, stopped, log = Turns(), Turns(), []
    waiter = FileSlots(path, 1, clock=stopped, sleep_async=stopped.sleep)
    behind = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    async with FileSlots(path, 1):
        tasks = [asyncio.create_task(stand_in_line(waiter, log, "stopped"))]
        await settle()
        tasks.append(asyncio.create_task(stand_in_line(behind, log, "behind")))
        await settle()
        await turns.pass_s(10.0)
    await turns.pass_s(0.1)
    await turns.pass_s(0.1)
    assert log == []
    await turns.pass_s(0.11)
    assert log == ["behind"]
    assert "passed_over=0" in caplog.text
    with behind.hold(timeout_s=0.0):  # it is known now
        assert waiting_in(behind) == 1
    await stopped.pass_s(0.001)
    assert log == ["behind", "stopped"]
    await asyncio.gather(*tasks)

    with behind.hold(timeout_s=0.0):
        assert waiting_in(behind) == 0
    async with FileSlots(path, 1):  # the same place in line, and it counts again
        task = asyncio.create_task(stand_in_line(waiter, log, "awake"))
        await settle()
    with pytest.raises(LimiterTimeout), behind.hold(timeout_s=0.0):
        pass
    await stopped.pass_s(0.001)
    await task
    assert waiting_in(behind) == 0


async def test_many_waiting_tasks_cost_one_handle_and_one_poller(path: Path):
    turns, log = Turns(), []
    slots = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    handles = len(os.listdir("/proc/self/fd"))
    async with slots:
        tasks = [
            asyncio.create_task(stand_in_line(slots, log, str(number))) for number in range(1000)
        ]
        await settle()
        assert len(os.listdir("/proc/self/fd")) == handles
        assert waiting_in(slots) == 1
        await turns.pass_s(0.001)
        assert turns.slept_s == [0.001, 0.002]
    await turns.pass_s(0.002)
    await asyncio.gather(*tasks)
    assert log == [str(number) for number in range(1000)]
    assert turns.slept_s == [0.001, 0.002]


async def test_who_gives_up_leaves_the_place_in_the_file_to_the_next(path: Path):
    turns, log = Turns(), []
    ours = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    theirs = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    async with FileSlots(path, 1):
        tasks = []
        for slots, name in [(ours, "gives up"), (theirs, "theirs"), (ours, "ours")]:
            tasks.append(asyncio.create_task(stand_in_line(slots, log, name)))
            await settle()
        tasks.pop(0).cancel()
        await settle()
        assert waiting_in(ours) == 2
    for _ in range(4):
        await turns.pass_s(0.002)
    assert log == ["ours", "theirs"]
    await asyncio.gather(*tasks)


async def test_sharers_take_turns_however_many_wait_in_each(path: Path):
    turns, log = Turns(), []
    ours = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    theirs = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    async with FileSlots(path, 1):
        tasks = []
        for slots, name in [(ours, "ours"), (ours, "ours"), (theirs, "theirs"), (theirs, "theirs")]:
            tasks.append(asyncio.create_task(stand_in_line(slots, log, name)))
            await settle()
    for _ in range(8):
        await turns.pass_s(0.002)
    assert log == ["ours", "theirs", "ours", "theirs"]
    await asyncio.gather(*tasks)


async def test_who_is_not_first_keeps_to_its_own_timeout(path: Path):
    turns = Turns()
    slots = FileSlots(path, 1, clock=turns, sleep_async=turns.sleep)
    async with slots:
        first = asyncio.create_task(stand_in_line(slots, [], "first"))
        await settle()
        second = asyncio.create_task(slots.hold_async(timeout_s=1e-6).__aenter__())
        await settle()
        turns.now += 1.0
        with pytest.raises(LimiterTimeout):
            await second
    await turns.pass_s(0.001)
    await first


@given(seed=st.integers(0, 2**32), tasks=st.integers(1, 30), count=st.integers(1, 4))
def test_cancelled_at_any_moment_a_waiter_loses_neither_slot_nor_turn(
    tmp_path_factory: pytest.TempPathFactory, seed: int, tasks: int, count: int
):
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("slots") / "slots"
    sharers = [FileSlots(path, count, sleep_async=lambda _: asyncio.sleep(0)) for _ in range(3)]
    inside, most = 0, 0

    async def work(slots: FileSlots, turns: int) -> None:
        nonlocal inside, most
        async with slots:
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    async def load() -> None:
        running = [
            asyncio.create_task(work(chance.choice(sharers), chance.randrange(6)))
            for _ in range(tasks)
        ]
        for task in chance.sample(running, chance.randrange(tasks + 1)):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)

    asyncio.run(load())
    assert most <= count
    assert (in_use(sharers[0]), waiting_in(sharers[0])) == (0, 0)
    assert free_slots(sharers[0]) == count


def test_threads_and_tasks_of_several_loops_share_one_line(path: Path):
    slots, mutex = FileSlots(path, 2), threading.Lock()
    inside, most, done = 0, 0, 0

    def enter(by: int) -> None:
        nonlocal inside, most, done
        with mutex:
            inside += by
            most = max(most, inside)
            done += by < 0

    async def work() -> None:
        async with slots:
            enter(1)
            await asyncio.sleep(0)
            enter(-1)

    async def tasks() -> None:
        await asyncio.gather(*(work() for _ in range(30)))

    def thread() -> None:
        for _ in range(30):
            with slots:
                enter(1)
                enter(-1)

    threads = [threading.Thread(target=thread) for _ in range(4)]
    threads += [threading.Thread(target=lambda: asyncio.run(tasks())) for _ in range(3)]
    for running in threads:
        running.start()
    for running in threads:
        running.join()
    assert 1 <= most <= 2
    assert done == 7 * 30
    assert (in_use(slots), waiting_in(slots)) == (0, 0)


def test_a_place_whose_loop_is_closed_makes_room_for_the_next():
    async def place() -> TaskPlace:
        return TaskPlace()

    line, first, last = CallerQueue(), ThreadPlace(), ThreadPlace()
    closed = asyncio.run(place())
    for each in (first, closed, last):
        line.join(each)
    line.leave(first)
    assert line.first is last
    line.leave(closed)
    line.leave(last)
    assert line.first is None


def test_another_users_file_is_refused(path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path.write_bytes(b"slots=2\n")
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match=r"slots_file=.*: it belongs to uid=") as e:
        FileSlots(path, 2)
    assert e.value.errno == errno.EPERM


def test_a_symbolic_link_is_refused_in_a_folder_anyone_may_write_to(path: Path):
    target = path.with_name("target")
    FileSlots(target, 2)
    path.symlink_to(target)
    with FileSlots(path, 2):  # a folder of our own: no harm
        assert in_use(FileSlots(target, 2)) == 1
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="it is a symbolic link in a folder that anyone") as e:
        FileSlots(path, 2)
    assert e.value.errno == errno.ELOOP


def test_a_symbolic_link_to_nowhere_is_an_error(path: Path):
    path.symlink_to(path.with_name("nowhere"))
    with pytest.raises(FileNotFoundError, match="cannot open slots_file="):
        FileSlots(path, 2)


def test_a_file_system_without_locks_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*args: Any) -> Any:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    with pytest.raises(OSError, match="has no locks; use a folder on a local disk") as e:
        FileSlots(path, 2)
    assert e.value.errno == errno.ENOLCK


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, OSError, "the disk is full"),
        (errno.EROFS, OSError, "the file system is read-only"),
        (errno.EACCES, PermissionError, "may not write there"),
    ],
)
def test_a_file_that_cannot_be_made_is_an_error_of_its_kind(
    path: Path, number: int, kind: type[OSError], words: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(kind, match=words) as e:
        FileSlots(path, 2)
    assert e.value.errno == number
    assert list(path.parent.iterdir()) == []
