"""Which checkpoints a run keeps: the choice and what is removed."""

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.training.retention import (
    checkpoints_to_remove,
    prune_checkpoints,
    remove_checkpoint,
)
from agent_loop.training.run_folder import TRACKER


@given(
    whole=st.dictionaries(st.integers(1, 30), st.booleans()),
    latest=st.integers(1, 30),
    keep=st.none() | st.integers(1, 4),
    named=st.sets(st.integers(1, 30), max_size=2),
)
def test_the_newest_whole_checkpoints_stay_and_nothing_of_the_future_goes(
    whole: dict[int, bool], latest: int, keep: int | None, named: set[int]
):
    removed = checkpoints_to_remove(whole, latest, keep, named)
    left = whole.keys() - set(removed)
    assert removed == sorted(removed)
    assert {step for step in whole if step >= latest or step in named} <= left
    if keep is None or not whole.get(latest):
        assert not removed
        return
    past = [step for step in whole if step <= latest and whole[step]]
    assert {*sorted(past)[-keep:]} <= left
    others = {step for step in left if step < latest} - named
    assert len(others) <= keep - 1 and all(whole[step] for step in others)
    assert checkpoints_to_remove({step: whole[step] for step in left}, latest, keep, named) == []


def checkpoint(path: Path, *, queue: bool = True) -> Path:
    """A whole checkpoint as verl writes it."""
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "model.pt").write_bytes(bytes(100))
    with zipfile.ZipFile(path / "data.pt", "w") as data:
        data.writestr("data.pkl", "state")
    if queue:
        (path / "transfer_queue").mkdir()
        (path / "transfer_queue" / "rows").write_bytes(bytes(100))
    return path


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Whole checkpoints at 1 to 6; the tracker names 6."""
    folder = tmp_path / "checkpoints"
    for step in range(1, 7):
        checkpoint(folder / f"global_step_{step}")
    (folder / TRACKER).write_text("6")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("global_step_") for path in folder.iterdir()} - {TRACKER}


@pytest.mark.parametrize("tracker", ["", "7", "seven", None])
def test_without_the_step_of_a_whole_checkpoint_nothing_is_removed(
    checkpoints: Path, tracker: str | None
):
    (checkpoints / TRACKER).unlink()
    if tracker is not None:
        (checkpoints / TRACKER).write_text(tracker)
    prune_checkpoints(checkpoints, 1, has_queue=True)
    assert names(checkpoints) == set("123456")


@pytest.mark.parametrize("has_queue", [False, True])
def test_an_interrupted_checkpoint_takes_no_place_of_a_whole_one(
    checkpoints: Path, has_queue: bool
):
    torn = (checkpoints / "global_step_5" / "data.pt").read_bytes()[:-8]
    (checkpoints / "global_step_5" / "data.pt").write_bytes(torn)
    (checkpoints / "global_step_4" / "transfer_queue").rename(
        checkpoints / "global_step_4" / "transfer_queue.tmp"
    )
    (checkpoints / "global_step_3" / "actor" / "model.pt").unlink()
    (checkpoints / "global_step_3" / "actor").rmdir()  # release 1.0.0 removed weights only
    prune_checkpoints(checkpoints, 2, has_queue=has_queue)
    assert names(checkpoints) == ({"6", "2"} if has_queue else {"6", "4"})


def test_what_is_no_checkpoint_of_the_run_stays_and_no_link_is_followed(
    checkpoints: Path, tmp_path: Path
):
    archive = checkpoint(tmp_path / "archive")
    weights = checkpoint(tmp_path / "weights")
    (checkpoints / "global_step_0").symlink_to(archive)
    (checkpoints / "global_step_1" / "link").symlink_to(weights)
    others = ["global_step_2_backup", "global_step_03", "step_1", "global_step_", "actor"]
    for name in others:
        checkpoint(checkpoints / name)
    (checkpoints / "global_step_7").write_text("a file")
    prune_checkpoints(checkpoints, 1, has_queue=True)
    kept = {"6", "0", "7", *(name.removeprefix("global_step_") for name in others)}
    assert names(checkpoints) == kept
    remove_checkpoint(checkpoints / "global_step_0")
    assert all(len(list(folder.iterdir())) == 3 for folder in (archive, weights))


def test_what_cannot_be_removed_is_said_and_tried_again(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("agent_loop.training.retention.shutil.rmtree", busy)
        prune_checkpoints(checkpoints, 2, has_queue=True)
    assert "global_step_1" in caplog.text and names(checkpoints) == set("123456")
    prune_checkpoints(checkpoints, 2, has_queue=True)
    assert names(checkpoints) == {"5", "6"}
