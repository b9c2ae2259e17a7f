"""Somebody deletes, copies or moves the state file, or puts something else at its path."""

import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rate_limit.file_limiter import FileRateLimiter
from rate_limit.slots import FileSlots
from rate_limit.state_file import MOST_SKEW_NS, wall_clock
from tests.rate_limit.fake_clock import SECOND_NS, FakeClock

FORK = multiprocessing.get_context("fork")
BURST = 5


def limiter_at(path: Path, clock: FakeClock, **options: object) -> FileRateLimiter:
    return FileRateLimiter(path, 60, BURST, clock_ns=clock, **options)  # pyright: ignore[reportArgumentType]


def passed(limiter: FileRateLimiter, tries: int = 3 * BURST, source: str = "") -> int:
    return sum(limiter.try_acquire(source=source) for _ in range(tries))


def remove_all(path: Path) -> None:
    """What `rm rate_limit.state*` does."""
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def test_after_rm_of_all_state_files_a_new_process_and_an_old_one_get_no_second_burst(
    tmp_path: Path,
):
    path, clock = tmp_path / "rate_limit.state", FakeClock()
    old = limiter_at(path, clock)
    assert passed(old) == BURST
    remove_all(path)
    new = limiter_at(path, clock)
    assert passed(new) + passed(old) == 0
    clock.now_ns += 2 * SECOND_NS
    assert passed(new) + passed(old) <= 2


def test_an_old_process_that_makes_the_deleted_file_again_remembers_its_calls(tmp_path: Path):
    path, clock = tmp_path / "folder" / "rate", FakeClock()
    old = limiter_at(path, clock)
    assert passed(old, 3) == 3
    shutil.rmtree(path.parent)
    assert passed(old) == BURST - 3
    assert passed(limiter_at(path, clock)) == 0


@pytest.mark.parametrize("shares", [None, {"nq": 1}], ids=["no shares", "shares"])
def test_old_content_that_is_copied_back_gives_no_second_burst(tmp_path: Path, shares: object):
    path, clock = tmp_path / "rate", FakeClock()
    old, copy = limiter_at(path, clock, shares=shares), tmp_path / "copy"
    shutil.copy(path, copy)
    first = passed(old)
    assert first
    shutil.copyfile(copy, path)
    assert passed(old) == 0
    assert passed(limiter_at(path, clock, shares=shares)) == 0


def test_a_pause_survives_old_content(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    limiter, copy = limiter_at(path, clock), tmp_path / "copy"
    shutil.copy(path, copy)
    limiter.penalise(90.0)
    shutil.copyfile(copy, path)
    assert passed(limiter) == 0
    assert (limiter.snapshot().penalties, limiter.snapshot().paused_s) == (1, 90.0)


def test_callers_that_wait_reserve_again_when_old_content_was_copied_back(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    copy, others = tmp_path / "copy", []

    def copy_back() -> None:
        shutil.copyfile(copy, path)
        others.append(limiter.acquire())  # reserves first

    limiter = FileRateLimiter(path, 60, BURST, clock_ns=clock, sleep=clock.sleep)
    shutil.copy(path, copy)
    limiter.acquire(BURST)
    clock.meanwhile = copy_back
    waited_s = limiter.acquire()
    assert (others, waited_s) == ([1.0], 2.0)


def test_an_older_copy_that_is_moved_in_lets_no_call_pass(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    first, second, copy = limiter_at(path, clock), limiter_at(path, clock), tmp_path / "copy"
    shutil.copy(path, copy)
    assert passed(first) == BURST
    copy.replace(path)
    assert passed(second) + passed(first) == 0  # the second knows what the first did


def test_an_older_copy_with_other_limits_gives_no_burst_of_those(tmp_path: Path):
    path, clock = tmp_path / "rate", FakeClock()
    FileRateLimiter(path, 60, 50, clock_ns=clock)
    copy = shutil.copy(path, tmp_path / "copy")
    limiter = limiter_at(path, clock, on_config_change="adopt")
    assert passed(limiter) == 0
    shutil.copyfile(copy, path)
    assert passed(limiter, 60) == 0


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["call", "copy out", "copy in", "move in", "remove", "wait"]),
            st.integers(1, BURST),
        ),
        min_size=3,
        max_size=25,
    )
)
@example(steps=[("call", BURST), ("copy in", 1), ("move in", 1), ("call", 1)])
def test_one_process_keeps_the_rate_whatever_is_done_to_its_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
):
    path, clock = tmp_path_factory.mktemp("state") / "rate", FakeClock()
    limiter, copy = limiter_at(path, clock), path.with_name("copy")
    shutil.copy(path, copy)
    calls: list[tuple[int, int]] = []
    for step, n in steps:
        if step == "call" and limiter.try_acquire(n):
            calls.append((clock.now_ns, n))
        elif step == "copy out" and path.exists():
            shutil.copy(path, copy)
        elif step == "copy in" and copy.exists():
            shutil.copyfile(copy, path)
        elif step == "move in" and copy.exists():
            copy.replace(path)
        elif step == "remove":
            remove_all(path)
        elif step == "wait":
            clock.now_ns += n * SECOND_NS // 2
    for first, (begin_ns, _) in enumerate(calls):
        for last in range(first, len(calls)):
            allowed = BURST + (calls[last][0] - begin_ns) / SECOND_NS
            assert sum(n for _, n in calls[first : last + 1]) <= allowed


def call_after(path: Path, turn: Connection) -> None:
    limiter = FileRateLimiter(path, 0.01, 100)
    turn.send(passed(limiter, 150))
    while turn.recv() == "again":
        turn.send(passed(limiter, 150))


@pytest.mark.parametrize("delete", [remove_all, lambda path: path.unlink()], ids=["all", "one"])
def test_processes_before_and_after_a_deletion_get_one_burst(
    tmp_path: Path, delete: Callable[[Path], None]
):
    path, turns, counts = tmp_path / "rate", [], []
    for _ in range(2):
        here, there = FORK.Pipe()
        process = FORK.Process(target=call_after, args=(path, there))
        process.start()
        counts.append(here.recv())
        delete(path)
        turns.append((here, process))
    for here, process in turns:
        here.send("again")
        counts.append(here.recv())
        here.send("end")
        process.join()
        assert process.exitcode == 0
    assert counts == [100, 0, 0, 0]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unbound:
        unbound.bind(str(path))


@pytest.mark.parametrize("name", ["rate", "rate.lock"])
@pytest.mark.parametrize(
    ("make", "words"),
    [(os.mkfifo, "is a FIFO"), (os.mkdir, "is a folder"), (make_socket, "not a regular file")],
    ids=["fifo", "folder", "socket"],
)
def test_what_is_no_file_is_refused_by_name_and_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[object], None],
    words: str,
):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make(name)
    with pytest.raises(OSError, match=f"cannot open state_file=.*{words}"):
        FileRateLimiter("rate", 60)
    with pytest.raises(OSError, match=f"cannot open slots_file=.*{words}"):
        FileSlots(name, 2)


@pytest.mark.parametrize("skew_s", [-60, 60])
def test_a_host_with_a_wrong_clock_may_not_share_a_file(tmp_path: Path, skew_s: int):
    right = wall_clock()
    FileRateLimiter(tmp_path / "rate", 60, BURST, across_hosts=True)
    with pytest.raises(RuntimeError, match=f"clock is {skew_s}.0 s ahead of the folder's"):
        FileRateLimiter(
            tmp_path / "rate",
            60,
            BURST,
            across_hosts=True,
            clock_ns=lambda: right() + skew_s * SECOND_NS,
        )
    assert MOST_SKEW_NS < 60 * SECOND_NS


def test_a_jump_of_the_wall_clock_lets_no_call_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    limiter = FileRateLimiter(tmp_path / "rate", 1, BURST, across_hosts=True)
    assert passed(limiter) == BURST
    monkeypatch.setattr("time.time_ns", lambda: 4 * 10**18)
    assert passed(limiter) == 0
