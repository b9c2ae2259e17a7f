"""However a session is cut into rows, its advantages and its gradient are the same: verl's own
estimators, loss and engine, under our trainer.

A cut makes two rows of one. The second row begins with the tokens before the cut, with mask 0, or
has them in its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.trainer.ppo.v1")  # our modules stand in the middle of its imports

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import LlamaConfig, LlamaForCausalLM
from verl.workers.config import PolicyLossConfig

from agent_loop.training import optimizer_steps, trained_batch
from agent_loop.training.estimators import RETURNS_OF_TOKENS, WITHIN_SESSIONS
from agent_loop.training.session_loss import SESSION_SHARE, session_loss, session_loss_of
from agent_loop.training.session_rules import LOSSES_OF_TOKENS
from samplers import exact_updates
from samplers.uid import make_uid
from tests.agent_loop.training.test_advantage_rows import Queue, compute_advantages
from tests.agent_loop.training.test_gradient import (
    MODES,
    PROMPT,
    Row,
    TokenEngine,
    Workers,
    _nested,
    actor_config,
    make_row,
    make_trainer,
    masks,
    meta,
    one_process,  # noqa: F401  # a fixture of this module too
)

pytestmark = pytest.mark.slow

places = st.lists(st.integers(1, 5), max_size=3)
"""Where a session is cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One row of a session."""

    session: int
    row: Row
    resent: int
    """Tokens of earlier rows at its beginning."""


def cut(session: int, row: Row, at: Sequence[int], resend: bool = True) -> list[Piece]:
    ends = sorted({place for place in at if place < len(row.mask)} | {len(row.mask)})
    pieces, begin = list[Piece](), 0
    for end in ends:
        start = 0 if resend else begin
        own = {each.name: list(getattr(row, each.name)[start:end]) for each in fields(Row)}
        own["mask"][: begin - start] = [0] * (begin - start)
        own["advantage"][: begin - start] = [0.0] * (begin - start)
        pieces.append(Piece(session, Row(**own), begin - start))
        begin = end
    return pieces


PADDING = Piece(-1, make_row([0], 0, 0.0), 0)


def keys_of(pieces: Sequence[Piece]) -> list[str]:
    keys = list[str]()
    for number, piece in enumerate(pieces):
        owner = f"u{piece.session}" if piece.session >= 0 else f"pad{number}"
        keys.append(f"{owner}_0_{sum(key.startswith(f'{owner}_') for key in keys)}")
    return keys


def update(
    of_updates: Sequence[Sequence[Piece]], mode: str, micro: int, ids: Any = None, **options: Any
) -> Workers:
    """One step through our trainer and verl's engine and loss, with padding as our layout adds."""
    size = max(map(len, of_updates))
    size += -size % micro
    pieces = [row for own in of_updates for row in (*own, *[PADDING] * (size - len(own)))]
    rows, keys = [piece.row for piece in pieces], keys_of(pieces)
    trainer = make_trainer(rows, mode, len(of_updates), keys)
    workers = Workers(rows, config := actor_config(mode, **options), micro)
    if ids is not None:
        workers.engine = ModelEngine(rows, [ids[piece.session] for piece in pieces])
    trainer.actor_rollout_wg = workers

    def put(*, keys: list[str], partition_id: str, fields: TensorDict) -> Any:
        workers.columns |= {str(name): column for name, column in fields.items()}
        return SimpleNamespace(fields=[])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_batch, "tq", SimpleNamespace(kv_batch_put=put))
        patch.setattr(optimizer_steps, "session_loss_of", lambda _: session_loss_of(config))
        trainer._update_actor(meta(rows, keys), {})
    workers.pieces = pieces  # type: ignore[attr-defined]
    return workers


def by_token(workers: Any, leaves: Sequence[torch.Tensor]) -> dict[int, list[float]]:
    """session -> the derivative of each of its tokens, from the rows that sampled them."""
    found: dict[int, list[float]] = {}
    for piece, leaf in zip(workers.pieces, leaves, strict=True):
        assert leaf.grad is not None
        of_row = leaf.grad[PROMPT - 1 : PROMPT - 1 + len(piece.row.mask)].tolist()
        assert not any(of_row[: piece.resent])
        found.setdefault(piece.session, []).extend(of_row[piece.resent :])
    return {session: own for session, own in found.items() if session >= 0}


def test_what_the_model_did_not_compute_and_what_is_in_no_loss_stays_as_it_is():
    log_probs = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))
    given_: dict[str, Any] = {"log_probs": log_probs, "entropy": None, "values": object()}
    data, seen = {SESSION_SHARE: torch.tensor([0.25, 0.75])}, dict[str, Any]()
    session_loss(given_, data, "group", loss=lambda **words: seen.update(words))
    assert seen["data"] is data and seen["dp_group"] == "group"
    assert seen["model_output"] == given_ | {"log_probs": seen["model_output"]["log_probs"]}


@given(
    sessions=st.lists(
        st.tuples(masks, places, st.sampled_from([-1.5, 0.0, 2.0]), st.integers(0, 1)),
        min_size=2,
        max_size=6,
    ),
    lost=st.sets(st.integers(0, 5), max_size=2),
    mode=st.sampled_from([*MODES, "token-sum"]),
    resend=st.booleans(),
    micro=st.integers(1, 3),
    loss=st.sampled_from(LOSSES_OF_TOKENS),
)
def test_a_cut_changes_no_token_s_part_in_the_gradient(
    sessions: Any, lost: set[int], mode: str, resend: bool, micro: int, loss: str
):
    whole: list[list[Piece]] = [[], []]
    pieces: list[list[Piece]] = [[], []]
    for number, (mask, at, advantage, place) in enumerate(sessions):
        row = make_row([bit * (number not in lost) for bit in mask], number, advantage)
        whole[place].append(Piece(number, row, 0))
        pieces[place] += cut(number, row, at, resend)
    assume(all(any(any(piece.row.mask) for piece in own) for own in whole))
    options = {"policy_loss": PolicyLossConfig(loss_mode=loss, dro_beta=0.1)}
    before, after = update(whole, mode, 1, **options), update(pieces, mode, micro, **options)
    assert len(after.rows) // after.extra_info["mini_batch_size"] == 2  # updates, as before
    for leaves in ("log_probs", "entropies"):
        once = by_token(before, getattr(before.engine, leaves))
        cut_up = by_token(after, getattr(after.engine, leaves))
        for session, derivatives in once.items():
            assert cut_up[session] == pytest.approx(derivatives, rel=1e-6, abs=1e-12)


def test_the_mean_over_rows_is_what_the_shares_correct():
    row = make_row([1] * 6, 1, 1.0)
    pieces = [*cut(0, row, [2]), Piece(1, make_row([1, 1], 2, 1.0), 0)]
    workers = update([pieces], "seq-mean-token-mean", 1)
    assert workers.columns["session_share"].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert workers.extra_info["global_batch_size"] == 2  # sessions


# --- through a model --------------------------------------------------------------------------

VOCABULARY = 11


class ModelEngine(TokenEngine):
    """verl's engine around a Llama of 8,000 parameters in single precision."""

    def __init__(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        super().__init__(rows)
        torch.manual_seed(0)
        self.model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=32,
            )
        )
        self.ids = [own[: PROMPT + len(row.mask)] for own, row in zip(ids, rows, strict=True)]

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        log_probs, entropies = list[torch.Tensor](), list[torch.Tensor]()
        for row in micro_batch["row"].tolist():
            ids = torch.tensor(self.ids[row])
            every = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
            nothing = torch.zeros(1)
            log_probs.append(torch.cat([every.gather(1, ids[1:, None])[:, 0], nothing]))
            entropies.append(torch.cat([-(every.exp() * every).sum(-1), nothing]))
        output = {"log_probs": _nested(log_probs), "entropy": _nested(entropies)}
        loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
        return loss, {"loss": loss.detach().item(), "metrics": metrics, "model_output": {}}

    @property
    def gradient(self) -> torch.Tensor:
        return torch.cat([each.grad.flatten() for each in self.model.parameters()])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sessions=st.lists(st.tuples(masks, places), min_size=2, max_size=4),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
)
def test_a_cut_changes_the_gradient_of_a_model_by_less_than_1e_5_of_its_norm(
    sessions: Any, mode: str, seed: int
):
    assume(any(any(mask) for mask, _ in sessions))
    generator = torch.Generator().manual_seed(seed)
    ids = {
        number: torch.randint(VOCABULARY, (PROMPT + 6,), generator=generator).tolist()
        for number in range(-1, len(sessions))
    }
    rows = [make_row(mask, number, (-1.0) ** number) for number, (mask, _) in enumerate(sessions)]
    whole = [Piece(number, row, 0) for number, row in enumerate(rows)]
    pieces = [
        piece
        for number, (row, (_, at)) in enumerate(zip(rows, sessions, strict=True))
        for piece in cut(number, row, at)
    ]
    before, after = update([whole], mode, 1, ids), update([pieces], mode, 2, ids)
    expected, found = before.engine.gradient, after.engine.gradient  # type: ignore[attr-defined]
    assert (found - expected).norm() <= 1e-5 * expected.norm()


# --- advantages -------------------------------------------------------------------------------


def advantages(estimator: str, groups: Any, *, is_cut: bool) -> list[list[float]]:
    """Of each session, on its own tokens."""
    queue, owners = Queue(), list[tuple[str, int]]()
    for draw, sessions in enumerate(groups):
        uid = make_uid("nq", draw)
        for session, (mask, at, reward) in enumerate(sessions):
            row = make_row(mask, session, 0.0)
            pieces = cut(session, row, at) if is_cut else [Piece(session, row, 0)]
            trained = [piece for piece in pieces if any(piece.row.mask)] or pieces[:1]
            for index, piece in enumerate(trained):
                bits = torch.tensor(piece.row.mask, dtype=torch.float)
                scores = torch.zeros(len(bits))
                if bits.any():
                    scores[int(bits.nonzero()[-1])] = reward
                queue.rows[key := f"{uid}_{session}_{index}"] = {
                    "uid": uid,
                    "response_mask": bits,
                    "rm_scores": scores,
                    "old_log_probs": torch.zeros(len(bits)),
                    "values": torch.tensor(piece.row.new),
                    "extra_fields": {"reward_baseline": 0.25},
                }
                owners.append((key, piece.resent))
    with pytest.MonkeyPatch.context() as patch:
        compute_advantages(queue, estimator, patch)
    found: dict[str, list[float]] = {}
    for key, resent in owners:
        bits, values = queue.rows[key]["response_mask"], queue.rows[key]["advantages"]
        kept = [float(v) for v, bit in zip(values[resent:], bits[resent:], strict=True) if bit]
        found.setdefault(key.rsplit("_", 1)[0].split(".", 1)[1], []).extend(kept)
    return [found[name] for name in sorted(found)]


REWARDS = st.sampled_from([0.0, 0.25, 1.0])
"""Sums of these are exact. The mean of equal rewards of .3 is not .3 in fp32, and whitening divides
the difference, 3e-8, by the square root of 1e-8."""


@given(
    groups=st.lists(
        st.lists(st.tuples(masks, places, REWARDS), min_size=2, max_size=4),
        min_size=1,
        max_size=3,
    ),
    estimator=st.sampled_from([*WITHIN_SESSIONS, *RETURNS_OF_TOKENS]),
)
def test_a_cut_changes_no_advantage(groups: Any, estimator: str):
    assume(sum(sum(mask) for group in groups for mask, *_ in group) > 1)
    before = advantages(estimator, groups, is_cut=False)
    after = advantages(estimator, groups, is_cut=True)
    for once, cut_up in zip(before, after, strict=True):
        assert cut_up == pytest.approx(once, rel=1e-5, abs=1e-6)


# --- layout ------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.lists(st.integers(1, 4), min_size=2, max_size=3), min_size=2, max_size=6
    ).filter(lambda groups: len(groups) % 2 == 0),
    ranks=st.integers(1, 3),
)
def test_the_number_of_updates_stays_and_each_rank_has_as_many_rows(
    rows: list[list[int]], ranks: int
):
    """`rows`: of each session of each group; half of the groups are in each of two updates."""
    uids = [make_uid("nq", draw) for draw in range(len(rows))]
    keys = [
        f"{uid}_{session}_{index}"
        for uid, group in zip(uids, rows, strict=True)
        for session, count in enumerate(group)
        for index in range(count)
    ]
    batch = KVBatchMeta(
        partition_id="train", keys=keys, tags=[{"seq_len": 3 + at % 5} for at, _ in enumerate(keys)]
    )

    def padded(batch: Any, size: int, _: int) -> KVBatchMeta:
        pads = size - len(batch)
        return KVBatchMeta(
            partition_id="train",
            keys=[*batch.keys, *(f"pad{at}_0_0" for at in range(pads))],
            tags=[*batch.tags, *[{"seq_len": 1, "is_padding": True}] * pads],
        )

    half = {"nq": len(rows) // 2}
    sizes = exact_updates.Sizes(ranks=ranks, update_micro=1, log_prob_micro=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_updates, "upsample_batch_to_divisible_size", padded)
        laid, updates, _ = exact_updates.lay_out(batch, [half, half], sizes, 0)
    size = len(updates[0])
    assert len(laid) == 2 * size and size % ranks == 0
    assert {key for key in laid.keys if "pad" not in key} == {*keys}
    per_rank, of_update = len(laid) // ranks, size // ranks
    found = [set[str](), set[str]()]
    for rank in range(ranks):
        own = laid.keys[rank * per_rank : (rank + 1) * per_rank]
        for update, uids_of in enumerate(found):
            part = own[update * of_update : (update + 1) * of_update]
            uids_of |= {key.split("_")[0] for key in part if "pad" not in key}
            assert {*part} <= {*updates[update]}
    assert not found[0] & found[1] and all(len(own) == half["nq"] for own in found)
