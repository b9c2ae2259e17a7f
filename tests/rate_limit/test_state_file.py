"""Whatever happens to the state file, it is read whole or started anew with the burst used up."""

import errno
import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from rate_limit import state_file
from rate_limit.gcra import SECOND_NS, GcraState, Rate, Throttle, drained, penalise
from rate_limit.state_file import FARTHEST_NS, OnConfigChange, StateFile, peek

RATE = Rate(per_minute=60, burst=5)
NOW_NS = 10**12
STATE = GcraState(tat_ns=NOW_NS + 7, tat_parts=0, spaced_ns=NOW_NS, granted=3)


def file_at(
    path: Path, rate: Rate = RATE, on_config_change: OnConfigChange = "refuse"
) -> StateFile:
    return StateFile(path, rate, lambda: NOW_NS, on_config_change)


def read_once(file: StateFile) -> GcraState:
    assert file.lock(blocking=False)
    try:
        state = file.read()
        assert isinstance(state, GcraState)
        return state
    finally:
        file.unlock()


def write_once(file: StateFile, state: GcraState = STATE) -> None:
    assert file.lock(blocking=False)
    try:
        file.read()
        file.write(state)
    finally:
        file.unlock()


def assert_drained(state: GcraState) -> None:
    assert state == drained(NOW_NS, RATE)


def test_a_new_file_lets_the_whole_burst_pass(tmp_path: Path):
    assert read_once(file_at(tmp_path / "folder" / "rate")).tat_ns == 0


@given(
    st.builds(
        GcraState,
        tat_ns=st.integers(0, NOW_NS + FARTHEST_NS),
        tat_parts=st.just(0),
        spaced_ns=st.integers(0, NOW_NS + FARTHEST_NS),
        granted=st.integers(0, 2**62 - 1),
    )
)
def test_what_one_sharer_writes_another_reads(
    tmp_path_factory: pytest.TempPathFactory, state: GcraState
):
    path = tmp_path_factory.mktemp("state") / "rate"
    write_once(file_at(path), state)
    assert read_once(file_at(path)) == state


def test_only_one_sharer_at_a_time_has_the_lock(tmp_path: Path):
    first, second = file_at(tmp_path / "rate"), file_at(tmp_path / "rate")
    assert first.lock(blocking=False)
    assert not second.lock(blocking=False)
    assert not first.lock(blocking=False)
    first.unlock()
    assert second.lock(blocking=False)
    second.unlock()


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 4, b"\0" * 500, b"not a record\n" * 99])
def test_any_other_content_starts_anew_with_the_burst_used_up(tmp_path: Path, content: bytes):
    path = tmp_path / "rate"
    file_at(path)
    path.write_bytes(content)
    assert_drained(read_once(file_at(path)))


def test_a_file_that_never_was_a_limiters_is_not_written_over(tmp_path: Path):
    path = tmp_path / "thesis"
    path.write_text("to be or not")
    with pytest.raises(FileExistsError, match="is no limiter's file; choose another path"):
        file_at(path)
    assert path.read_text() == "to be or not"


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"["},
        {"weights": b'[["", "x"]]'},
        {"weights": b"\xff"},
        {"weights": b"[" * 3000},
        {"rate": (float("nan"), 5, 0.0)},
        {"rate": (60.0, 0, 0.0)},
        {"throttle": {"pace": 0}},
        {"throttle": {"penalties": -1}},
        {"state": {"granted": 2**63 - 1}},
        {"state": {"tat_parts": 10**9}},
        {"state": {"tat_ns": -1}},
        {"serial": -1},
        {"serial": 2**63 - 1},
    ],
)
def test_nonsense_under_a_right_checksum_is_not_believed(tmp_path: Path, change: dict[str, Any]):
    path = tmp_path / "rate"
    file = file_at(path)
    write_once(file)
    record = path.read_bytes()
    weights = change.get("weights", b"")
    header = list(state_file._HEADER.unpack_from(record))
    header[3:] = [*change.get("rate", header[3:6]), len(weights)]
    throttle = Throttle()._replace(**change.get("throttle", {}))
    state = STATE._replace(**change.get("state", {}))
    hostile = state_file._HEADER.pack(*header) + weights + state_file._THROTTLE.pack(*throttle)
    hostile += state_file._GCRA.pack(change.get("serial", NOW_NS), *state)
    path.write_bytes(hostile + zlib.crc32(hostile).to_bytes(4, "little"))

    with pytest.raises(ValueError, match="no record of a limiter"):
        peek(path)
    assert_drained(read_once(file))
    assert_drained(read_once(file_at(path)))


def test_who_may_not_wait_does_not_wait_for_a_file_that_another_is_making(tmp_path: Path):
    path = tmp_path / "rate"
    file = file_at(path)
    file.close()
    with FileLock(path.with_name("rate.lock")):
        assert not file.lock(blocking=False)
    assert file.lock(blocking=False)
    file.unlock()


@given(st.data())
def test_a_record_cut_short_or_with_any_byte_changed_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    path = tmp_path_factory.mktemp("state") / "rate"
    file = file_at(path)
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
    assert read_once(file_at(path)) == found


def test_a_restart_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "rate"
    files = [file_at(path) for _ in range(3)]
    path.write_bytes(b"rubble")
    with caplog.at_level(logging.WARNING, logger="rate_limit"):
        for file in files * 2:
            read_once(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"state_file={path} is not whole; starting with an empty bucket"
    ]


def test_a_record_of_another_boot_starts_with_an_empty_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "rate"
    with monkeypatch.context() as patch:
        patch.setattr("rate_limit.state_file._boot_id", lambda: uuid4().bytes)
        write_once(file_at(path, Rate(per_minute=7, burst=2)), STATE)
    assert_drained(read_once(file_at(path)))


def test_two_hosts_on_one_file_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rate"
    here = file_at(path)
    monkeypatch.setattr("rate_limit.state_file._boot_id", lambda: b"the other's boot")
    there = file_at(path)
    for file in (here, there) * 2:
        read_once(file)
    with pytest.raises(RuntimeError, match=r"another host.*choose another path for each"):
        read_once(here)
        read_once(there)


@pytest.mark.parametrize("field", ["tat_ns", "spaced_ns"])
def test_a_time_that_no_reservation_could_reach_is_not_believed(tmp_path: Path, field: str):
    file = file_at(tmp_path / "rate")
    write_once(file, STATE._replace(**{field: NOW_NS + 2 * FARTHEST_NS}))
    assert_drained(read_once(file))


def test_another_rate_in_the_file_is_an_error_that_names_both_and_changes_nothing(tmp_path: Path):
    path = tmp_path / "rate"
    write_once(file_at(path))
    record = path.read_bytes()
    with pytest.raises(ValueError, match="cannot share state_file=") as caught:
        read_once(file_at(path, Rate(per_minute=90, burst=4, min_interval_s=0.5)))
    assert "per_minute=60.0 burst=5 min_interval_s=0.0" in str(caught.value)
    assert "per_minute=90.0 burst=4 min_interval_s=0.5" in str(caught.value)
    assert path.read_bytes() == record


def test_another_rate_is_adopted_on_request_with_an_empty_bucket(tmp_path: Path):
    path, rate = tmp_path / "rate", Rate(per_minute=90, burst=4, min_interval_s=0.5)
    old = file_at(path)
    write_once(old)
    epoch = old.throttle.epoch
    new = file_at(path, rate, "adopt")
    state = read_once(old)
    assert isinstance(state, GcraState)
    assert state.tat_ns == drained(NOW_NS, RATE).tat_ns  # RATE's burst takes longer to fill
    assert state.granted == 3
    assert old.rate == new.rate == rate
    assert old.throttle.epoch != epoch  # who waits under the old rate reserves again


def test_a_deleted_file_is_made_again_with_its_state(tmp_path: Path):
    path = tmp_path / "rate"
    first, second = file_at(path), file_at(path)
    paused, throttle = penalise(STATE, Throttle(), NOW_NS, 90 * SECOND_NS, RATE)
    assert first.lock(blocking=False)
    first.read()
    first.write(paused, throttle)
    first.unlock()
    read_once(second)
    path.unlink()
    found = read_once(second)
    assert found.tat_ns == paused.tat_ns
    assert found.granted == STATE.granted
    assert second.throttle.paused_ns == throttle.paused_ns
    assert second.throttle.epoch != throttle.epoch  # who waits under the old file reserves again
    assert read_once(first) == found
    assert read_once(file_at(path)) == found


def test_a_newcomer_after_a_deletion_finds_an_empty_bucket(tmp_path: Path):
    path = tmp_path / "rate"
    read_once(file_at(path))
    path.unlink()
    assert_drained(read_once(file_at(path)))


def test_a_file_put_in_place_of_another_is_noticed(tmp_path: Path):
    path = tmp_path / "rate"
    file = file_at(path)
    write_once(file)
    path.rename(tmp_path / "elsewhere")
    write_once(file_at(path), STATE._replace(granted=70))
    assert read_once(file).granted == 70


def test_a_deleted_folder_is_made_again(tmp_path: Path):
    path = tmp_path / "folder" / "rate"
    file = file_at(path)
    write_once(file)
    shutil.rmtree(path.parent)
    assert read_once(file).granted == STATE.granted


def test_a_link_in_a_folder_that_all_may_write_to_is_refused(tmp_path: Path):
    folder = tmp_path / "public"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "rate").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"cannot open state_file=.*symbolic link"):
        file_at(folder / "rate")
    assert not (tmp_path / "victim").exists()


def test_a_link_in_a_folder_of_ones_own_is_followed(tmp_path: Path):
    file_at(tmp_path / "rate")
    (tmp_path / "link").symlink_to(tmp_path / "rate")
    write_once(file_at(tmp_path / "link"))
    assert read_once(file_at(tmp_path / "rate")) == STATE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_users_file_is_refused(tmp_path: Path):
    file_at(tmp_path / "rate")
    os.chown(tmp_path / "rate", 65534, 65534)
    with pytest.raises(PermissionError, match=r"belongs to uid=65534.*run both as one user"):
        file_at(tmp_path / "rate")


def test_a_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = file_at(tmp_path / "rate")

    def no_locks(handle: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(
        OSError, match=r"cannot lock state_file=.*has no locks; use a folder on a local disk"
    ) as caught:
        file.lock(blocking=False)
    assert caught.value.errno == errno.ENOLCK


def test_a_closed_file_opens_again(tmp_path: Path):
    file = file_at(tmp_path / "rate")
    write_once(file)
    file.close()
    assert read_once(file) == STATE
