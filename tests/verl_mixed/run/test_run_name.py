"""Which run the scripts mean, and what they are told of it."""

import json
from pathlib import Path

import pytest

from tests.verl_mixed.conftest import write_source
from verl_mixed.commands.facts import main
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import compose_config, save_config
from verl_mixed.run.name import RunFacts, display_name, facts
from verl_mixed.run.state import RunFolder

ONE_SOURCE = [
    "mixed.sources.taco.ratio=0",
    "mixed.sources.nq.ratio=0",
    "data.train_batch_size=4",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PROFILE", "EXPERIMENT_NAME", "MASTER_IP", "WORKER_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROFILE", "laptop")


@pytest.mark.slow
def test_the_override_comes_before_the_setting_and_that_before_the_config() -> None:
    assert facts([], {}).folder == "runs/mixed_demo"
    assert facts([], {"EXPERIMENT_NAME": "mine"}).folder == "runs/mine"
    assert facts(["mixed.experiment=other"], {"EXPERIMENT_NAME": "mine"}).folder == "runs/other"


@pytest.mark.slow
def test_a_run_without_a_name_is_called_by_what_makes_it() -> None:
    def shown(*overrides: str) -> str:
        return display_name(compose_config(overrides), overrides)

    model = "actor_rollout_ref.model.path=models/tiny-7b/"
    assert shown(model) == "tiny-7b-taco+nq+math-state_masked_grpo-lr0.0005-bs20x8-kl0"
    assert (
        shown(
            model,
            "mixed.sources.taco.ratio=0",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_coef=0.02",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "data.train_batch_size=8",
        )
        == "tiny-7b-nq+math-state_masked_grpo-lr1e-06-bs8x8-kl0.02"
    )
    assert shown("algorithm.use_kl_in_reward=true").endswith("-kl0.001")
    assert shown("mixed.experiment=mine") == "mine"


def test_a_run_keeps_its_name_at_weights_and_biases() -> None:
    first = RunFolder(Path("runs/mixed_demo")).wandb_run_id()
    assert RunFolder(Path("runs/mixed_demo")).wandb_run_id() == first
    assert RunFolder(Path("runs/other")).wandb_run_id() != first


def test_a_run_that_was_never_started_is_at_nothing() -> None:
    found = facts([], {"PROFILE": "laptop"})

    assert (found.holder, found.step, found.checkpoint, found.done) == ("", 0, 0, 0)
    assert found.total == 16
    assert not Path("runs").exists()


def test_a_held_run_names_its_launcher_its_step_and_its_checkpoint() -> None:
    folder = RunFolder(Path("runs/mixed_demo"))
    with folder.claim():
        folder.metrics.write_text(json.dumps({"step": 7, "time": 0.0, "metrics": {}}) + "\n")
        checkpoints = folder.path / "checkpoints"
        (checkpoints / "global_step_5").mkdir(parents=True)
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("5")

        found = facts([], {"PROFILE": "laptop"})

    assert found.holder.startswith("process ")
    assert (found.step, found.checkpoint, found.done) == (7, 5, 0)
    assert facts([], {"PROFILE": "laptop"}).holder == ""


def test_a_run_with_all_its_steps_is_done_until_it_is_given_more() -> None:
    folder = RunFolder(Path("runs/mixed_demo"))
    folder.path.mkdir(parents=True)
    folder.metrics.write_text(json.dumps({"step": 16, "time": 0.0, "metrics": {}}) + "\n")
    folder.mark_done()

    assert facts([], {"PROFILE": "laptop"}).done == 1
    assert facts(["trainer.total_training_steps=20"], {"PROFILE": "laptop"}).done == 0


@pytest.mark.slow
def test_a_run_of_passes_is_done_until_it_is_given_more() -> None:
    plan = make_plan(
        [*ONE_SOURCE, "trainer.total_epochs=2"],
        {
            "PROFILE": "laptop",
            "MODEL_PATH": "some/model",
            "TRAIN_FILES": str(write_source(Path("rows.parquet"), "math", 12)),
            "VAL_FILES": "rows.parquet",
        },
    )
    assert (plan.length, plan.total_steps) == ("2 epochs = 6 steps", 6)
    folder = plan.folder
    folder.path.mkdir(parents=True)
    save_config(plan.config, folder.config)
    folder.metrics.write_text(json.dumps({"step": 6, "time": 0.0, "metrics": {}}) + "\n")
    folder.mark_done()

    def found(epochs: int) -> RunFacts:
        return facts([*ONE_SOURCE, f"trainer.total_epochs={epochs}"], {"PROFILE": "laptop"})

    assert (found(2).total, found(2).done) == (6, 1)
    assert (found(3).total, found(3).done) == (9, 0)


def test_settings_of_the_cluster_do_not_matter_to_the_name() -> None:
    assert facts([], {"MASTER_IP": "", "WORKER_NODES": "a b"}).folder == "runs/mixed_demo"


def test_the_shell_reads_assignments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--facts", "--", "mixed.experiment=mine"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "RUN_FOLDER=runs/mine",
        "RUN_HOLDER=''",
        "RUN_STEP=0",
        "RUN_TOTAL=16",
        "RUN_CHECKPOINT=0",
        "RUN_DONE=0",
    ]


def test_a_wrong_config_is_exit_2_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixed.experiment=../else"]) == 2
    assert main(["--", "~mixed.nothing"]) == 2

    captured = capsys.readouterr()
    assert not captured.out
    assert "../else" in captured.err
    assert "mixed.nothing" in captured.err
