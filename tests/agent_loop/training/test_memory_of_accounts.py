"""The memory of the trainer's accounts grows with trajectories, not with their tokens.

Up to release 1.0.0 the accounts kept 118 bytes a token through the step.
"""

import gc
import pickle
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.trainer.ppo.v1")

import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from agent_loop.records.trajectory_record import StopReason, Turn, to_columns
from agent_loop.training import trained_batch
from agent_loop.training.alarms import FaultWindow
from agent_loop.training.file_writer import FileWriter
from agent_loop.training.trainer import MixedSyncTrainer
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from config.schema import MixedConfig, SourceConfig
from samplers import exact_updates
from samplers.uid import make_uid
from tests.fakes.engine import CharTokenizer

stacked: Any = NonTensorStack
"""Known to pyright as abstract."""

GROUPS, SIZE = 16, 4
SHORT, LONG = 300, 3000
PART = 2000
"""Tokens that are read together, or one trajectory."""

BYTES_PER_TOKEN = 250
"""Of a part: its columns as arrays, and the lists and texts of a trajectory that is compared."""

CODEC = CharTokenizer()


class Queue:
    """TransferQueue: every read makes objects of its own, as after a transfer."""

    def __init__(self, tokens: int) -> None:
        trajectory = Trajectory([1])
        trajectory.add_model_tokens([97 + i % 20 for i in range(tokens)], [-0.5] * tokens)
        trajectory.cut_turn(tokens, CODEC.decode(trajectory.response_ids))
        rollout = Rollout(
            trajectory=trajectory,
            stop_reason=StopReason.ANSWERED,
            answer="4",
            turns=[Turn(tokens=tokens, min_global_steps=0)],
        )
        record = rollout.record()
        record.trained_tokens, record.reward_parts = tokens, {"score": 1.0}
        facts, texts = to_columns(record)
        extra = {"reward_extra_info": {"acc": 1.0}, "mixed": facts}
        floats = torch.full((tokens,), -0.5)
        self.row: dict[str, Any] = {
            "prompts": torch.ones(1, dtype=torch.int64),
            "responses": torch.tensor(trajectory.response_ids),
            "response_mask": torch.ones(tokens, dtype=torch.int64),
            "rollout_log_probs": floats,
            "old_log_probs": floats,
            "entropy": floats,
            "advantages": floats,
            "data_source": "nq",
            "row_id": "nq:0",
            "mixed_texts": texts,
            "extra_fields": extra,
        }

    def kv_batch_get(
        self, *, keys: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        columns: dict[str, Any] = {}
        for name in (name for name in select_fields if name in self.row):
            value = self.row[name]
            if isinstance(value, torch.Tensor):
                rows = [value] * len(keys)
                columns[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            else:
                columns[name] = stacked(*(pickle.loads(pickle.dumps(value)) for _ in keys))
        return TensorDict(columns, batch_size=len(keys))

    def kv_list(self, partition_id: str) -> dict[str, Any]:
        return {}


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A trainer in its first step, which writes no trajectory."""
    made: Any = object.__new__(MixedSyncTrainer)
    rollout = {"n": SIZE, "temperature": 1.0}
    actor = {"ppo_mini_batch_size": GROUPS}
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": GROUPS},
            "actor_rollout_ref": {"actor": actor, "rollout": rollout},
            "trainer": {"logger": ["console"], "test_freq": -1},
        }
    )
    made.mixed = MixedConfig.model_construct(
        sources={"nq": SourceConfig.model_construct(ratio=1.0)},
        trajectory_sample=0,
        fail_on_loop_error=False,
    )
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    made.parameter_sync_step, made.local_trigger_step, made.global_steps = 1, 0, 1
    made.total_training_steps, made.trainer_mode = 9, "sync"
    made.trajectory_dir, made._state_masking = tmp_path, True
    made._temperatures, made._trajectories, made._token_sums = {}, [], []
    made._prepared, made._trained = None, {}
    made._reader, made._writer = ThreadPoolExecutor(1), FileWriter()
    made._faults = FaultWindow(0.5, steps=5)
    made.replay_buffer = SimpleNamespace(take_losses=list, take_waits=dict, lead=None)
    made.plan = SimpleNamespace(batch_size=GROUPS)
    made._quota = lambda *_: {"nq": GROUPS}
    made._sizes = lambda: None
    made.door = SimpleNamespace(ratio_errors=lambda _: {})
    made._write_ledger = lambda *_: []
    monkeypatch.setattr(exact_updates, "lay_out", lambda batch, *_: (batch, [batch.keys], {}))
    monkeypatch.setattr("agent_loop.turns.codec.codec_of", lambda _: CODEC)
    monkeypatch.setattr(trained_batch, "TOKENS_AT_ONCE", PART)
    yield made
    made._reader.shutdown()
    made._writer.shutdown()


def accounts_of(trainer: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A step's accounts; bytes that they keep until its end, and their peak, as metrics."""
    monkeypatch.setattr(trained_batch, "tq", Queue(tokens))
    uids = [make_uid("nq", draw) for draw in range(GROUPS)]
    keys = [f"{uid}_{session}_0" for uid in uids for session in range(SIZE)]
    tag = {"prompt_len": 1, "response_len": tokens, "seq_len": tokens + 1}
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[tag] * len(keys))
    trainer.on_step_begin()
    metrics: dict[str, Any] = {}
    gc.collect()
    tracemalloc.start()
    try:
        trainer._balance_batch(batch, metrics)
        trainer._take_trajectories()
        trainer._begin_accounts(batch)
        trainer._keep_accounts(batch, metrics)
        gc.collect()
        metrics["kept"], metrics["peak"] = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return metrics


@pytest.mark.slow
def test_the_memory_of_a_steps_accounts_does_not_grow_with_the_tokens(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
):
    accounts_of(trainer, SHORT, monkeypatch)  # warms up
    short, long = (accounts_of(trainer, tokens, monkeypatch) for tokens in (SHORT, LONG))
    assert short["mixed/nq/response_length/mean"] == SHORT
    assert long["mixed/nq/response_length/mean"] == LONG
    assert long["mixed/drift/checked"] == GROUPS * SIZE / 16 and not long["mixed/drift/found"]
    assert long["mixed/nq/entropy/mean"] == -0.5
    of_part = BYTES_PER_TOKEN * max(PART, LONG)
    assert long["peak"] < short["peak"] + of_part < GROUPS * SIZE * LONG * 30
    assert long["kept"] < short["kept"] + GROUPS * SIZE * (LONG - SHORT)  # less than 1 byte each
