"""Which rows of a batch an estimator judges, and what the others get; TransferQueue in memory."""

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
    queue, keys = Queue(), list[str]()
    names: dict[str, str] = {}
    for draw, (name, rewards) in enumerate(groups.items()):
        uid = make_uid("nq", draw)
        names[uid] = name
        for session, reward in enumerate(rewards):
            keys.append(f"{uid}_{session}_0")
            queue.rows[keys[-1]] = {
                "uid": uid,
                "response_mask": torch.tensor([float(reward != 9.0), 0.0]),
                "rm_scores": torch.tensor([reward, 0.0]),
                "old_log_probs": torch.zeros(2),
            }
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
            },
            "actor_rollout_ref": {"rollout": {"n": 3}},
        }
    )
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
    done = trainer._compute_advantage(batch, {})
    assert done.keys == keys and {"advantages", "returns"} <= {*done.fields}
    found: dict[str, list[float]] = {name: [] for name in groups}
    for key in keys:
        found[names[key.split("_")[0]]].append(float(queue.rows[key]["advantages"][0]))
    return found


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
