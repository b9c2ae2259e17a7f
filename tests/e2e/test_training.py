"""The main job in small, on the real Ray, trainer and tool server; killed half-way and resumed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.mask_audit import audit_masks
from agent_loop.run_folder import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
STEPS = 4
DEADLINE_S = 600
QUOTAS = {"taco": 3, "nq": 3, "math": 4}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A demo whose model was hardly trained: it speaks no tags yet, which is all the same here."""
    from agent_loop.demo_model import Recipe, prepare_demo

    folder = tmp_path_factory.mktemp("demo") / "seed0"
    recipe = Recipe(traces=600, min_steps=60, max_steps=60, floor=0.0, probe_prompts=2)
    prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def command(demo: Path) -> list[str]:
    files = {
        split: ",".join(str(demo / f"{name}_{split}.parquet") for name in QUOTAS)
        for split in ("train", "val")
    }
    return [
        *(sys.executable, "-m", "cluster.cli", "train"),
        f"data.train_files=[{files['train']}]",
        f"data.val_files=[{files['val']}]",
        f"actor_rollout_ref.model.path={demo / 'model'}",
        "mixed.experiment=e2e",
        "data.train_batch_size=10",
        "data.val_max_samples=6",
        "actor_rollout_ref.rollout.n=4",
        # an untrained model earns nothing, so this is what moves the weights
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        f"ray_kwargs.ray_init.dashboard_port={free_port()}",
    ]


def start(command: list[str], work: Path, out: Path) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    environ.pop("RAY_ADDRESS", None)
    with out.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=work,  # runs/ is made in the folder that the launcher starts in
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], out: Path) -> str:
    try:
        code = process.wait(timeout=DEADLINE_S)
    finally:
        process.terminate()  # the launcher ends its children; nothing happens to one that is done
    text = out.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text


@pytest.fixture(scope="module")
def run(command: list[str], work: Path) -> Iterator[Path]:
    """The run's folder, after a kill -9 in mid-run and the same command again."""
    folder = work / "runs" / "e2e"
    first = start(command, work, work / "first.txt")
    deadline = time.monotonic() + DEADLINE_S
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    while not (tracker.exists() and len(read_lines(folder / "ledger.jsonl")) >= 20):
        assert first.poll() is None, (work / "first.txt").read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, "no second step before the deadline"
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=60)
    second = start(command, work, work / "second.txt")
    finish(second, work / "second.txt")
    yield folder


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "metrics.jsonl")


def test_a_killed_run_goes_on_and_every_step_has_one_line(run: Path):
    assert [line["step"] for line in metrics(run)] == list(range(STEPS + 1))


def test_every_trained_batch_holds_exactly_the_planned_prompts(run: Path):
    ledger = read_lines(run / "ledger.jsonl")
    for step in range(1, STEPS + 1):
        own = [entry for entry in ledger if entry["step"] == step]
        assert Counter(entry["source"] for entry in own) == QUOTAS
    assert [entry["position"] for entry in ledger] == list(range(10 * STEPS))
    for line in metrics(run)[1:]:
        assert line["metrics"]["mixed/ratio_error/max"] == 0
        assert {s: line["metrics"][f"mixed/{s}/count"] for s in QUOTAS} == QUOTAS


def test_rollout_and_trainer_agree_on_every_probability(run: Path):
    for line in metrics(run)[1:]:
        assert line["metrics"]["training/rollout_probs_diff_max"] < 1e-5


def test_every_mask_bit_of_the_run_is_accounted_for(run: Path):
    report = audit_masks(run)
    assert report.problems == []
    assert report.trajectories == 10 * 4 * STEPS


def test_training_changes_the_weights(run: Path):
    import torch

    def weights(step: int) -> dict[str, Any]:
        path = run / "checkpoints" / f"global_step_{step}" / "actor"
        saved = torch.load(path / "model_world_size_1_rank_0.pt", weights_only=False)
        return {name: weight.to_local() for name, weight in saved.items()}

    before, after = weights(STEPS - 1), weights(STEPS)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_run_leaves_a_report_tensorboard_and_its_config(run: Path):
    assert "<svg" in (run / "report.html").read_text()
    assert list((run / "tensorboard").rglob("events.*"))
    assert (run / "config.yaml").exists()
    assert "train" in (run / "command.txt").read_text()


def test_the_same_command_once_more_says_that_the_run_is_complete(
    run: Path, command: list[str], work: Path
):
    again = start(command, work, work / "again.txt")
    assert "complete" in finish(again, work / "again.txt")


def test_nothing_of_the_run_is_left_running(run: Path):
    held = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                held.append((entry / "cmdline").read_bytes())
            except OSError:
                continue  # it ended meanwhile
    assert not [text for text in held if str(run).encode() in text]


def test_the_audit_command_finds_nothing_wrong(run: Path):
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "audit", str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every batch as planned" in done.stdout
