"""Ledger and metrics of a recipe: each step once, exact values, whatever a source is named."""

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="the accounts are of verl's trainer")

from verl.trainer.ppo.v1.utils import MetricsAggregator

from samplers import queue_view, recipe_accounts
from samplers.audit import audit, plans_in
from samplers.door import Door
from samplers.faults import RecipeError
from samplers.ledger import LedgerEntry, read_ledger
from samplers.recipe_accounts import RecipeAccounts
from samplers.uid import group_of, make_uid, prompt_of
from tests.samplers.test_door import BATCH_SIZE, SIZES, trainer

BATCHES = 4
REWARDS = {"minif2f": (0.0, 0.5), "summarize": (0.25, 1.0), "openai/gsm8k": (-1.0, 0.0)}
"""Source -> rewards of the trajectories of each of its groups; `acc` of summarize is 1."""


class Queue:
    """A TransferQueue with scores of `REWARDS`, and prompts under way."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.acc: Any = 1.0

    def kv_list(self, partition_id: str) -> dict[str, dict[str, dict[str, Any]]]:
        return {partition_id: {uid: {"is_prompt": True} for uid in self.under_way}}

    def kv_batch_get(self, *, keys: list[str], **_: Any) -> dict[str, Any]:
        scores, extras = list[Any](), list[Any]()
        for key in keys:
            source, session = prompt_of(group_of(key))[0], int(key.split("_")[1])
            scores.append([0.0, REWARDS[source][session]])
            acc = {"acc": self.acc} if source == "summarize" else {}
            extras.append({"reward_extra_info": acc})
        return {"rm_scores": torch.tensor(scores), "extra_fields": np.array(extras, dtype=object)}


class Run:
    """A trainer whose batches are those of the plan."""

    def __init__(
        self,
        folder: Path,
        step: int = 1,
        steps: int = 9,
        resume_mode: str = "auto",
        resume_from: str | None = None,
    ) -> None:
        self.trainer = trainer(
            BATCHES,
            step,
            total_training_steps=steps,
            reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=["a worker"]),
        )
        self.trainer.config.trainer = SimpleNamespace(
            default_local_dir=str(folder), resume_mode=resume_mode, resume_from_path=resume_from
        )
        self.accounts = RecipeAccounts(door := Door(self.trainer))
        self.plan = door.plan
        self.plan.take((step - 1) * BATCH_SIZE)
        self.ledger = folder / recipe_accounts.LEDGER

    def sample(self, empty: int = 0) -> dict[str, float]:
        """The next batch, in which so many groups have no row."""
        drawn = self.plan.take(BATCH_SIZE // BATCHES)
        uids = [make_uid(prompt.source, prompt.draw) for prompt in drawn]
        self.trainer.replay_buffer.selected = uids
        keys = [f"{uid}_{session}_0" for uid in uids[empty:] for session in range(2)]
        return self.accounts.sampled(SimpleNamespace(keys=keys, partition_id="train"))

    def train(self, empty: int = 0) -> list[dict[str, float]]:
        metrics = [self.sample(empty) for _ in range(BATCHES)]
        self.trainer.global_steps += 1
        return metrics

    def entries(self) -> list[LedgerEntry]:
        return [line for line in read_ledger(self.ledger) if isinstance(line, LedgerEntry)]

    def problems(self) -> tuple[str, ...]:
        lines = read_ledger(self.ledger)
        return audit(lines, plans_in(lines)[-1][1]).problems


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    own = Queue()
    for module in (recipe_accounts, queue_view):
        monkeypatch.setattr(module, "tq", own)
    return own


def test_verl_reduces_the_metrics_of_a_step_to_themselves(tmp_path: Path):
    run, step = Run(tmp_path), MetricsAggregator()
    batches = run.train()
    for metrics in batches:
        step.add_step_metrics(metrics, sample_count=10)
    assert batches[:3] == [{}, {}, {}]
    found = step.get_aggregated_metrics()
    assert found == batches[3]
    counts = run.plan.counts(0)
    assert found.pop("mixed/ratio_error/max") == 0
    assert found.pop("mixed/ratio_error/cumulative_max") < 1
    assert found == {
        **{f"mixed/{name}/count": count for name, count in counts.items()},
        "mixed/minif2f/reward/mean": 0.25,
        "mixed/summarize/reward/mean": 0.625,
        "mixed/openai/gsm8k/reward/mean": -0.5,
        "mixed/minif2f/pass_rate": 0.0,
        "mixed/summarize/pass_rate": 1.0,
        "mixed/openai/gsm8k/pass_rate": 0.0,
    }


def test_the_ledger_has_each_prompt_of_a_step_with_its_rewards(tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    run.train()
    assert run.problems() == ()
    assert Counter(entry.source for entry in run.entries()) == run.plan.counts_between(0, 40)
    for entry in run.entries():
        assert (entry.outcome, entry.trajectories, entry.judged) == ("trained", 2, 2)
        assert entry.reward_mean == sum(REWARDS[entry.source]) / 2
        assert entry.solved == 2 * (entry.source == "summarize")
        assert entry.row == run.plan.rows(entry.source, [entry.draw])[0]


def test_a_run_that_goes_on_from_a_checkpoint_writes_the_later_steps_anew(tmp_path: Path):
    run = Run(tmp_path)
    for _ in range(3):
        run.train()
    whole = run.entries()
    run.sample()  # and killed in step 4
    resumed = Run(tmp_path, step=2)
    resumed.train()
    assert [entry.step for entry in resumed.entries()] == [1] * BATCH_SIZE + [2] * BATCH_SIZE
    resumed.train()
    assert resumed.entries() == whole
    assert resumed.problems() == ()


def test_a_new_run_in_the_folder_keeps_the_ledger_of_the_one_before(tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    run.train()
    again = Run(tmp_path, resume_mode="disable")
    again.train()
    assert again.problems() == () and len(again.entries()) == BATCH_SIZE
    (kept,) = (path for path in tmp_path.glob("ledger.*.jsonl"))
    assert sum(isinstance(line, LedgerEntry) for line in read_ledger(kept)) == 2 * BATCH_SIZE


def test_a_run_that_goes_on_in_another_folder_takes_the_ledger_with_it(tmp_path: Path):
    run = Run(tmp_path / "old")
    run.train()
    run.train()
    path = str(tmp_path / "old" / "global_step_1")
    again = Run(tmp_path / "new", step=2, resume_mode="resume_path", resume_from=path)
    again.train()
    assert again.problems() == () and len(again.entries()) == 2 * BATCH_SIZE


def test_rows_that_changed_since_the_checkpoint_end_the_run(tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    again = Run(tmp_path, step=2)
    again.trainer.train_dataset.column.reverse()
    again.trainer.train_dataset.index = again.trainer.train_dataset.sources()
    with pytest.raises(RecipeError, match=r"row \d+ of .* was .*, now "):
        again.train()


@pytest.mark.parametrize("acc", [None, "correct", [1.0]])
def test_an_acc_that_is_no_number_is_passed_over(acc: Any, tmp_path: Path, queue: Queue):
    queue.acc = acc
    assert Run(tmp_path).train()[-1]["mixed/summarize/pass_rate"] == 0.5


def test_groups_without_a_row_failed_and_one_warning_says_how_to_replace_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        metrics, _ = (run.train(empty=1)[-1] for _ in range(2))
    outcomes = Counter((entry.step, entry.outcome) for entry in run.entries())
    assert outcomes == {(1, "trained"): 16, (1, "failed"): 4, (2, "trained"): 16, (2, "failed"): 4}
    assert sum(metrics[f"mixed/{name}/count"] for name in SIZES) == 16
    assert metrics["mixed/ratio_error/max"] >= 1
    [line] = caplog.messages
    assert "step=1" in line and "trainer.v1.sampler.sync_refill_failed_groups=true" in line


def test_the_last_step_names_what_was_given_up_and_what_is_unfinished(tmp_path: Path, queue: Queue):
    run = Run(tmp_path, steps=1)
    stale, under_way = (make_uid("minif2f", 90 + place) for place in range(2))
    queue.under_way = [under_way]
    run.trainer.replay_buffer.given_up = [SimpleNamespace(uid=stale, why="stale")]
    run.train()
    last = {entry.draw: entry.outcome for entry in run.entries() if entry.outcome != "trained"}
    assert last == {90: "stale", 91: "unfinished"}


def test_without_rewards_at_sampling_prompts_are_counted_all_the_same(tmp_path: Path):
    run = Run(tmp_path)
    run.trainer.reward_loop_manager.reward_loop_worker_handles = None
    metrics = run.train()[-1]
    assert {name for name in metrics if "ratio_error" not in name} == {
        f"mixed/{name}/count" for name in SIZES
    }
    assert {(entry.outcome, entry.reward_mean) for entry in run.entries()} == {("trained", None)}
