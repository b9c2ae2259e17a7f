"""What the trainer reads of rows in TransferQueue."""

import pickle
from typing import Any

import pytest

pytest.importorskip("verl.trainer.ppo.v1")

import torch
from tensordict import NonTensorStack, TensorDict

from agent_loop.records.trajectory_record import TrajectoryRecord, Turn, to_columns
from agent_loop.training import trained_batch
from agent_loop.training.session_loss import SESSION_SHARE

stacked: Any = NonTensorStack
"""Known to pyright as abstract."""


class Queue:
    """TransferQueue in a dict of rows."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows = rows

    def kv_batch_get(
        self, *, keys: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        columns: dict[str, Any] = {}
        for name in select_fields:
            if not all(name in self.rows[key] for key in keys):  # as TransferQueue
                continue
            values = [self.rows[key][name] for key in keys]
            if not isinstance(values[0], torch.Tensor):
                columns[name] = stacked(*pickle.loads(pickle.dumps(values)))
            elif values[0].dim():
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = torch.stack(values)
        return TensorDict(columns, batch_size=len(keys))


def row(
    score: float, tokens: list[int], *, fault: str | None = None, **more: Any
) -> dict[str, Any]:
    """A row as a loop worker puts it; of two tokens, `tokens` have mask 1."""
    record = TrajectoryRecord(
        stop_reason="infra_error" if fault else "answered",
        turns=[Turn(tokens=2)],
        fault=fault,
        fault_tool="search" if fault else "",
        reward_parts={"score": score},
        trained_tokens=sum(tokens),
    )
    facts, texts = to_columns(record)
    return {
        "extra_fields": {"mixed": facts, "reward_extra_info": {"acc": score, "f1": 0.5}},
        "mixed_texts": texts,
        "prompts": torch.tensor([1]),
        "responses": torch.tensor([5, 6]),
        "response_mask": torch.tensor(tokens),
        "rollout_log_probs": torch.tensor([-0.5, -0.25]),
    }


def test_a_session_ended_as_its_last_row_and_is_trained_if_a_row_is(monkeypatch):
    rows = {
        "a_0_0": row(0.0, [1, 1]),
        "a_0_1": row(1.0, [0, 0]),
        "a_1_0": row(0.0, [0, 0], fault="503"),
        "a_2_0": row(0.0, [1, 0]),
    }
    del rows["a_2_0"]["extra_fields"]["mixed"]["trained_tokens"]  # as release 1.0.0 wrote it
    monkeypatch.setattr(trained_batch, "tq", Queue(rows))
    ended = trained_batch.read_outcomes("train", list(rows))
    assert list(ended) == ["a_0", "a_1", "a_2"]
    assert [own.is_trained for own in ended.values()] == [True, False, True]
    assert [own.is_judged for own in ended.values()] == [True, False, True]
    assert [own.is_solved for own in ended.values()] == [True, False, False]
    assert [own.fault for own in ended.values()] == [None, "tool=search, last error: 503", None]
    assert (ended["a_0"].reward, ended["a_0"].info["f1"]) == (1.0, 0.5)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_whole_record_has_what_the_optimizer_saw_of_the_tokens_with_mask_1(
    is_whole: bool, monkeypatch
):
    columns = {
        "old_log_probs": torch.tensor([-0.75, 9.0]),
        "rollout_is_weights": torch.tensor([0.5, 9.0]),
        SESSION_SHARE: torch.tensor(0.25),
    }
    rows = {"a_0_0": row(1.0, [1, 0]) | columns, "a_1_0": row(1.0, [0, 0]) | columns}
    monkeypatch.setattr(trained_batch, "tq", Queue(rows))
    records = [record for record, _ in trained_batch.read_records("train", list(rows)).values()]
    for key, record in zip(rows, records, strict=True):
        record.key = key
    compared = trained_batch.read_whole(records)
    assert compared["a_0_0"].old_log_probs is None
    whole = trained_batch.read_whole(records, token_values=is_whole)
    seen = whole["a_0_0"]
    assert seen.old_log_probs is not None and seen.importance is not None
    assert (seen.old_log_probs.sum, seen.importance.sum, seen.session_share) == (-0.75, 0.5, 0.25)
    assert seen.old_log_probs.values == ([-0.75] if is_whole else None)
    assert seen.old_log_probs.hash != seen.importance.hash
    assert [*seen.response_mask] == [1, 0] and seen.prompt_ids[0] == 1
    assert whole["a_1_0"].old_log_probs is whole["a_1_0"].importance is None
    assert not len(records[0].response_ids), "the tokens are in the copy alone"


def test_a_column_of_one_batch_of_a_step_is_not_lost_beside_a_batch_without_it(monkeypatch):
    share = {SESSION_SHARE: torch.tensor(0.25)}
    unweighted = {"rollout_is_weights": torch.zeros(2)}  # of a row that is in no advantage
    rows = {"a_0_0": row(1.0, [1, 0]) | share, "b_0_0": row(1.0, [1, 0]) | unweighted}
    monkeypatch.setattr(trained_batch, "tq", Queue(rows))
    records = [record for record, _ in trained_batch.read_records("train", list(rows)).values()]
    for update, (key, record) in enumerate(zip(rows, records, strict=True), 1):
        record.key, record.update = key, update
    whole = trained_batch.read_whole(records, token_values=False)
    assert [record.session_share for record in whole.values()] == [0.25, None]
    assert whole["b_0_0"].importance is None
