"""Checkpoints and trajectory files as artifacts, with the real wandb where it needs no network."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from agent_loop.records import wandb_run
from agent_loop.records.wandb_run import LINKS, Artifacts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "global_step_5"
    (folder / "actor").mkdir(parents=True)
    (folder / "data.pt").write_text("data")
    (folder / "actor" / "model.pt").write_text("weights")
    return folder


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run of wandb without a network; yields its folder."""
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p", id="trial")
    yield Path(run.dir).parent
    wandb.teardown()


def test_an_offline_run_holds_the_artifacts_and_their_files_outlive_the_originals(
    checkpoint: Path, offline: Path, tmp_path: Path
) -> None:
    trajectories = tmp_path / "trajectories" / "5.jsonl"
    trajectories.parent.mkdir()
    trajectories.write_text("{}\n")
    artifacts = Artifacts("trial")
    artifacts.log("checkpoint", 5, checkpoint)
    artifacts.log("trajectories", 5, trajectories)
    shutil.rmtree(checkpoint)  # as mixed.trajectory_keep and max_actor_ckpt_to_keep do
    trajectories.unlink()
    artifacts.shutdown()
    wandb.finish()
    wandb.teardown()  # its process writes the last of the record when it ends

    (record,) = offline.glob("run-trial.wandb")
    logged = record.read_bytes()
    kept = {
        path.name: path.read_text()
        for path in [*checkpoint.parent.rglob("*"), *trajectories.parent.rglob("*")]
        if path.is_file() and LINKS in path.parts
    }
    assert kept == {"data.pt": "data", "model.pt": "weights", "5.jsonl": "{}\n"}
    for words in ("trial-checkpoint", "trial-trajectories", "step-5", "actor/model.pt", "5.jsonl"):
        assert words.encode() in logged, words
    assert not [path for path in offline.rglob("*") if path.name == "model.pt"]  # no copy


class OnlineRun:
    """A run that is online, and sends or fails."""

    offline = False

    def __init__(self, error: Exception | None) -> None:
        self.error, self.sent = error, list[tuple[Any, list[str]]]()

    def log_artifact(self, artifact: Any, aliases: list[str]) -> Any:
        def wait() -> None:
            if self.error is not None:
                raise self.error
            self.sent.append((artifact, aliases))

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("error", [None, ConnectionError("no route to wandb")])
def test_the_links_go_when_an_artifact_is_sent_and_no_error_ends_the_run(
    error: Exception | None,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = OnlineRun(error)
    monkeypatch.setattr(wandb, "run", run)
    artifacts = Artifacts("trial")
    artifacts.log("checkpoint", 5, checkpoint)
    artifacts.shutdown()

    assert [*(checkpoint.parent / LINKS).iterdir()] == []
    assert (checkpoint / "data.pt").exists()
    if error is not None:
        assert "the checkpoint of step=5 is no artifact: ConnectionError" in caplog.text
        return
    ((artifact, aliases),) = run.sent
    assert (artifact.name, artifact.type, artifact.metadata) == (
        "trial-checkpoint",
        "checkpoint",
        {"step": 5},
    )
    assert aliases == ["latest", "step-5"]
    assert sorted(artifact.manifest.entries) == ["actor/model.pt", "data.pt"]


def test_a_disk_without_hard_links_gives_the_files_themselves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    run = OnlineRun(None)
    monkeypatch.setattr(wandb, "run", run)
    monkeypatch.setattr(wandb_run.os, "link", refuse)
    artifacts = Artifacts("trial")
    artifacts.log("checkpoint", 5, checkpoint)
    artifacts.shutdown()

    ((artifact, _),) = run.sent
    assert artifact.manifest.entries["data.pt"].local_path == str(checkpoint / "data.pt")
    assert (checkpoint / "data.pt").exists()


def test_without_a_run_of_wandb_nothing_is_linked(checkpoint: Path) -> None:
    artifacts = Artifacts("trial")
    artifacts.log("checkpoint", 5, checkpoint)
    artifacts.shutdown()
    assert not (checkpoint.parent / LINKS).exists()
