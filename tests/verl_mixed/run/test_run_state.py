"""Who holds a run, how far it is, what a resume may change."""

import json
from pathlib import Path

import pytest

from verl_mixed.run.state import RunFolder, RunHeld, changes_of_resume


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
