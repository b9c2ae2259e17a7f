"""What our trainer reads, refuses and writes of a step, inside verl's own `step`."""

import fcntl
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("verl.trainer.ppo.v1")

import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from agent_loop.records.evaluation_records import RECORD, line_of, read_records
from agent_loop.records.run_folder import LOCK_FILE
from agent_loop.records.token_metrics import TokenSums
from agent_loop.records.trajectory_record import StopReason, TrajectoryRecord, Turn
from agent_loop.training import accounts, optimizer_steps
from agent_loop.training import trainer as module
from agent_loop.training.alarms import FaultWindow, TooManyFaults
from agent_loop.training.file_writer import FileWriter
from agent_loop.training.optimizer_steps import LauncherEnded
from agent_loop.training.trainer import MixedSeparateAsyncTrainer
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from config.schema import MixedConfig
from samplers import exact_updates
from samplers.faults import GroupFaults
from samplers.ledger import LedgerEntry
from samplers.uid import make_uid, prompt_of
from tests.fakes.engine import whole_of
from tests.fakes.records import record
from tests.json_lines import read_lines

UPDATES, GROUPS = 2, 4


def rolled_out(fault: str | None = None) -> Rollout:
    rollout = Rollout(trajectory=Trajectory([1]), stop_reason=StopReason.ANSWERED, answer="4")
    rollout.trajectory.add_model_tokens([5, 6], [-0.5, -0.1])
    if fault is not None:
        rollout.lose("search", fault)
        rollout.trajectory.without_gradient()
    return rollout


def trajectory(name: str, fault: str | None = None) -> TrajectoryRecord:
    """One of a group whose name is a letter: its number in the plan."""
    trained = whole_of(rolled_out(fault), "nq", make_uid("nq", ord(name)))
    return replace(trained, draw=ord(name))


def name_of(uid: str) -> str:
    return chr(prompt_of(uid)[1])


def sums_of(key: str) -> TokenSums:
    """What the optimizer got: an advantage that tells the trajectories apart."""
    advantage = 2.0 * ord(name_of(key.split("_")[0]))
    return TokenSums(
        key=key, source="nq", tokens=2, advantage=advantage, strength=advantage, moving=2
    )


class Buffer:
    """Knows what the filter evicted."""

    def __init__(self, evicted: Sequence[GroupFaults] = ()) -> None:
        self.evicted = list(evicted)

    def take_losses(self) -> list[GroupFaults]:
        taken, self.evicted = self.evicted, []
        return taken

    def take_waits(self) -> dict[str, float]:
        return {}

    lead = None


class Books:
    """A trainer in verl's `step` whose mini-batches are given; what it writes is kept.

    Args:
        path: the run's folder.
        batches: trajectories of one mini-batch after the other.
        evicted: groups that the filter dropped before the first.
    """

    def __init__(
        self,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        batches: Sequence[Sequence[TrajectoryRecord]],
        evicted: Sequence[GroupFaults] = (),
    ) -> None:
        self.ledger: list[list[str]] = []
        self.read: list[TrajectoryRecord] = []
        self.path = path
        batch_of = iter(batches)
        trainer: Any = object.__new__(MixedSeparateAsyncTrainer)
        actor = {"ppo_mini_batch_size": GROUPS // UPDATES}
        trainer.config = OmegaConf.create(
            {
                "data": {"train_batch_size": GROUPS},
                "actor_rollout_ref": {"actor": actor},
                "trainer": {"logger": ["console"], "test_freq": -1},
            }
        )
        trainer.total_training_steps = 9
        trainer.plan = SimpleNamespace(batch_size=GROUPS, trained=None)
        trainer.mixed = MixedConfig.model_construct(
            sources={}, trajectory_sample=None, fail_on_loop_error=False
        )
        trainer.trajectory_dir = path
        trainer.parameter_sync_step, trainer.global_steps = UPDATES, 0
        trainer._temperatures, trainer._state_masking, trainer._trajectories = {}, True, []
        trainer.tokenizer = type("Tokenizer", (), {"eos_token_id": 0})
        trainer.replay_buffer = Buffer(evicted)
        trainer._faults = FaultWindow(0.5, steps=5)
        trainer._check_composition = lambda keys: None
        trainer._quota = lambda *_: {"nq": GROUPS // UPDATES}
        trainer._sizes = lambda: None
        trainer.door = SimpleNamespace(ratio_errors=lambda _: {})
        trainer._drift = lambda *_: {}
        trainer._reader, trainer._writer = ThreadPoolExecutor(1), FileWriter()
        trainer._write_ledger = self.keep
        trainer.prepare_step = dict

        def step_once(metrics: dict[str, Any], timing_raw: object, size: int) -> KVBatchMeta:
            self.read = list(next(batch_of))
            keys = [t.key for t in self.read]
            batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
            batch = trainer._balance_batch(batch, metrics)
            trainer._take_trajectories()
            return batch

        trainer._step_once = step_once
        monkeypatch.setattr(optimizer_steps, "read_trajectories", lambda _: self.read)
        monkeypatch.setattr(
            accounts, "read_token_sums", lambda batch: [sums_of(key) for key in batch.keys]
        )
        monkeypatch.setattr(
            accounts, "read_whole", lambda some, **_: {t.key: replace(t) for t in some}
        )
        monkeypatch.setattr(
            exact_updates,
            "lay_out",
            lambda batch, *_: (batch, [batch.keys[:1], batch.keys[1:]], {}),
        )
        monkeypatch.setattr(module.PPOTrainerSeparateAsync, "on_step_begin", lambda _: None)
        assert module.PPOTrainerSeparateAsync.step is PPOTrainer.step
        self.trainer = trainer

    def keep(self, trajectories: Sequence[TrajectoryRecord]) -> list[LedgerEntry]:
        self.ledger.append([name_of(t.uid) for t in trajectories])
        return []

    def step(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        self.trainer.global_steps += 1
        self.trainer.on_step_begin()
        self.trainer.step(metrics, {})
        self.trainer._writer.flush()
        return metrics

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.path / f"{self.trainer.global_steps}.jsonl")

    def on_disk(self) -> list[str]:
        return [name_of(line["key"].split("_")[0]) for line in self.lines()]


def batch(*names: str, fault: str | None = None) -> list[TrajectoryRecord]:
    return [trajectory(name, fault) for name in names]


def test_every_mini_batch_of_a_step_reaches_its_accounts_and_none_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = [batch("a", "b"), batch("c", "d"), batch("e", "f"), batch("g", "h")]
    books = Books(tmp_path, monkeypatch, parts)
    for number, step in enumerate(("abcd", "efgh"), start=1):
        metrics = books.step()
        assert books.ledger[-1] == list(step)
        assert books.trainer.plan.trained == number * GROUPS
        assert books.on_disk() == list(step)
        assert metrics["mixed/nq/count"] == GROUPS
        assert metrics["mixed/nq/advantage_share"] == 1
        assert [line["advantage"] for line in books.lines()] == [ord(name) for name in step]
        assert [line["update"] for line in books.lines()] == [1, 2, 2, 3]


def test_a_mini_batch_that_stops_the_run_leaves_the_step_so_far_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = [batch("a", "b"), [*batch("c", fault="503"), trajectory("d", "503")]]
    books = Books(tmp_path, monkeypatch, parts)
    with pytest.raises(TooManyFaults) as raised:
        books.step()
    assert books.on_disk() == list("abcd")
    assert books.lines()[0]["advantage"] is None
    assert books.ledger == []
    for words in ("step=1", "'infra_error': 2", "tool=search, last error: 503", "1.jsonl"):
        assert words in str(raised.value)


def test_no_step_is_trained_after_the_launcher_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    books = Books(tmp_path, monkeypatch, [batch("a"), batch("b"), batch("c"), batch("d")])
    books.trainer._run_dir, books.trainer._is_launched = tmp_path, True
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        books.step()
    assert books.ledger == [["a", "b"]]
    with pytest.raises(LauncherEnded, match=r"step=2: the launcher .* start the same command"):
        books.step()
    assert books.ledger == [["a", "b"]]


def test_groups_that_the_filter_dropped_count_among_the_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dropped = [GroupFaults(source="nq", trajectories=2, faults=("tool=search, last error: 503",))]
    books = Books(tmp_path, monkeypatch, [batch("a", "b")], dropped * 20)
    with pytest.raises(TooManyFaults, match=r"lost 20 of 42 .*last error: 503") as raised:
        books.trainer._faults = FaultWindow(0.4, steps=5)
        books.step()
    assert "mixed.infra_error_limit=0.4" in str(raised.value)


# --- rollout against trainer -----------------------------------------------------------------


def compared(
    monkeypatch: pytest.MonkeyPatch, ours: list[float], theirs: list[float], **mixed: Any
) -> Any:
    """A trainer whose one trajectory has these log-probs; the third token is a tool's."""
    trainer: Any = object.__new__(MixedSeparateAsyncTrainer)
    gap = (torch.tensor(ours[:2]).exp() - torch.tensor(theirs[:2]).exp()).abs().max()
    trainer.mixed = MixedConfig.model_construct(**mixed)
    trainer._state_masking, trainer._temperatures = True, {}
    trainer.global_steps, trainer.trainer_mode = 1, "sync"
    trainer._trained, trainer._take_trajectories = dict.fromkeys(ROW.keys, 1), lambda: None
    columns = {
        "rollout_log_probs": torch.tensor([ours]),
        "old_log_probs": torch.tensor([theirs]),
        "response_mask": torch.tensor([[1, 1, 0]]),
    }
    monkeypatch.setattr(optimizer_steps, "fetch", lambda *_: columns)

    def verls(self: object, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        metrics["training/rollout_probs_diff_valid"] = 1
        metrics["training/rollout_probs_diff_max"] = float(gap)
        return batch

    monkeypatch.setattr(module.PPOTrainerSeparateAsync, "_compute_old_log_prob", verls)
    return trainer


ROW = KVBatchMeta(partition_id="train", keys=["u.7.nq_0_0"], tags=[{"response_len": 3}])


def drift(warn: float | None) -> Any:
    return MixedConfig.model_fields["drift"].default.model_copy(update={"warn_probs_diff": warn})


def test_a_log_prob_that_is_no_number_is_the_largest_difference(monkeypatch, caplog):
    trainer = compared(
        monkeypatch,
        [-0.1, -0.2, -0.3],
        [-0.5, math.nan, math.nan],
        max_probs_diff=0.9,
        drift=drift(0.9),
    )
    with pytest.raises(RuntimeError, match=r"max=nan is above .*draw=7 token=1: .* nan in"):
        trainer._compute_old_log_prob(ROW, {})
    assert "drift" in caplog.text


@pytest.mark.parametrize(
    ("mode", "oldest", "trained", "is_compared"),
    [
        ("sync", 0, True, True),
        ("separate_async", 4, True, True),
        ("separate_async", 3, True, False),  # the engine had older weights
        ("separate_async", 3, False, True),  # but no token of them is trained
    ],
)
def test_rollout_and_trainer_are_compared_if_all_trained_tokens_are_on_policy(
    monkeypatch, mode, oldest, trained, is_compared
):
    trainer = compared(
        monkeypatch, [-0.1, -0.2, 0.0], [-3.0, -0.2, 0.0], max_probs_diff=0.1, drift=drift(None)
    )
    trainer.trainer_mode, trainer.global_steps = mode, 5
    trainer._trained = dict.fromkeys(ROW.keys, 1) if trained else {}
    tags = [{"response_len": 3, "min_global_steps": oldest, "max_global_steps": 4}]
    batch = KVBatchMeta(partition_id="train", keys=ROW.keys, tags=tags)
    with pytest.raises(RuntimeError) if is_compared else nullcontext():
        trainer._compute_old_log_prob(batch, {})


def test_a_number_under_a_mask_of_zero_is_not_compared(monkeypatch):
    trainer = compared(
        monkeypatch,
        [-0.1, -0.2, 0.0],
        [-0.1, -0.3, math.nan],
        max_probs_diff=0.5,
        drift=drift(None),
    )
    trainer._compute_old_log_prob(ROW, {})
    assert "token=1" in trainer._worst_token(ROW)


def test_a_step_writes_the_groups_that_it_may_and_keeps_the_files_of_the_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pair = [*batch("a", "a"), *batch("b")]
    books = Books(tmp_path, monkeypatch, [pair, batch("c", "d")] * 3)
    limits = {"trajectory_sample": 3, "trajectory_sample_step": 1, "trajectory_keep": 2}
    books.trainer.mixed = books.trainer.mixed.model_copy(update=limits)
    sent: list[tuple[object, ...]] = []
    books.trainer._artifacts = SimpleNamespace(log=lambda *given: sent.append(given))
    for _ in range(3):
        books.step()
        assert books.on_disk() == ["a", "a"]
        step, path = books.trainer.global_steps, books.path / f"{books.trainer.global_steps}.jsonl"
        assert sent.pop() == ("trajectories", step, path) and sent == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.jsonl", "3.jsonl"]


def test_a_validation_writes_its_records_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer: Any = object.__new__(MixedSeparateAsyncTrainer)
    trainer.global_steps, trainer.validation_dir = 8, tmp_path / "validation"
    trainer._writer = FileWriter()
    seen: dict[str, Any] = {}

    def theirs(self: Any, sources: Any, uids: Any, infos: dict[str, Any], *_: Any, **__: Any):
        seen.update(infos)
        return {"val-core/nq/acc/mean@1": 0.5}

    monkeypatch.setattr(PPOTrainer, "_val_metrics_update", theirs)
    records = [record(row="1", step=8), record(row="0", reward=0.0, step=8)]
    infos = {
        "reward": [1.0, 0.0, 0.0],
        RECORD: [*(json.dumps(line_of(each)) for each in records), None],
    }

    metrics = trainer._val_metrics_update(["nq"] * 3, ["a", "b", "c"], infos, [2, 2, 2])

    trainer._writer.flush()
    assert read_records(tmp_path / "validation" / "8.jsonl")[0] == records[::-1]
    assert seen == {"reward": [1.0, 0.0, 0.0]}
    assert metrics["val-core/nq/acc/mean@1"] == 0.5
    assert metrics["mixed/nq/val/reward/mean"] == metrics["mixed/nq/val/pass_rate"] == 0.5
    assert metrics["mixed/nq/val/count"] == 2


def test_a_lost_trajectory_is_counted_in_the_ledger_and_lowers_no_mean() -> None:
    trainer: Any = object.__new__(MixedSeparateAsyncTrainer)
    trainer.plan = SimpleNamespace(rows=lambda source, draws: [7])
    trainer.global_steps = 3
    whole, lost = trajectory("a"), trajectory("a", "timeout")
    turns = [Turn(tokens=2)]
    group = [replace(whole, reward=1.0, acc=1.0, turns=turns), replace(lost, turns=turns)]
    entry = trainer._entry(make_uid("nq", ord("a")), "trained", group)
    assert (entry.trajectories, entry.judged, entry.solved) == (2, 1, 1)
    assert (entry.reward_mean, entry.row) == (1.0, 7)
