"""Who holds a run, how far it is, what a resume may change."""

import json
import os
import socket
from pathlib import Path

import pytest

from agent_loop.records.run_folder import LOCK_FILE
from verl_mixed.run.state import Holder, RunFolder, RunHeld, changes_of_resume


def trained_to(folder: RunFolder, step: int) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.metrics.open("w") as file:
        for number in range(step + 1):
            file.write(json.dumps({"step": number, "time": 0.0, "metrics": {}}) + "\n")


def test_a_claimed_run_refuses_a_second_launcher_and_is_free_after(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    with folder.claim(), pytest.raises(RunHeld, match="by process"), folder.claim():
        pass

    with folder.claim():
        pass


def test_a_claimed_run_says_who_holds_it_and_a_free_one_that_nobody_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.claimed_at() == 0.0
    (tmp_path / LOCK_FILE).write_text("4194304 the-host-of-an-earlier-launcher.example")

    with folder.claim():
        assert folder.holder() == Holder(pid=os.getpid(), host=socket.gethostname())
        assert folder.claimed_at() > 0

    assert folder.holder() is None


@pytest.mark.parametrize("name", ["", "12", "twelve host"])
def test_a_run_that_is_held_by_nobody_knows_whom_is_an_error(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    with folder.claim(), pytest.raises(RunHeld, match="left no name"):
        (tmp_path / LOCK_FILE).write_text(name)
        folder.holder()


def test_a_launcher_of_another_host_is_not_here() -> None:
    assert Holder(pid=1, host=socket.gethostname()).is_here
    assert not Holder(pid=1, host="another").is_here


def test_the_id_at_wandb_is_made_once(tmp_path: Path) -> None:
    made = RunFolder(tmp_path).wandb_run_id()
    assert RunFolder(tmp_path).wandb_run_id() == made
    assert len(bytes.fromhex(made)) == 4


def test_each_start_has_a_link_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/demo"))
    folder.path.mkdir(parents=True)
    folder.log.write_text("step 1")

    folder.link_log()

    (link,) = (tmp_path / "logs").glob("train_*.log")
    assert link.is_symlink() and link.read_text() == "step 1"


def test_a_checkpoint_is_saved_once_verl_says_so(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "global_step_4").mkdir(parents=True)
    assert RunFolder(tmp_path).saved_step() == 0

    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")

    assert RunFolder(tmp_path).saved_step() == 4


def test_a_run_is_done_only_with_the_mark_and_all_its_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    trained_to(folder, 3)
    assert not folder.is_done(3)

    folder.mark_done()

    assert folder.is_done(3)
    assert not folder.is_done(4)


def test_validation_before_training_is_no_training(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    trained_to(folder, 0)
    assert not folder.has_trained()

    trained_to(folder, 1)

    assert folder.has_trained()


def test_what_is_learned_may_not_change_but_how_it_runs_may() -> None:
    before = {
        "trainer": {"total_training_steps": 3},
        "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-4}}},
        "ray_kwargs": {"ray_init": {"num_cpus": 16}},
        "data": {"dataloader_num_workers": 4},
        "transfer_queue": {"backend": {"SimpleStorage": {"total_storage_size": 100000}}},
    }
    now = {
        "trainer": {"total_training_steps": 9},
        "actor_rollout_ref": {"actor": {"optim": {"lr": 2e-4}}},
        "ray_kwargs": {"ray_init": {"num_cpus": 8, "_temp_dir": "/x"}},
        "data": {"dataloader_num_workers": 0},
        "transfer_queue": {"backend": {"SimpleStorage": {"total_storage_size": None}}},
        "mixed": {
            "seed": 1,
            "trajectory_keep": 9,
            "trajectory_sample_step": 16,
            "wandb_artifacts": True,
        },
    }

    assert changes_of_resume(before, now) == [
        "actor_rollout_ref.actor.optim.lr: 0.0001 -> 0.0002",
        "mixed.seed: 'absent' -> 1",
    ]
    assert changes_of_resume(before, now, lambda key: key.startswith("actor_rollout_ref")) == [
        "mixed.seed: 'absent' -> 1"
    ]


def test_the_rows_of_a_source_are_chosen_once_and_for_all() -> None:
    old = {"mixed": {"sources": {"math": {"ratio": 1, "difficulty": {"min": 0.1}}}}}
    new = {"mixed": {"sources": {"math": {"ratio": 2}}, "on_change": "continue"}}
    assert changes_of_resume(old, new) == ["mixed.sources.math.difficulty.min: 0.1 -> 'absent'"]


def test_each_start_adds_a_line_that_can_be_pasted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    folder.note_command(["verl-mixed", "train", "a=[1, 2]"], {"EXPERIMENT_NAME": "it's"})
    folder.note_command(["verl-mixed", "train"], {})

    first, second = folder.command.read_text().splitlines()
    assert first.split(" ", 1)[1] == """EXPERIMENT_NAME='it'"'"'s' verl-mixed train 'a=[1, 2]'"""
    assert second.endswith(" verl-mixed train")


def test_a_line_that_is_none_hides_no_other_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(
        b'{"step": 1, "time": 0, "metrics": {}}\n\xff{\n{"metrics": {}}\n'
        b'{"step": 2, "time": 0, "metrics": {}}\n'
    )

    assert [line["step"] for line in folder.lines()] == [1, 2]
    assert folder.last_step() == 2
