"""Slots between real processes: spawned, forked, stopped and killed at any moment."""

import asyncio
import errno
import multiprocessing
import os
import random
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from rate_limit.gcra import LimiterTimeout
from rate_limit.slots import FileSlots
from tests.rate_limit.slots_seen import in_use, waiting_in

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")
LONG_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slots"


class Process:
    """A forked process with a pipe to it; killed at the end, whatever happens."""

    def __init__(self, target: Callable[..., None], *args: object, context: Any = FORK):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*args, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(LONG_S), "nothing heard"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes."""
    started: list[Process] = []

    def start(target: Callable[..., None], *args: object, context: Any = FORK) -> Process:
        started.append(Process(target, *args, context=context))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.kill()
            each.pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with processes() as start:
        yield start


def until(condition: Callable[[], bool]) -> None:
    """Look again and again; the test's own timeout ends it."""
    while not condition():
        os.sched_yield()


class Inside:
    """How many hold a slot, and the most that ever did, over processes."""

    def __init__(self, context: Any):
        self.now: Synchronized[int] = context.Value("i", 0)
        self.most: Synchronized[int] = context.Value("i", 0)

    def enter(self) -> None:
        with self.now.get_lock():
            self.now.value += 1
            self.most.value = max(self.most.value, self.now.value)

    def leave(self) -> None:
        with self.now.get_lock():
            self.now.value -= 1


def hold_by_threads_and_tasks(
    slots: FileSlots, inside: Inside, times: int, report: Connection
) -> None:
    def thread() -> None:
        for _ in range(times):
            with slots:
                inside.enter()
                inside.leave()

    async def task() -> None:
        for _ in range(times):
            async with slots:
                inside.enter()
                await asyncio.sleep(0)
                inside.leave()

    async def tasks() -> None:
        await asyncio.gather(*(task() for _ in range(3)))

    threads = [threading.Thread(target=thread) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: asyncio.run(tasks())))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    report.send(5 * times)


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_processes_threads_and_tasks_never_hold_more_slots_than_there_are(
    path: Path, context: Any, start: Callable[..., Process]
):
    inside, slots = Inside(context), FileSlots(path, 2)
    running = [
        start(hold_by_threads_and_tasks, slots, inside, 20, context=context) for _ in range(4)
    ]
    assert sum(each.hear() for each in running) == 400
    assert 1 <= inside.most.value <= 2
    assert (in_use(slots), waiting_in(slots)) == (0, 0)


def hold_for_ever(slots: FileSlots, grants: "Synchronized[int]", report: Connection) -> None:
    while True:
        with slots, grants.get_lock():
            grants.value += 1


def come_late(path: Path, times: int, grants: "Synchronized[int]", report: Connection) -> None:
    in_line: list[int] = []

    def sleep(seconds: float) -> None:
        in_line.append(grants.value)
        select.select([], [], [], seconds)

    slots = FileSlots(path, 1, sleep=sleep)
    for _ in range(times):
        in_line.clear()
        with slots:
            report.send(grants.value - in_line[0] if in_line else 0)


def test_a_late_comer_gets_its_turn_after_those_before_it(
    path: Path, start: Callable[..., Process]
):
    slots, grants = FileSlots(path, 1), FORK.Value("i", 0)
    for _ in range(6):
        start(hold_for_ever, slots, grants)
    until(lambda: grants.value > 50)
    late = start(come_late, path, 10, grants)
    assert max(late.hear() for _ in range(10)) <= 6 + 4


def hold_and_tell(slots: FileSlots, report: Connection) -> None:
    with slots:
        report.send(os.getpid())
        report.recv()


def line_up(
    slots: FileSlots, start: Callable[..., Process], count: int
) -> tuple[Process, list[Process]]:
    """A holder of the only slot, and those who wait, in order."""
    holder = start(hold_and_tell, slots)
    holder.hear()
    waiting = []
    for number in range(1, count + 1):
        waiting.append(start(hold_and_tell, slots))
        until(lambda number=number: waiting_in(slots) == number)
    return holder, waiting


def served(waiting: list[Process]) -> list[int]:
    """In which order they get the slot; each gives it back at once."""
    order: list[int] = []
    left = {each.pipe: number for number, each in enumerate(waiting)}
    while left:
        ready, _, _ = select.select(list(left), [], [], LONG_S)
        assert ready, "nobody is served"
        for pipe in ready:
            assert pipe.recv()
            order.append(left.pop(pipe))
            pipe.send("go")
    return order


def test_processes_are_served_in_the_order_they_came(path: Path, start: Callable[..., Process]):
    slots = FileSlots(path, 1)
    holder, waiting = line_up(slots, start, 8)
    assert in_use(slots) == 1
    holder.pipe.send("go")
    assert served(waiting) == list(range(8))


@pytest.mark.parametrize("killed", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_killed_waiter_leaves_the_line(path: Path, start: Callable[..., Process], killed: int):
    slots = FileSlots(path, 1)
    holder, waiting = line_up(slots, start, 5)
    waiting.pop(killed).kill()
    assert waiting_in(slots) == 4
    holder.kill()
    assert served(waiting) == list(range(4))


def test_a_stopped_waiter_holds_up_nobody_for_long(path: Path, start: Callable[..., Process]):
    slots = FileSlots(path, 1)
    holder, (stopped, *waiting) = line_up(slots, start, 4)
    os.kill(stopped.process.pid or 0, signal.SIGSTOP)
    holder.pipe.send("go")
    assert sorted(served(waiting)) == [0, 1, 2]
    os.kill(stopped.process.pid or 0, signal.SIGCONT)
    assert stopped.hear() == stopped.process.pid


def test_the_slot_of_a_killed_holder_is_free(path: Path, start: Callable[..., Process]):
    slots = FileSlots(path, 1)
    holder = start(hold_and_tell, slots)
    holder.hear()
    with pytest.raises(LimiterTimeout), slots.hold(timeout_s=0.0):
        pass
    holder.kill()
    with slots.hold(timeout_s=0.0):
        pass


def hold_by_tasks_for_ever(
    slots: FileSlots, grants: "Synchronized[int]", report: Connection
) -> None:
    async def task() -> None:
        while True:
            async with slots:
                grants.value += 1
                await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(*(task() for _ in range(3)))

    asyncio.run(tasks())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_kills_under_load_leave_all_slots_free(path: Path, kills: int):
    slots, chance = FileSlots(path, 3), random.Random(7)
    grants = FORK.Value("i", 0, lock=False)  # a killed process must not keep its lock
    with processes() as start:
        running = [start(hold_by_tasks_for_ever, slots, grants) for _ in range(6)]
        for _ in range(kills):
            victim = running.pop(chance.randrange(len(running)))
            victim.kill()
            victim.pipe.close()
            running.append(start(hold_by_tasks_for_ever, slots, grants))
            before = grants.value
            until(lambda before=before: grants.value != before)
            assert in_use(slots) <= 3
    assert (in_use(slots), waiting_in(slots)) == (0, 0)
    with slots.hold(0.0), slots.hold(0.0), slots.hold(0.0):
        assert in_use(slots) == 3


def hold_a_slot_and_fork(slots: FileSlots, report: Connection) -> None:
    with slots:
        child = os.fork()
        if child == 0:
            signal.pause()
        report.send(child)
        signal.pause()


def test_the_slot_of_a_killed_holder_is_free_even_while_its_forked_child_lives(
    path: Path, start: Callable[..., Process]
):
    slots = FileSlots(path, 1)
    holder = start(hold_a_slot_and_fork, slots)
    child = holder.hear()
    try:
        holder.kill()
        with slots.hold(timeout_s=LONG_S):
            os.kill(child, 0)  # still there
    finally:
        os.kill(child, signal.SIGKILL)


def leave_the_parents_block(slots: FileSlots, report: Connection) -> None:
    slots.__exit__(None, None, None)
    report.send(in_use(slots))


def test_a_forked_child_does_not_give_back_its_parents_slot(
    path: Path, start: Callable[..., Process]
):
    slots = FileSlots(path, 1)
    with slots:
        assert start(leave_the_parents_block, slots).hear() == 1
        assert in_use(slots) == 1
    assert in_use(slots) == 0


def hold_two_of_three(slots: FileSlots, report: Connection) -> None:
    with slots.hold(0.0), slots.hold(0.0):
        try:
            with slots.hold(0.0):
                report.send("a third")
        except LimiterTimeout:
            report.send(in_use(slots))


def test_a_forked_child_has_a_handle_of_its_own(path: Path, start: Callable[..., Process]):
    slots = FileSlots(path, 3)
    with slots:  # a free handle is inherited too: its locks would not exclude ours
        pass
    with slots:
        child = start(hold_two_of_three, slots)
        assert child.hear() == 3
        child.process.join()
        assert in_use(slots) == 1


def hold_what_the_parent_waits_for(slots: FileSlots, report: Connection) -> None:
    report.send(waiting_in(slots))
    with slots:
        report.send("held")


def test_a_forked_child_stands_in_no_line_of_its_parent(path: Path, start: Callable[..., Process]):
    slots, holder = FileSlots(path, 1), FileSlots(path, 1)

    def wait() -> None:
        with slots:
            pass

    with holder:
        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: waiting_in(holder) == 1)
        child = start(hold_what_the_parent_waits_for, slots)
        assert child.hear() == 1
    waiter.join()
    assert child.hear() == "held"


def open_as_nobody(folder: Path, report: Connection) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        FileSlots(folder / "slots", 1)
    except OSError as error:
        report.send((error.errno, type(error), str(error)))


def test_a_folder_one_may_not_write_to_is_an_error(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
):
    number, kind, words = start(open_as_nobody, Path("/usr")).hear()
    assert (number, kind) == (errno.EACCES, PermissionError)
    assert "cannot open slots_file='/usr/slots': this user may not write there; use a" in words


def open_without_room(path: Path, report: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        FileSlots(path, 1)
    except OSError as error:
        report.send((error.errno, str(error)))


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    path: Path, start: Callable[..., Process]
):
    number, words = start(open_without_room, path).hear()
    assert number == errno.EFBIG
    assert f"cannot open slots_file='{path}': " in words
    assert list(path.parent.iterdir()) == []
