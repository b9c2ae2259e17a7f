"""Which checkpoints, trajectory files and groups a run keeps: the choices and what they remove."""

import zipfile
from collections import Counter
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.run_folder import TRACKER, trajectory_files
from agent_loop.training.retention import (
    checkpoints_to_remove,
    prune_checkpoints,
    prune_trajectories,
    remove_checkpoint,
    sampled_groups,
)

# --- which checkpoints ---------------------------------------------------------------------------


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


# --- which trajectory files ----------------------------------------------------------------------


@given(starts=st.lists(st.integers(1, 12), min_size=1, max_size=4), keep=st.integers(1, 5))
def test_the_newest_trajectory_files_stay_over_restarts(
    starts: list[int], keep: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("trajectories")
    others = {folder / "notes.jsonl", folder / "3.jsonl.bak"}
    for path in others:
        path.touch()
    step = 0
    for start in starts:
        first = min(start, step)
        for path in trajectory_files(folder):  # as a resume from the checkpoint of `first` does
            if int(path.stem) > first:
                path.unlink()
        had = {int(path.stem) for path in trajectory_files(folder)}
        for step in range(first + 1, first + 8):
            (folder / f"{step}.jsonl").touch()
            prune_trajectories(folder, step, keep)
            had = {s for s in {*had, step} if s > step - keep}
            assert [int(path.stem) for path in trajectory_files(folder)] == sorted(had)
    assert all(path.exists() for path in others)


# --- which groups --------------------------------------------------------------------------------

GROUPS = st.dictionaries(
    st.sampled_from("abcdefg"), st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True)
)
MOST = st.none() | st.integers(1, 12)


@given(groups=GROUPS, step=st.integers(1, 100), per_source=MOST, per_step=MOST)
def test_a_step_writes_as_many_groups_as_it_may_and_shares_them_out(
    groups: dict[str, list[int]], step: int, per_source: int | None, per_step: int | None
):
    written = sampled_groups(
        groups, step=step, sources="abcdefg", per_source=per_source, per_step=per_step
    )
    offered = {source: draws[:per_source] for source, draws in groups.items()}
    total = sum(map(len, offered.values()))
    assert len(written) == (total if per_step is None else min(total, per_step))
    counts = Counter(source for source, _ in written)
    assert written == {(s, draw) for s, n in counts.items() for draw in offered[s][:n]}
    most = max(counts.values(), default=0)
    assert all(counts[source] >= min(most - 1, len(draws)) for source, draws in offered.items())


@given(sources=st.integers(1, 40), per_step=st.integers(1, 50), first=st.integers(1, 1000))
def test_every_source_gets_its_turn(sources: int, per_step: int, first: int):
    names = [f"s{number}" for number in range(sources)]
    seen = Counter[str]()
    for step in range(first, first + 2 * ceil(sources / per_step)):
        written = sampled_groups(
            {name: [step] for name in names},
            step=step,
            sources=names,
            per_source=None,
            per_step=per_step,
        )
        seen.update(source for source, _ in written)
    assert seen.keys() == set(names)


def test_a_source_with_a_group_every_fourth_step_gets_its_turn_too():
    names = [f"s{number:02}" for number in range(64)]
    often = [name for name in names if name != "s20"]
    seen = Counter[str]()
    for step in range(1, 401):
        present = names if step % 4 == 1 else often
        written = sampled_groups(
            {name: [step] for name in present},
            step=step,
            sources=names,
            per_source=4,
            per_step=16,
        )
        assert len(written) == 16
        seen.update(source for source, _ in written)
    assert min(seen[name] for name in often) >= 90
    assert seen["s20"] >= 10  # a quarter of the hundred steps that it is in would be 25
