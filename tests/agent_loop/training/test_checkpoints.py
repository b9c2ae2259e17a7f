"""Checkpoints of verl's own trainer on a real disk: which ones stay, also after a kill."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.trainer.ppo.v1")

import transfer_queue as tq
from omegaconf import OmegaConf
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from agent_loop.records.run_folder import MetricsFile, trajectory_files, write_lines
from agent_loop.training.file_writer import FileWriter
from agent_loop.training.trainer import MixedColocateAsyncTrainer, MixedSyncTrainer
from samplers.ledger import Ledger
from verl_mixed.run.next_start import next_start
from verl_mixed.run.state import RunFolder

WEIGHTS, QUEUE = 20_000, 10_000
"""Bytes in a checkpoint."""


class Workers:
    """The workers of a role: verl's own removal of old weights; a file takes the weights' place."""

    def __init__(self) -> None:
        self._manager: Any = object.__new__(BaseCheckpointManager)
        self._manager.previous_saved_paths = []

    def save_checkpoint(
        self, path: str, remote: str | None, step: int, max_ckpt_to_keep: int | None
    ) -> None:
        self._manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "model.pt").write_bytes(bytes(WEIGHTS))
        self._manager.register_checkpoint(path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        assert (Path(local_path) / "model.pt").stat().st_size == WEIGHTS


class Run:
    """A run's folder and a trainer whose steps train nothing; `start` is a new process."""

    def __init__(self, path: Path, mode: type = MixedColocateAsyncTrainer, keep: int | None = 2):
        self.path, self.checkpoints, self.mode = path, path / "checkpoints", mode
        self.overrides: dict[str, Any] = {"resume_mode": "auto", "resume_from_path": None}
        self.keep, self.most = keep, 0
        path.mkdir(exist_ok=True)

    def start(self) -> "Run":
        """Load the checkpoint, as the trainer's start does."""
        trainer: Any = object.__new__(self.mode)
        keep = "${trainer.max_actor_ckpt_to_keep}"
        trainer.config = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(self.checkpoints),
                    "default_hdfs_dir": None,
                    "del_local_ckpt_after_load": False,
                    "max_actor_ckpt_to_keep": self.keep,
                    "max_critic_ckpt_to_keep": keep,
                    **self.overrides,
                },
                "algorithm": {"use_kl_in_reward": False},
                "actor_rollout_ref": {"actor": {}},
            }
        )
        trainer.trainer_mode = trainer.MODE
        trainer.use_critic = True
        trainer.actor_rollout_wg, trainer.critic_wg = Workers(), Workers()
        trainer.train_dataloader = SimpleNamespace(
            state_dict=lambda: {"step": trainer.global_steps}, load_state_dict=self._loaded
        )
        trainer.checkpoint_callback = SimpleNamespace(on_save=self._saved)
        trainer.mixed = SimpleNamespace(ratios={})
        trainer.plan = SimpleNamespace(description=dict, policy=None)
        trainer.metrics_file = MetricsFile(self.path / "metrics.jsonl")
        trainer.trajectory_dir = self.path / "trajectories"
        trainer._step_metrics, trainer._writer = {}, FileWriter()
        trainer.ledger = Ledger(self.path / "ledger.jsonl")
        self.trainer, self.state = trainer, {"step": 0}
        trainer._load_checkpoint()
        assert self.state["step"] == trainer.global_steps
        return self

    def _loaded(self, state: dict[str, Any]) -> None:
        self.state = state

    def _saved(self, **_: object) -> None:
        """Called by verl when a checkpoint is whole."""
        self.most = max(self.most, len(self.steps()))

    def train(self, steps: int = 1) -> None:
        """Steps with a checkpoint each."""
        for _ in range(steps):
            self.trainer.global_steps += 1
            step = self.trainer.global_steps
            self.trainer.ledger.append_step(step, [], {})
            write_lines(self.trainer.trajectory_dir / f"{step}.jsonl", [])
            self.trainer._save_checkpoint()

    def steps(self) -> set[int]:
        return {int(path.name[12:]) for path in self.checkpoints.glob("global_step_*")}

    def size(self) -> int:
        """Bytes of all checkpoints that are weights or rows of the queue."""
        files = [path for path in self.checkpoints.rglob("*") if path.name in ("model.pt", "rows")]
        return sum(path.stat().st_size for path in files)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TransferQueue that is saved as the real one, by a rename; no wait for the disk."""

    def save(path: str, metadata: object) -> None:
        draft = Path(path + ".tmp")
        draft.mkdir(exist_ok=True)
        (draft / "rows").write_bytes(bytes(QUEUE))
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)

    def load(path: str) -> None:
        assert (Path(path) / "rows").stat().st_size == QUEUE

    monkeypatch.setattr(tq, "save_checkpoint", save)
    monkeypatch.setattr(tq, "load_checkpoint", load)
    monkeypatch.setattr(tq, "kv_list", lambda *_: {})
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_each_checkpoint_that_is_whole_becomes_an_artifact(tmp_path: Path) -> None:
    run, logged = Run(tmp_path / "run").start(), list[tuple[object, ...]]()

    def log(kind: str, step: int, folder: Path) -> None:
        logged.append((kind, step, (folder / "data.pt").is_file()))

    run.trainer._artifacts = SimpleNamespace(log=log)
    run.train(2)
    assert logged == [("checkpoint", 1, True), ("checkpoint", 2, True)]


@pytest.mark.parametrize(("mode", "keep"), [(MixedSyncTrainer, 1), (MixedColocateAsyncTrainer, 3)])
def test_300_steps_and_10_restarts_leave_as_many_checkpoints_as_are_kept(
    tmp_path: Path, mode: type, keep: int
):
    run = Run(tmp_path, mode, keep)
    each = 2 * WEIGHTS + (QUEUE if mode is MixedColocateAsyncTrainer else 0)
    for begun in range(0, 300, 30):
        run.start().train(30)
        assert run.trainer.global_steps == begun + 30
        assert run.steps() == {begun + 30 - past for past in range(keep)}
        assert run.size() == keep * each
        assert run.most == max(keep, 2)
        assert run.trainer.config.trainer.max_actor_ckpt_to_keep == keep


def test_null_keeps_all_checkpoints(tmp_path: Path):
    run = Run(tmp_path, keep=None)
    run.start().train(4)
    run.start().train(4)
    assert run.steps() == set(range(1, 9))


class Killed(BaseException):
    """The process ends here."""


class Killer:
    """Ends a save before one of its file operations, or in the middle of writing a file.

    An audit hook sees each operation. It cannot be removed, so there is one for all tests.
    """

    WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")

    def __init__(self) -> None:
        self._left: int | None = None
        self._in_the_middle = False
        sys.addaudithook(self._hook)

    @contextmanager
    def before(self, operation: int, *, in_the_middle: bool) -> Iterator[None]:
        self._left, self._in_the_middle = operation, in_the_middle
        try:
            yield
        finally:
            self._left = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._left is None or event not in self.WRITES:
            return
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event == "open" and not writes:
            return
        self._left -= 1
        if self._left < 0:
            self._left = None
            if writes and self._in_the_middle:
                Path(arguments[0]).write_bytes(b"")
            raise Killed


KILLER = Killer()


@pytest.mark.parametrize("in_the_middle", [False, True])
@pytest.mark.parametrize(("mode", "keep"), [(MixedSyncTrainer, 2), (MixedColocateAsyncTrainer, 1)])
def test_a_kill_between_any_two_file_operations_of_a_save_leaves_a_run_that_goes_on(
    tmp_path: Path, mode: type, keep: int, in_the_middle: bool
):
    ended, operation = False, 0
    while not ended:
        run = Run(tmp_path / str(operation), mode, keep)
        run.start().train(2)
        try:
            with KILLER.before(operation, in_the_middle=in_the_middle):
                run.train()
            ended = True
        except Killed:
            pass
        for data in run.checkpoints.glob("*/data.pt"):  # what an export takes for whole is whole
            assert len(list(data.parent.glob("*/model.pt"))) == 2
        goes_on = run.start().trainer.global_steps
        assert goes_on in (2, 3)
        run.train()
        assert run.steps() == {goes_on + 1 - past for past in range(keep)}
        operation += 1
    assert operation > 15


@pytest.mark.parametrize("mode", [MixedSyncTrainer, MixedColocateAsyncTrainer])
def test_a_start_from_a_named_checkpoint_keeps_it_for_the_next_one(tmp_path: Path, mode: type):
    run = Run(tmp_path, mode, keep=2)
    run.start().train(4)
    run.overrides |= {
        "resume_mode": "resume_path",
        "resume_from_path": str(run.checkpoints / "global_step_3"),
    }
    run.start().train(4)
    assert run.steps() == {3, 6, 7}
    assert run.start().trainer.global_steps == 3
    run.overrides |= {"resume_mode": "auto", "resume_from_path": None}
    run.start().train(1)
    assert run.steps() == {3, 4, 6, 7}  # those after the latest are of steps that were given up


def test_a_kill_does_not_lead_to_a_checkpoint_of_steps_that_were_given_up(tmp_path: Path):
    run = Run(tmp_path)
    run.start().train(9)
    run.overrides["resume_mode"] = "disable"
    run.start().train(3)
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("")  # killed as it wrote
    run.overrides["resume_mode"] = "auto"
    assert run.start().trainer.global_steps == 3


@pytest.mark.parametrize("tracker", ["3", "", None])  # "": a kill left it empty
@pytest.mark.parametrize("mode", ["auto", "disable", "own", "elsewhere"])
def test_verl_goes_on_from_the_checkpoint_that_a_start_names(
    tmp_path: Path, mode: str, tracker: str | None
) -> None:
    run, other = Run(tmp_path / "run", keep=None), Run(tmp_path / "other", keep=None)
    other.start().train(7)
    run.start().train(3)
    (path := run.checkpoints / "latest_checkpointed_iteration.txt").unlink()
    if tracker is not None:
        path.write_text(tracker)
    own, elsewhere = run.checkpoints / "global_step_2", other.checkpoints / "global_step_5"
    named = {"own": own, "elsewhere": elsewhere}.get(mode)
    run.overrides["resume_mode"] = "resume_path" if named else mode
    run.overrides["resume_from_path"] = named and str(named)

    said = next_start(RunFolder(run.path), {"trainer": run.overrides}, 9)

    assert run.start().trainer.global_steps == said.step
    resumed = run.checkpoints / "global_step_3" if mode == "auto" and tracker is not None else None
    assert said.checkpoint == (named or resumed)


def test_a_checkpoint_that_is_written_again_has_nothing_of_the_old_one(tmp_path: Path):
    archive = tmp_path / "archive"
    run = Run(tmp_path / "run", keep=None)
    run.start().train(3)
    (run.checkpoints / "global_step_2" / "actor" / "model_of_rank_7.pt").touch()
    (run.checkpoints / "global_step_3").rename(archive)
    (run.checkpoints / "global_step_3").symlink_to(archive)
    before = {path: path.stat().st_mtime_ns for path in archive.rglob("*")}
    run.overrides["resume_mode"] = "disable"
    run.start().train(3)
    second = run.checkpoints / "global_step_2"
    assert [path.name for path in (second / "actor").iterdir()] == ["model.pt"]
    assert not (run.checkpoints / "global_step_3").is_symlink()
    assert before == {path: path.stat().st_mtime_ns for path in archive.rglob("*")}


def test_a_resume_works_on_trajectories_of_which_old_files_are_gone(tmp_path: Path):
    run = Run(tmp_path)
    run.start().train(6)
    (run.trainer.trajectory_dir / "notes.jsonl").touch()
    for step in (1, 2, 3):
        (run.trainer.trajectory_dir / f"{step}.jsonl").unlink()
    run.overrides |= {
        "resume_mode": "resume_path",
        "resume_from_path": str(run.checkpoints / "global_step_5"),
    }
    run.start()
    assert [path.stem for path in trajectory_files(run.trainer.trajectory_dir)] == ["4", "5"]
