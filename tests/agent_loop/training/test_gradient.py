"""What trains: the gradient of verl's own loss on our masks, advantages and row counts.

verl's `_update_actor` (under ours), `FSDPEngine.forward_backward_batch` and `ppo_loss` run as they
are. In place of a model, each token's log-prob and entropy are parameters of their own, so that the
gradient of every token can be read off.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl.trainer.ppo.v1")  # our modules stand in the middle of its imports

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch._C._distributed_c10d import HashStore
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.utils.losses import ppo_loss

from agent_loop.training.advantage import compute_state_masked_grpo_advantage
from agent_loop.training.trainer import MixedSyncTrainer
from agent_loop.turns.trajectory import StopReason
from tests.agent_loop.turns.test_native import USER, asks, play, says
from tests.fakes.call_templates import TEMPLATES

pytestmark = pytest.mark.slow

PROMPT = 2
"""Tokens of every prompt."""

KL, ENTROPY, HORIZON = 0.1, 0.03, 7

FIELDS = ["advantage", "old", "new", "ref", "entropy", "importance"]
"""Of `Row`: what a token brings to the loss."""

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory as the loss sees it; all of one length, (T,)."""

    mask: list[int]
    old: list[float]
    new: list[float]
    ref: list[float]
    entropy: list[float]
    advantage: list[float]
    importance: list[float]
    """Weights of the importance correction."""

    def changed(self, field: str, token: int, value: float) -> "Row":
        values = list(getattr(self, field))
        values[token] = value
        return replace(self, **{field: values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Of one update: the loss, and its derivatives by token."""

    loss: float
    log_prob: list[list[float]]  # (B, T), ragged
    entropy: list[list[float]]  # (B, T), ragged
    extra_info: dict[str, Any]
    """What reached the workers."""


class TokenEngine(FSDPEngine):
    """verl's engine around log-probs and entropies that are parameters."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.ulysses_sequence_parallel_size = 1
        self.engine_config: Any = SimpleNamespace()
        self.module: Any = None
        self.log_probs = [_sequence(row.new) for row in rows]
        self.entropies = [_sequence(row.entropy) for row in rows]

    def get_data_parallel_group(self) -> None:
        return None

    def get_data_parallel_size(self) -> int:
        return 1

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        own = micro_batch["row"].tolist()
        output = {
            "log_probs": _nested([self.log_probs[row] for row in own]),
            "entropy": _nested([self.entropies[row] for row in own]),
        }
        loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
        return loss, {"loss": loss.detach().item(), "metrics": metrics, "model_output": {}}


def _sequence(values: list[float]) -> torch.Tensor:
    """(P + T,) as the model puts it out: what it says of a token stands one place before it."""
    padded = [0.0] * (PROMPT - 1) + values + [0.0]
    return torch.tensor(padded, dtype=torch.float64, requires_grad=True)


def _nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), offsets=offsets)


def _column(rows: Sequence[Row], field: str) -> torch.Tensor:
    return _nested([torch.tensor(getattr(row, field), dtype=torch.float64) for row in rows])


class Workers:
    """The training processes: one, which keeps the gradients of all updates of a step."""

    def __init__(self, rows: Sequence[Row], config: ActorConfig, micro: int) -> None:
        self.rows, self.micro = rows, micro
        self.engine = TokenEngine(rows)
        self.loss_function: Any = partial(ppo_loss, config=config)
        self.columns: dict[str, torch.Tensor] = {}
        """Further columns of the batch: (B,)."""

    def set_loss_fn(self, loss_function: Any) -> None:
        self.loss_function = loss_function

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        self.extra_info = copy.deepcopy(batch.extra_info) or {}  # as on its way to a worker
        size = self.extra_info["mini_batch_size"]
        self.losses: list[float] = []
        for first in range(0, len(self.rows), size):
            self._update(range(first, first + size))
        return {"metrics": {"mfu": [0.0]}}

    def _update(self, own: range) -> None:
        rows = [self.rows[row] for row in own]
        masks = [torch.tensor(row.mask) for row in rows]
        data = TensorDict(
            {
                "row": torch.tensor(own),
                "prompts": _nested([torch.zeros(PROMPT, dtype=torch.long)] * len(rows)),
                "responses": _nested(masks),
                "response_mask": _nested(masks),
                "loss_mask": _nested(masks),
                "old_log_probs": _column(rows, "old"),
                "ref_log_prob": _column(rows, "ref"),
                "advantages": _column(rows, "advantage"),
                "rollout_is_weights": _column(rows, "importance"),
                **{name: column[list(own)] for name, column in self.columns.items()},
            },
            batch_size=len(rows),
        )
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=self.micro,
            global_batch_size=self.extra_info["global_batch_size"],
        )
        output: Any = self.engine.forward_backward_batch(data, self.loss_function)
        self.losses += output["loss"]


def actor_config(mode: str, **options: Any) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        loss_scale_factor=HORIZON,
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type=options.pop("kl_loss_type", "low_var_kl"),
        entropy_coeff=ENTROPY,
        **options,
    )


def make_trainer(
    rows: Sequence[Row], mode: str, updates: int = 1, keys: Sequence[str] | None = None
) -> Any:
    """Our trainer as it stands before an update, with nothing else in it."""
    trainer: Any = object.__new__(MixedSyncTrainer)
    actor = {
        "ppo_mini_batch_size": 99,  # the rows of an update come from the layout of the batch
        "loss_agg_mode": mode,
        "calculate_entropy": False,
        "entropy_coeff": ENTROPY,
        "ppo_epochs": 1,
        "data_loader_seed": 0,
        "shuffle": False,
    }
    rollout = {"n": 99, "temperature": 0.7}
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "rollout": rollout},
            "critic": {"ppo_mini_batch_size": 99},
        }
    )
    trainer._rows_per_update = len(rows) // updates
    trainer._temperatures = {}
    counts = {key: sum(row.mask) for key, row in zip(keys or keys_of(rows), rows, strict=True)}
    trainer._trained = {key: tokens for key, tokens in counts.items() if tokens}
    trainer._has_session_loss = False
    trainer._begin_accounts = lambda _: None
    return trainer


def keys_of(rows: Sequence[Row]) -> list[str]:
    return [f"{i}_0_0" for i in range(len(rows))]


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """A process group of one, in memory."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def meta(rows: Sequence[Row], keys: Sequence[str] | None = None) -> KVBatchMeta:
    keys = list(keys or keys_of(rows))
    return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train", extra_info={})


def gradient(rows: Sequence[Row], mode: str, micro: int = 1, **options: Any) -> Gradient:
    """One update, through our trainer and verl's engine and loss.

    Args:
        rows: the batch.
        mode: verl's `loss_agg_mode`.
        micro: rows of one pass; it must divide them.
        options: further ones of the actor's config.
    """
    trainer = make_trainer(rows, mode)
    workers = Workers(rows, actor_config(mode, **options), micro)
    trainer.actor_rollout_wg = workers
    trainer._update_actor(meta(rows), {})
    ends = [PROMPT - 1 + len(row.mask) for row in rows]

    def of(leaves: list[torch.Tensor]) -> list[list[float]]:
        found = []
        for leaf, end in zip(leaves, ends, strict=True):
            by_token: Any = leaf.grad
            assert (
                by_token is not None
                and not by_token[: PROMPT - 1].any()
                and not by_token[end:].any()
            )
            found.append(by_token[PROMPT - 1 : end].tolist())
        return found

    return Gradient(
        loss=sum(workers.losses),
        log_prob=of(workers.engine.log_probs),
        entropy=of(workers.engine.entropies),
        extra_info=workers.extra_info,
    )


# --- batches ----------------------------------------------------------------------------------

masks = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def make_row(mask: list[int], seed: int, advantage: float) -> Row:
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.1, len(mask))
    return Row(
        mask=mask,
        old=old.tolist(),
        new=(old + rng.uniform(-0.1, 0.1, len(mask))).tolist(),  # within the clip range
        ref=(old + rng.uniform(-0.5, 0.5, len(mask))).tolist(),
        entropy=rng.uniform(0.1, 3, len(mask)).tolist(),
        advantage=[advantage * bit for bit in mask],
        importance=rng.uniform(0.1, 2, len(mask)).tolist(),
    )


rows_of_a_batch = st.lists(
    st.builds(
        make_row,
        mask=masks,
        seed=st.integers(0, 2**16),
        advantage=st.sampled_from([-1.5, 0.5, 2.0]),
    ),
    min_size=1,
    max_size=6,
).filter(lambda rows: any(any(row.mask) for row in rows))


def with_advantages(
    rows: Sequence[Row], rewards: Sequence[float], uids: Sequence[str]
) -> list[Row]:
    """The rows with the advantages of `state_masked_grpo`."""
    width = max(len(row.mask) for row in rows)
    mask, scores = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        mask[i, : len(row.mask)] = torch.tensor(row.mask)
        scores[i, len(row.mask) - 1] = rewards[i]
    index = np.array(uids, dtype=object)
    advantages, _ = compute_state_masked_grpo_advantage(scores, mask, index)
    return [
        replace(row, advantage=advantages[i, : len(row.mask)].tolist())
        for i, row in enumerate(rows)
    ]


# --- laws -------------------------------------------------------------------------------------


@given(
    rows=rows_of_a_batch,
    mode=st.sampled_from(MODES),
    field=st.sampled_from(FIELDS),
    value=st.floats(-20, 5),
    data=st.data(),
)
def test_what_stands_at_a_masked_token_changes_no_loss_and_no_gradient(
    rows: list[Row], mode: str, field: str, value: float, data: st.DataObject
):
    places = [(i, t) for i, row in enumerate(rows) for t, bit in enumerate(row.mask) if not bit]
    assume(places)
    i, token = data.draw(st.sampled_from(places))
    before = gradient(rows, mode)
    assert before.log_prob[i][token] == before.entropy[i][token] == 0
    after = gradient([*rows[:i], rows[i].changed(field, token, value), *rows[i + 1 :]], mode)
    assert after == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", FIELDS)
def test_what_stands_at_a_kept_token_changes_the_loss(mode: str, field: str):
    rows = [make_row([1, 0, 1], seed, 0.5) for seed in range(3)]
    value = getattr(rows[1], field)[2] + 0.05
    other = [rows[0], rows[1].changed(field, 2, value), rows[2]]
    assert gradient(other, mode).loss != pytest.approx(gradient(rows, mode).loss, abs=1e-6)


def weight(rows: Sequence[Row], row: Row, mode: str) -> float:
    """Of one kept token of `row` in the loss: what the mode's denominators make of it."""
    valid_rows = sum(any(other.mask) for other in rows)
    return {
        "token-mean": 1 / sum(sum(other.mask) for other in rows),
        "seq-mean-token-sum": 1 / valid_rows,
        "seq-mean-token-mean": 1 / valid_rows / max(1, sum(row.mask)),
        "seq-mean-token-sum-norm": 1 / valid_rows / HORIZON,
    }[mode]


@given(rows=rows_of_a_batch, mode=st.sampled_from(MODES), one_pass=st.booleans())
def test_importance_scales_the_policy_term_and_all_terms_divide_by_kept_tokens_and_valid_rows_only(
    rows: list[Row], mode: str, one_pass: bool
):
    on_policy = [replace(row, new=row.old) for row in rows]  # then d ratio = d log-prob
    found = gradient(on_policy, mode, micro=len(rows) if one_pass else 1, kl_loss_type="kl")
    for i, row in enumerate(rows):
        each = weight(rows, row, mode)
        # d (-importance * advantage * ratio) = -importance * advantage; d (log-prob - ref) = 1;
        # d entropy = 1
        tokens = zip(row.mask, row.importance, row.advantage, strict=True)
        assert found.log_prob[i] == pytest.approx(
            [bit * each * (KL - weight * a) for bit, weight, a in tokens]
        )
        assert found.entropy[i] == pytest.approx([-bit * each * ENTROPY for bit in row.mask])


@given(
    groups=st.lists(
        st.lists(
            st.tuples(masks, st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0])),
            min_size=2,
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    lost=st.sets(st.integers(0, 8)),
    lost_groups=st.integers(0, 2),
    padding=st.integers(0, 2),
    mode=st.sampled_from([*MODES, "token-sum"]),
    one_pass=st.booleans(),
)
def test_lost_trajectories_lost_groups_and_padding_leave_no_trace_in_the_gradient(
    groups: list[list[tuple[list[int], int, float]]],
    lost: set[int],
    lost_groups: int,
    padding: int,
    mode: str,
    one_pass: bool,
):
    rows, rewards, uids = [], [], []
    for draw, group in enumerate(groups):
        for mask, seed, reward in group:
            is_lost = len(rows) in lost
            rows.append(make_row([0 if is_lost else bit for bit in mask], seed, 0.0))
            rewards.append(0.0 if is_lost else reward)
            uids.append(f"group{draw}")
    for draw in range(lost_groups):
        rows += [make_row([0] * 8, seed, 0.0) for seed in range(2)]  # longer than all others
        rewards += [0.0, 0.0]
        uids += [f"lost{draw}"] * 2
    rows += [make_row([0], seed, 0.0) for seed in range(padding)]
    rewards += [0.0] * padding
    uids += ["pad0123"] * padding
    kept = [i for i, row in enumerate(rows) if any(row.mask)]
    assume(kept)

    def trained(own: list[int]) -> Gradient:
        batch = with_advantages(*([column[i] for i in own] for column in (rows, rewards, uids)))
        return gradient(batch, mode, micro=len(batch) if one_pass else 1)

    whole, without = trained([*range(len(rows))]), trained(kept)
    assert whole.loss == pytest.approx(without.loss)
    for i in range(len(rows)):
        for name in ("log_prob", "entropy"):
            found = getattr(whole, name)[i]
            if i in kept:
                assert found == pytest.approx(getattr(without, name)[kept.index(i)], rel=1e-9)
            else:
                assert not any(found)


@given(
    rewards=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12),
    data=st.data(),
    by_std=st.booleans(),
    scale=st.sampled_from([None, {"math": 1e-3}, {"math": 1e3}]),
)
def test_an_advantage_is_always_a_number(rewards, data, by_std, scale):
    size = len(rewards)
    draws = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    bits = data.draw(st.lists(masks.filter(lambda m: len(m) >= 3), min_size=size, max_size=size))
    uids = [f"{draw:032x}.{draw}.math" if draw else "pad0123" for draw in draws]
    mask = torch.tensor([m[:3] if draw else [0, 0, 0] for m, draw in zip(bits, draws, strict=True)])
    scores = torch.zeros(size, 3)
    scores[:, 2] = torch.tensor(rewards)
    config = {"norm_adv_by_std_in_grpo": by_std, "state_masked_grpo": {"scale": scale}}
    advantages, _ = compute_state_masked_grpo_advantage(
        scores, mask, np.array(uids, dtype=object), config=config
    )
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_native_trajectory_is_trained_exactly_where_the_model_wrote(name: str, mode: str):
    template = TEMPLATES[name]
    asks_twice, answers = asks([("add", {"a": 1})], ["functions.add:0"]), "so 2"
    if name == "gpt-oss":
        answers = "<|channel|>final<|message|>so 2"
    turns = [
        says(template, [USER], asks_twice, calls=True),
        says(template, [USER], {"role": "assistant", "content": answers}, calls=False),
    ]
    rollout, actions = play(template, turns, ["2"])
    trajectory = rollout.trajectory
    assert rollout.stop_reason == StopReason.ANSWERED and len(actions) == 1
    wrote = {
        segment.start + at
        for segment in trajectory.segments
        if segment.author == "model"
        for at in range(segment.length)
    }
    row = make_row(trajectory.loss_mask(True), 7, 0.5)
    (found,) = gradient([row], mode).log_prob
    assert {at for at, value in enumerate(found) if value != 0} == wrote
    assert 0 < len(wrote) < len(trajectory.response_ids)


# --- the count of rows ------------------------------------------------------------------------

HALF_LOST = [make_row([1, 1], 0, 1.0), make_row([0, 0], 1, 0.0)] * 2


@pytest.mark.parametrize(("mode", "rows"), [("token-mean", 4), ("seq-mean-token-sum", 2.0)])
def test_only_means_over_rows_need_the_number_of_valid_ones(mode: str, rows: float):
    info = gradient(HALF_LOST, mode).extra_info
    assert type(info) is dict  # workers need not import the trainer to read it
    assert info["global_batch_size"] == rows
    assert info["mini_batch_size"] == 4
    assert info["temperature"] == 0.7


def test_two_updates_divide_by_the_mean_of_their_valid_rows():
    rows = [*HALF_LOST, *[make_row([1], 0, 1.0)] * 2]
    trainer = make_trainer(rows, "seq-mean-token-sum", updates=2)
    assert trainer._valid_sessions_per_update(meta(rows)) == 2.0


def test_a_step_that_lost_all_its_rows_divides_by_one():
    rows = HALF_LOST[1:2] * 2
    trainer = make_trainer(rows, "seq-mean-token-sum")
    assert trainer._valid_sessions_per_update(meta(rows)) == 1.0
    assert not any(map(any, gradient(rows, "seq-mean-token-sum").log_prob))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_rows_with_temperatures_of_their_own_are_given_no_common_one(mode: str):
    trainer = make_trainer(HALF_LOST, mode)
    trainer._temperatures = {"math": 0.6}
    workers = Workers(HALF_LOST, actor_config(mode), 1)
    trainer.actor_rollout_wg = workers
    trainer._update_actor(meta(HALF_LOST), {})
    assert "temperature" not in workers.extra_info
    assert workers.extra_info["mini_batch_size"] == 4
