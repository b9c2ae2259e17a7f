"""The limiter and the slots between real processes: spawned, forked and killed."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout, boottime_ns
from rate_limit.gcra import Rate
from rate_limit.slots import FileSlots
from rate_limit.state_file import StateFile

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


def try_often(limiter: FileRateLimiter, tries: int, report: Connection) -> None:
    report.send(sum(limiter.try_acquire() for _ in range(tries)))


def acquire_often(limiter: FileRateLimiter, times: int, report: Connection) -> None:
    for _ in range(times):
        limiter.acquire()
    report.send(times)


def run_all(context: Any, target: Any, processes: int, *args: object) -> int:
    """Sum of what each process reports."""
    receiver, sender = context.Pipe(duplex=False)
    running = [context.Process(target=target, args=(*args, sender)) for _ in range(processes)]
    for process in running:
        process.start()
    total = sum(receiver.recv() for _ in running)
    for process in running:
        process.join()
        assert process.exitcode == 0
    return total


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_processes_together_get_no_more_than_burst_plus_rate_times_time(
    tmp_path: Path, context: Any
):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60_000, burst=20)
    began_ns = boottime_ns()
    passed = run_all(context, try_often, 4, limiter, 1000)
    took_ns = boottime_ns() - began_ns
    assert 20 <= passed <= 20 + took_ns / limiter.rate.emission_interval_ns


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_processes_that_wait_are_served_at_the_rate(tmp_path: Path, context: Any):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60_000, burst=5)
    began_ns = boottime_ns()
    assert run_all(context, acquire_often, 4, limiter, 50) == 200
    took_ns = boottime_ns() - began_ns
    assert took_ns >= (200 - 5) * limiter.rate.emission_interval_ns


def hold_the_file(path: Path, rate: Rate, report: Connection) -> None:
    file = StateFile(path, rate)
    file.lock(blocking=True)
    report.send(os.getpid())
    signal.pause()


def test_a_killed_holder_of_the_file_holds_up_nobody(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=5)
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold_the_file, args=(limiter.path, limiter.rate, sender))
    holder.start()
    receiver.recv()
    with pytest.raises(LimiterTimeout, match="another process holds it"):
        limiter.acquire(timeout_s=0.0)
    holder.kill()
    holder.join()
    assert limiter.acquire(timeout_s=0.0) == 0.0


def call_for_ever(limiter: FileRateLimiter, report: Connection) -> None:
    report.send(os.getpid())
    while True:
        limiter.try_acquire()


def test_callers_killed_at_any_moment_leave_a_sound_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=6_000_000, burst=1000)
    for _ in range(15):
        receiver, sender = FORK.Pipe(duplex=False)
        caller = FORK.Process(target=call_for_ever, args=(limiter, sender))
        caller.start()
        receiver.recv()
        for _ in range(20):
            limiter.try_acquire()
        caller.kill()
        caller.join()
        limiter.acquire(timeout_s=10.0)
    assert caplog.records == []


def lock_twice(file: StateFile, turn: Connection) -> None:
    turn.send(file.lock(blocking=False))
    turn.recv()
    turn.send(file.lock(blocking=False))
    turn.recv()


def test_a_forked_child_does_not_share_its_parents_lock(tmp_path: Path):
    file = StateFile(tmp_path / "rate", Rate(per_minute=60, burst=1))
    assert file.lock(blocking=False)
    here, there = FORK.Pipe()
    child = FORK.Process(target=lock_twice, args=(file, there))
    child.start()
    assert here.recv() is False
    file.unlock()
    here.send("unlocked")
    assert here.recv() is True
    assert not file.lock(blocking=False)
    here.send("end")
    child.join()
    assert file.lock(blocking=False)


def hold_and_count(
    slots: FileSlots,
    inside: "Synchronized[int]",
    most: "Synchronized[int]",
    times: int,
    report: Connection,
) -> None:
    for _ in range(times):
        with slots:
            with inside.get_lock():
                inside.value += 1
                most.value = max(most.value, inside.value)
            with inside.get_lock():
                inside.value -= 1
    report.send(times)


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_processes_never_hold_more_slots_than_there_are(tmp_path: Path, context: Any):
    inside, most = context.Value("i", 0), context.Value("i", 0)
    slots = FileSlots(tmp_path / "slots", 2)
    assert run_all(context, hold_and_count, 4, slots, inside, most, 60) == 240
    assert 1 <= most.value <= 2


def hold_a_slot(slots: FileSlots, report: Connection) -> None:
    with slots:
        report.send(os.getpid())
        signal.pause()


def test_the_slot_of_a_killed_holder_is_free(tmp_path: Path):
    slots = FileSlots(tmp_path / "slots", 1)
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold_a_slot, args=(slots, sender))
    holder.start()
    receiver.recv()
    with pytest.raises(LimiterTimeout), slots.hold(timeout_s=0.0):
        pass
    holder.kill()
    holder.join()
    with slots.hold(timeout_s=0.0):
        pass


def hold_a_slot_and_fork(slots: FileSlots, report: Connection) -> None:
    with slots:
        child = os.fork()
        if child == 0:
            signal.pause()
        report.send(child)
        signal.pause()


def test_the_slot_of_a_killed_holder_is_free_even_while_its_forked_child_lives(tmp_path: Path):
    slots = FileSlots(tmp_path / "slots", 1)
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold_a_slot_and_fork, args=(slots, sender))
    holder.start()
    child = receiver.recv()
    try:
        holder.kill()
        holder.join()
        with slots.hold(timeout_s=10.0):
            os.kill(child, 0)  # still there
    finally:
        os.kill(child, signal.SIGKILL)


def leave_the_parents_block(slots: FileSlots, report: Connection) -> None:
    slots.__exit__(None, None, None)
    report.send(0)


def test_a_forked_child_does_not_give_back_its_parents_slot(tmp_path: Path):
    slots = FileSlots(tmp_path / "slots", 1)
    with slots:
        run_all(FORK, leave_the_parents_block, 1, slots)
        with pytest.raises(LimiterTimeout), slots.hold(timeout_s=0.0):
            pass
