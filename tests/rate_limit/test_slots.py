"""Slots: never more at once than there are, given back on every way out."""

import asyncio
import logging
import pickle
from pathlib import Path

import pytest

from rate_limit.file_limiter import LimiterTimeout
from rate_limit.slots import FileSlots


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
    assert slept_s == [0.001, 0.002, 0.004]


def test_a_timeout_says_which_slots(path: Path):
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    slots = FileSlots(path, 2, timeout_s=0.5, clock=lambda: now[0], sleep=sleep)
    with (
        slots,
        slots,
        pytest.raises(LimiterTimeout, match=r"slots=2 at .* within timeout_s=0\.5"),
        slots,
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
    slots = FileSlots(path, 2, timeout_s=1.5)
    again = pickle.loads(pickle.dumps(slots))
    assert again.timeout_s == 1.5
    with again:
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
    slots = FileSlots(path, 2)
    path.unlink()
    assert free_slots(slots) == 2
    assert path.read_bytes() == b"slots=2\n"


def test_no_slots_at_all_are_refused(path: Path):
    with pytest.raises(ValueError, match="need at least 1"):
        FileSlots(path, 0)
