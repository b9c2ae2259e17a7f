"""The limiter between real processes: spawned, forked and killed."""

import asyncio
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout, boottime_ns
from rate_limit.gcra import Rate
from rate_limit.state_file import StateFile

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

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
    assert 20 <= passed <= 20 + took_ns / limiter.rate.for_calls_ns(1)


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_processes_that_wait_are_served_at_the_rate(tmp_path: Path, context: Any):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60_000, burst=5)
    began_ns = boottime_ns()
    assert run_all(context, acquire_often, 4, limiter, 50) == 200
    took_ns = boottime_ns() - began_ns
    assert took_ns >= limiter.rate.for_calls_ns(200 - 5)


def hold_the_file(path: Path, rate: Rate, report: Connection) -> None:
    file = StateFile(path, rate, boottime_ns)
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


def lock_twice(file: StateFile, turn: Connection) -> None:
    turn.send(file.lock(blocking=False))
    turn.recv()
    turn.send(file.lock(blocking=False))
    turn.recv()


def test_a_forked_child_does_not_share_its_parents_lock(tmp_path: Path):
    file = StateFile(tmp_path / "rate", Rate(per_minute=60, burst=1), boottime_ns)
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


def open_and_try(path: Path, begin: "Event", report: Connection) -> None:
    begin.wait()
    limiter = FileRateLimiter(path, per_minute=0.01, burst=100)
    report.send(sum(limiter.try_acquire() for _ in range(2)))


@pytest.mark.slow
def test_256_processes_that_start_at_once_on_a_missing_file_get_one_burst(tmp_path: Path):
    begin = FORK.Event()
    receiver, sender = FORK.Pipe(duplex=False)
    running = [
        FORK.Process(target=open_and_try, args=(tmp_path / "folder" / "rate", begin, sender))
        for _ in range(256)
    ]
    for process in running:
        process.start()
    begin.set()
    assert sum(receiver.recv() for _ in running) == 100
    for process in running:
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [80, pytest.param(1000, marks=pytest.mark.nightly)])
def test_callers_killed_at_random_moments_never_exceed_the_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: int
):
    rng, kills = random.Random(7), 0
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=600_000, burst=wanted)
    began_ns = boottime_ns()
    while kills < wanted:
        receiver, sender = FORK.Pipe(duplex=False)
        callers = [
            FORK.Process(target=call_for_ever, args=(limiter, sender))
            for _ in range(min(8, wanted - kills))
        ]
        for caller in callers:
            caller.start()
        for _ in callers:
            receiver.recv()
        rng.shuffle(callers)
        for caller in callers:
            for _ in range(rng.randrange(20)):
                limiter.try_acquire()
            caller.kill()
            kills += 1
        for caller in callers:
            caller.join()
        limiter.acquire(timeout_s=10.0)  # nobody is stuck
    took_ns = boottime_ns() - began_ns
    file = StateFile(limiter.path, limiter.rate, boottime_ns)
    assert file.lock(blocking=False)
    granted = file.read().granted
    assert kills < granted <= wanted + took_ns / limiter.rate.for_calls_ns(1)
    assert caplog.records == []


async def test_a_stopped_holder_stalls_no_event_loop(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=5)
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold_the_file, args=(limiter.path, limiter.rate, sender))
    holder.start()
    receiver.recv()
    os.kill(holder.pid or 0, signal.SIGSTOP)
    try:
        waiters = [asyncio.create_task(limiter.acquire_async()) for _ in range(3)]
        for _ in range(50):
            await asyncio.sleep(0.001)  # the loop goes on; what it waits for does not
            assert not any(waiter.done() for waiter in waiters)
        with pytest.raises(LimiterTimeout, match="look for a stopped one"):
            await limiter.acquire_async(timeout_s=0.01)
    finally:
        holder.kill()  # a stopped process dies of it too
        holder.join()
    await asyncio.gather(*waiters)


def call_as_another_user(path: Path, report: Connection) -> None:
    os.setuid(65534)
    try:
        FileRateLimiter(path, per_minute=60, burst=5)
    except PermissionError as error:
        report.send(str(error))
    else:
        report.send("opened")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_another_user_is_told_whose_file_it_is(tmp_path: Path, mode: int):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own lets nobody else in
    try:
        folder.chmod(mode)
        FileRateLimiter(folder / "rate", per_minute=60, burst=5)
        receiver, sender = FORK.Pipe(duplex=False)
        other = FORK.Process(target=call_as_another_user, args=(folder / "rate", sender))
        other.start()
        message = receiver.recv()
        other.join()
    finally:
        shutil.rmtree(folder)
    assert "belongs to uid=0, this process runs as uid=65534" in message


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("16k")


def test_a_full_disk_is_named_and_leaves_nothing_behind(small_disk: Path):
    with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(OSError, match=r"cannot open state_file=.*; make room") as caught:
        FileRateLimiter(small_disk / "rate", per_minute=60, burst=5)
    assert caught.value.errno == errno.ENOSPC
    assert not list(small_disk.glob("*.tmp"))
    (small_disk / "filler").unlink()
    assert FileRateLimiter(small_disk / "rate", per_minute=60, burst=5).try_acquire(5)


def test_a_disk_that_fills_up_later_does_not_matter(small_disk: Path):
    limiter = FileRateLimiter(small_disk / "rate", per_minute=1, burst=5)
    with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    assert limiter.try_acquire(5)
    assert not limiter.try_acquire()


def test_a_read_only_disk_is_named(small_disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"cannot open state_file=.*use a folder that can be"):
        FileRateLimiter(small_disk / "rate", per_minute=60, burst=5)


TIME_NAMESPACE = ["unshare", "--time", "--boottime", "1000000", "--fork"]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*TIME_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no time namespaces here",
)
def test_a_container_with_another_boot_time_shares_the_rate(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=1, burst=3)
    limiter.acquire()
    program = (
        "import sys; from rate_limit.file_limiter import FileRateLimiter; "
        "limiter = FileRateLimiter(sys.argv[1], per_minute=1, burst=3); "
        "print(sum(limiter.try_acquire() for _ in range(5)))"
    )
    command = [*TIME_NAMESPACE, sys.executable, "-c", program, str(limiter.path)]
    root = Path(__file__).parents[2]
    inside = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert inside.stdout.split() == ["2"]
    assert not limiter.try_acquire()


def test_a_program_started_from_here_inherits_no_lock(tmp_path: Path):
    limiter = FileRateLimiter(tmp_path / "rate", per_minute=60, burst=3)
    limiter.acquire()
    file = limiter._file
    assert file.lock(blocking=True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        file.unlock()
        limiter.close()
        names = [
            os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")
        ]
        assert not [name for name in names if name.startswith(str(tmp_path))]
        assert limiter.try_acquire()
