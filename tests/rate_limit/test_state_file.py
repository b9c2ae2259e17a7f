"""Whatever happens to the state file, it is read whole or started anew with the burst used up."""

import logging
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rate_limit.gcra import Arrivals, Rate, drained
from rate_limit.state_file import StateFile

RATE = Rate(per_minute=60, burst=5)
NOW_NS = 10**12
ARRIVALS = Arrivals(tat_ns=NOW_NS + 7, spaced_ns=NOW_NS, paused_ns=3, epoch=11)


def read_once(file: StateFile) -> Arrivals:
    assert file.lock(blocking=False)
    try:
        return file.read(NOW_NS)
    finally:
        file.unlock()


def write_once(file: StateFile, arrivals: Arrivals = ARRIVALS) -> None:
    assert file.lock(blocking=False)
    try:
        file.write(arrivals)
    finally:
        file.unlock()


def assert_drained(arrivals: Arrivals) -> None:
    assert arrivals == drained(NOW_NS, RATE, arrivals.epoch)


def test_a_new_file_lets_the_whole_burst_pass(tmp_path: Path):
    assert read_once(StateFile(tmp_path / "folder" / "rate", RATE)).tat_ns == 0


@given(
    st.builds(
        Arrivals,
        tat_ns=st.integers(0, 2**62),
        spaced_ns=st.integers(0, 2**62),
        paused_ns=st.integers(0, 2**62),
        epoch=st.integers(0, 2**62),
    )
)
def test_what_one_sharer_writes_another_reads(
    tmp_path_factory: pytest.TempPathFactory, arrivals: Arrivals
):
    path = tmp_path_factory.mktemp("state") / "rate"
    write_once(StateFile(path, RATE), arrivals)
    assert read_once(StateFile(path, RATE)) == arrivals


def test_only_one_sharer_at_a_time_has_the_lock(tmp_path: Path):
    first, second = StateFile(tmp_path / "rate", RATE), StateFile(tmp_path / "rate", RATE)
    assert first.lock(blocking=False)
    assert not second.lock(blocking=False)
    assert not first.lock(blocking=False)
    first.unlock()
    assert second.lock(blocking=False)
    second.unlock()


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 4, b"\0" * 500, b"not a record\n" * 99])
def test_any_other_content_starts_anew_with_the_burst_used_up(tmp_path: Path, content: bytes):
    path = tmp_path / "rate"
    path.write_bytes(content)
    assert_drained(read_once(StateFile(path, RATE)))


@settings(max_examples=60)
@given(st.data())
def test_a_record_cut_short_or_with_any_byte_changed_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    path = tmp_path_factory.mktemp("state") / "rate"
    file = StateFile(path, RATE)
    write_once(file)
    record = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(record) - 1))
    if data.draw(st.booleans()):
        record = record[:place]
    else:
        record[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(record)

    found = read_once(file)

    assert_drained(found)
    assert found.epoch != ARRIVALS.epoch
    assert read_once(StateFile(path, RATE)) == found


def test_a_restart_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "rate"
    files = [StateFile(path, RATE) for _ in range(3)]
    path.write_bytes(b"rubble")
    with caplog.at_level(logging.WARNING, logger="rate_limit"):
        for file in files * 2:
            read_once(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"state_file={path} is not whole; starting with the burst used up"
    ]


def test_a_record_of_another_boot_starts_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rate"
    with monkeypatch.context() as patch:
        patch.setattr("rate_limit.state_file._boot_id", lambda: uuid4().bytes)
        write_once(StateFile(path, Rate(per_minute=7, burst=2)), ARRIVALS)
    assert read_once(StateFile(path, RATE)).tat_ns == 0


def test_another_rate_in_the_file_is_an_error_that_names_both_and_changes_nothing(tmp_path: Path):
    path = tmp_path / "rate"
    write_once(StateFile(path, RATE))
    record = path.read_bytes()
    with pytest.raises(ValueError, match="cannot share state_file=") as caught:
        read_once(StateFile(path, Rate(per_minute=90, burst=4, min_interval_s=0.5)))
    assert "per_minute=60.0 burst=5 min_interval_s=0.0" in str(caught.value)
    assert "per_minute=90.0 burst=4 min_interval_s=0.5" in str(caught.value)
    assert path.read_bytes() == record


def test_a_deleted_file_is_made_again_with_its_state(tmp_path: Path):
    path = tmp_path / "rate"
    first, second = StateFile(path, RATE), StateFile(path, RATE)
    write_once(first)
    path.unlink()
    found = read_once(second)
    assert found[:3] == ARRIVALS[:3]
    assert found.epoch != ARRIVALS.epoch  # who waits under the old file reserves again
    assert read_once(first) == found
    assert read_once(StateFile(path, RATE)) == found


def test_a_deleted_folder_is_made_again(tmp_path: Path):
    path = tmp_path / "folder" / "rate"
    file = StateFile(path, RATE)
    write_once(file)
    for leftover in path.parent.iterdir():
        leftover.unlink()
    path.parent.rmdir()
    assert read_once(file)[:3] == ARRIVALS[:3]


def test_a_closed_file_opens_again(tmp_path: Path):
    file = StateFile(tmp_path / "rate", RATE)
    write_once(file)
    file.close()
    assert read_once(file) == ARRIVALS
