"""Which rows of a batch an estimator judges, and what the others get; TransferQueue in memory."""

import math
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from agent_loop.training import trained_batch
from agent_loop.training.estimators import UNTRIED, WITHIN_GROUPS
from agent_loop.training.trainer import MixedSyncTrainer
from samplers.uid import make_uid

stacked: Any = NonTensorStack
"""Known to pyright as abstract."""

REWARDS = {"even": [1.0, 0.0, 0.5], "alone": [0.7, 9.0], "lost": [9.0, 9.0]}
"""Of groups; 9 where infrastructure ended the trajectory."""


class Queue:
    """What of TransferQueue the trainer uses here."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(
        self, *, keys: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        known = [name for name in select_fields if name in self.rows[keys[0]]]
        columns: dict[str, Any] = {}
        for name in known:
            column = [self.rows[key][name] for key in keys]
            is_tensor = isinstance(column[0], torch.Tensor)
            columns[name] = nested(column) if is_tensor else stacked(*column)
        return TensorDict(columns, batch_size=len(keys))

    def kv_batch_put(
        self, *, keys: list[str], partition_id: str, fields: TensorDict
    ) -> KVBatchMeta:
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(0), strict=True):
                self.rows[key][str(name)] = value
        return KVBatchMeta(
            partition_id="train", keys=keys, tags=[{}] * len(keys), fields=[*self.rows[keys[0]]]
        )


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def advantages(estimator: str, monkeypatch: pytest.MonkeyPatch, **groups: list[float]) -> Any:
    """group -> the advantage of each row, on its one token of the policy."""
    queue = Queue()
    names: dict[str, str] = {}
    for draw, (name, rewards) in enumerate(groups.items()):
        uid = make_uid("nq", draw)
        names[uid] = name
        for session, reward in enumerate(rewards):
            queue.rows[f"{uid}_{session}_0"] = {
                "uid": uid,
                "response_mask": torch.tensor([float(reward != 9.0), 0.0]),
                "rm_scores": torch.tensor([reward, 0.0]),
                "old_log_probs": torch.zeros(2),
            }
    compute_advantages(queue, estimator, monkeypatch)
    found: dict[str, list[float]] = {name: [] for name in groups}
    for key, row in queue.rows.items():
        found[names[key.split("_")[0]]].append(float(row["advantages"][0]))
    return found


def compute_advantages(
    queue: Queue, estimator: str, monkeypatch: pytest.MonkeyPatch, **correction: Any
) -> dict[str, float]:
    """Write the advantages of all rows into the queue, by our trainer and verl's; the metrics."""
    monkeypatch.setattr(trained_batch, "tq", queue)
    monkeypatch.setattr(trainer_base, "tq", queue)
    trainer: Any = object.__new__(MixedSyncTrainer)
    trainer.config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": estimator,
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "norm_adv_by_std_in_grpo": True,
                "rollout_correction": correction,
            },
            "actor_rollout_ref": {"rollout": {"n": 3}},
        }
    )
    keys, metrics = [*queue.rows], dict[str, float]()
    counts = {key: int(queue.rows[key]["response_mask"].sum()) for key in keys}
    trainer._trained = {key: tokens for key, tokens in counts.items() if tokens}
    batch = KVBatchMeta(
        partition_id="train",
        keys=keys,
        tags=[{"response_len": len(queue.rows[key]["response_mask"])} for key in keys],
    )
    done = trainer._compute_advantage(batch, metrics)
    assert done.keys == keys and {"advantages", "returns"} <= {*done.fields}
    return metrics


@pytest.mark.parametrize("estimator", ("state_masked_grpo", *WITHIN_GROUPS))
def test_who_is_left_alone_in_its_group_is_compared_with_nobody(
    estimator: str, monkeypatch: pytest.MonkeyPatch
):
    found = advantages(estimator, monkeypatch, **REWARDS)
    assert any(found["even"])
    assert found["alone"] == [0, 0] and found["lost"] == [0, 0]


@pytest.mark.parametrize("estimator", ("reinforce_plus_plus", "grpo", *UNTRIED))
def test_lost_trajectories_change_nobodys_advantage(
    estimator: str, monkeypatch: pytest.MonkeyPatch
):
    both = {"even": [1.0, 0.0, 0.5], "other": [0.2, 0.9, 0.1]}
    without = advantages(estimator, monkeypatch, **both)
    found = advantages(estimator, monkeypatch, **both, lost=[9.0, 9.0])
    assert found.pop("lost") == [0, 0]
    assert found == without


def test_a_batch_in_which_nobody_can_be_compared_has_no_advantage(monkeypatch: pytest.MonkeyPatch):
    assert advantages("rloo", monkeypatch, one=[0.3], two=[0.7, 9.0]) == {"one": [0], "two": [0, 0]}


def test_importance_weights_are_those_of_single_tokens_cut_at_the_threshold_and_0_off_the_mask(
    monkeypatch: pytest.MonkeyPatch,
):
    mask = [1.0, 0.0, 1.0, 1.0]
    old = {
        "stale": [-1.0, -0.5, -2.0, -0.1],
        "current": [-0.3, -3.0, -0.2, -1.0],
        "lost": [-1.0] * 4,
        "alone": [-1.0] * 4,
    }
    gaps = {  # log-prob of the trainer minus that of the rollout
        "stale": [0.4, 5.0, -0.7, 1.5],  # exp(1.5) is above the threshold
        "current": [0.0, 5.0, 0.0, 0.0],
        "lost": [3.0] * 4,
        "alone": [3.0] * 4,
    }
    group, other = make_uid("nq", 0), make_uid("nq", 1)
    uids = {"stale": group, "current": group, "lost": group, "alone": other}
    queue = Queue()
    for session, (name, uid) in enumerate(uids.items()):
        # the log-prob of a token that nobody sampled is 0.0 in the rollout
        rollout = [
            bit * (log_prob - gap)
            for bit, log_prob, gap in zip(mask, old[name], gaps[name], strict=True)
        ]
        queue.rows[f"{uid}_{session}_0"] = {
            "uid": uid,
            "response_mask": torch.tensor(mask) * (name != "lost"),
            "rm_scores": torch.tensor([0.0, 0.0, 0.0, float(session)]),
            "old_log_probs": torch.tensor(old[name]),
            "rollout_log_probs": torch.tensor(rollout),
        }

    metrics = compute_advantages(
        queue, "state_masked_grpo", monkeypatch, rollout_is="token", rollout_is_threshold=2.0
    )

    found = dict(zip(uids, queue.rows.values(), strict=True))
    wanted = [math.exp(0.4), 0.0, math.exp(-0.7), 2.0]
    assert found["stale"]["rollout_is_weights"].tolist() == pytest.approx(wanted)
    assert found["current"]["rollout_is_weights"].tolist() == pytest.approx([1, 0, 1, 1])
    assert found["lost"]["rollout_is_weights"].tolist() == [0] * 4
    assert found["stale"]["advantages"].tolist() == pytest.approx(
        [-(0.5**0.5) * x for x in mask], rel=1e-5
    )
    kept = [*(wanted[i] for i in (0, 2, 3)), 1, 1, 1, 2, 2, 2]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(kept) / len(kept))
    assert metrics["rollout_corr/rollout_is_max"] == 2
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(wanted[2])
