"""State-masked GRPO against verl's GRPO and against its definition."""

from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("verl.trainer.ppo.v1")  # our modules stand in the middle of its imports

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from verl.trainer.config import AlgoConfig

from agent_loop.training.advantage import (
    STATE_MASKED_GRPO,
    compute_per_session_advantage,
    compute_state_masked_grpo_advantage,
    compute_state_masked_remax_advantage,
    greedy_baselines,
    sessions_of_sequences,
)


def algorithm(**own: object) -> DictConfig:
    """verl's `algorithm` as the run config has it, with these settings of ours."""
    grpo = {"norm_adv_by_std_in_grpo": True, "state_masked_grpo": {"scale": None} | own}
    return OmegaConf.create({"algorithm": grpo}).algorithm


def uid(source: str, draw: int = 0) -> str:
    return f"{'0' * 32}.{draw}.{source}"


def batch(rewards, valid, groups, length=4):
    mask = torch.ones(len(rewards), length)
    mask[:, 1] = 0  # a tool token
    mask[~torch.tensor(valid)] = 0
    scores = torch.zeros(len(rewards), length)
    scores[:, -1] = torch.tensor(rewards)
    return scores, mask, np.array(groups, dtype=object)


# Sixteenths have exact single-precision sums: verl's statistics are in single precision.
@given(st.lists(st.integers(0, 16).map(lambda part: part / 16), min_size=4, max_size=12))
def test_with_every_trajectory_valid_it_is_verls_grpo(rewards):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    groups = [i % 2 for i in range(len(rewards))]
    scores, mask, index = batch(rewards, [True] * len(rewards), groups)
    ours, _ = compute_state_masked_grpo_advantage(scores.clone(), mask, index)
    theirs, _ = compute_grpo_outcome_advantage(scores.clone(), mask, index)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_lost_trajectory_changes_nothing_for_the_others_of_its_group():
    whole = batch([1.0, 0.0, 1.0], [True] * 3, ["g"] * 3)
    lost = batch([1.0, 0.0, 1.0, 0.0], [True, True, True, False], ["g"] * 4)
    ours, _ = compute_state_masked_grpo_advantage(*whole)
    with_lost, _ = compute_state_masked_grpo_advantage(*lost)
    assert torch.allclose(with_lost[:3], ours)
    assert not with_lost[3].any()


def test_a_group_with_one_valid_trajectory_has_zero_advantage():
    advantages, _ = compute_state_masked_grpo_advantage(
        *batch([1.0, 0.0, 0.0], [True, False, False], ["g"] * 3)
    )
    assert not advantages.any()


@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=10),
    data=st.data(),
)
def test_tool_tokens_have_no_advantage_and_groups_sum_to_zero(rewards, data):
    valid = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    scores, mask, index = batch(rewards, valid, ["g"] * len(rewards))
    advantages, returns = compute_state_masked_grpo_advantage(scores, mask, index)
    assert not (advantages * (1 - mask)).any()
    assert advantages[:, 0].sum().item() == pytest.approx(0, abs=1e-5)
    assert torch.equal(advantages, returns)


@given(st.floats(0, 1, width=32), st.integers(2, 12))
@example(0.8676241636276245, 3)  # three of these have a single-precision mean one rounding off
def test_a_group_of_equal_rewards_has_no_advantage(reward, size):
    advantages, _ = compute_state_masked_grpo_advantage(
        *batch([reward] * size, [True] * size, ["g"] * size)
    )
    assert advantages.abs().max() < 1e-8


def without_std() -> list[DictConfig]:
    stock = algorithm()
    stock.norm_adv_by_std_in_grpo = False
    return [
        algorithm(dr_grpo=True),
        stock,
        OmegaConf.create({"norm_adv_by_std_in_grpo": False}),
    ]


@pytest.mark.parametrize("config", without_std())
def test_where_it_is_told_so_it_does_not_divide_by_the_std(config: DictConfig):
    scores, mask, index = batch([1.0, 0.0], [True, True], ["g", "g"])
    advantages, _ = compute_state_masked_grpo_advantage(scores, mask, index, config=config)
    assert advantages[:, 0].tolist() == [0.5, -0.5]


@given(st.lists(st.integers(0, 16).map(lambda part: part / 16), min_size=4, max_size=12))
def test_dr_grpo_is_verls_grpo_without_the_std(rewards):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    scores, mask, index = batch(
        rewards, [True] * len(rewards), [i % 2 for i in range(len(rewards))]
    )
    ours, _ = compute_state_masked_grpo_advantage(
        scores.clone(), mask, index, config=algorithm(dr_grpo=True)
    )
    theirs, _ = compute_grpo_outcome_advantage(
        scores.clone(), mask, index, norm_adv_by_std_in_grpo=False
    )
    assert torch.allclose(ours, theirs, atol=1e-6)


@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=9, max_size=9),
    valid=st.lists(st.booleans(), min_size=9, max_size=9),
    factor=st.sampled_from([0.25, 2.0]),
    dr_grpo=st.booleans(),
)
def test_a_scale_multiplies_the_advantages_of_its_source_and_of_no_other(
    rewards, valid, factor, dr_grpo
):
    sources = ["math", "nq", "a b_c/%.d"] * 3
    scores, mask, _ = batch(rewards, valid, sources)
    index = np.array([uid(quote(source, safe="").replace("_", "%5F")) for source in sources])
    scale = {"a b_c/%.d": factor}
    plain, _ = compute_state_masked_grpo_advantage(
        scores, mask, index, config=algorithm(dr_grpo=dr_grpo)
    )
    scaled, _ = compute_state_masked_grpo_advantage(
        scores, mask, index, config=algorithm(dr_grpo=dr_grpo, scale=scale)
    )
    factors = torch.tensor([scale.get(source, 1.0) for source in sources])
    assert torch.allclose(scaled, plain * factors.unsqueeze(-1))


def test_padding_is_in_no_group_and_names_no_source():
    rows = batch(
        [1.0, 0.0, 0.0, 0.0], [True, True, False, False], [uid("math")] * 2 + ["pad01"] * 2
    )
    advantages, _ = compute_state_masked_grpo_advantage(
        *rows, config=algorithm(dr_grpo=True, scale={"math": 2.0})
    )
    assert advantages[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]


def test_groups_of_several_sources_are_compared_within_themselves_whatever_their_order():
    names = [uid("nq"), uid("math"), uid("math", 1)]
    rewards = {names[0]: [1.0, 0.0], names[1]: [4.0, 2.0], names[2]: [7.0, 7.0]}
    in_turn = [own[i] for i in range(2) for own in rewards.values()]
    scores, mask, index = batch(in_turn, [True] * 6, names * 2)
    advantages, _ = compute_state_masked_grpo_advantage(
        scores, mask, index, config=algorithm(dr_grpo=True)
    )
    assert advantages[:, 0].tolist() == [0.5, 1.0, 0.0, -0.5, -1.0, 0.0]


# --- remax --------------------------------------------------------------------------------------


def remax(rewards, baselines, groups):
    scores, mask, index = batch(rewards, [True] * len(rewards), groups)
    token = greedy_baselines.set(baselines)
    try:
        return compute_state_masked_remax_advantage(scores, mask, index), mask
    finally:
        greedy_baselines.reset(token)


@given(
    st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4),
    st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=2),
)
def test_remax_is_the_reward_less_that_of_the_greedy_trajectory(rewards, baselines):
    (advantages, returns), mask = remax(
        rewards, {"a": baselines[0], "b": baselines[1]}, list("aabb")
    )
    wanted = [r - baselines[i // 2] for i, r in enumerate(rewards)]
    assert torch.allclose(advantages, torch.tensor(wanted).unsqueeze(1) * mask, atol=1e-5)
    assert torch.allclose(returns, torch.tensor(rewards).unsqueeze(1) * mask)


def test_remax_teaches_nothing_where_the_greedy_trajectory_was_lost():
    (advantages, _), _ = remax([1.0, 0.0, 1.0, 0.0], {"a": None, "b": 0.5}, list("aabb"))
    assert not advantages[:2].any() and advantages[2:].any()


# --- sessions of several rows -------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, algorithm(), *without_std()])
def test_a_session_is_judged_once_and_its_advantage_is_on_the_tokens_of_all_its_rows(config):
    rewards, sessions = [1.0, 1.0, 0.0, 0.25], np.array([0, 0, 1, 2])
    scores, mask, index = batch(rewards, [True] * 4, ["g"] * 4)
    mask[1, 0] = 0  # sent again from the first row of its session
    token = sessions_of_sequences.set((STATE_MASKED_GRPO, sessions))
    try:
        advantages, returns = compute_per_session_advantage(scores, mask, index, config=config)
    finally:
        sessions_of_sequences.reset(token)
    of_sessions, _ = compute_state_masked_grpo_advantage(
        scores[[0, 2, 3]], mask[[0, 2, 3]], index[[0, 2, 3]], config=config
    )
    assert torch.equal(advantages, of_sessions[sessions, :1] * mask)
    assert torch.equal(returns, advantages)


# --- in a trainer of verl's own -----------------------------------------------------------------


def verls_advantages(name: str, rewards: list[float], keys: list[str], **own: object) -> Any:
    """What verl's V1 trainers compute, with verl's own config of the algorithm."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    uids = [key.rsplit("_", 2)[0] for key in keys]
    is_real = [not uid.startswith("pad") for uid in uids]
    scores, mask, index = batch(rewards, is_real, uids)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": mask},
        non_tensors={"uid": index},
    )
    config = OmegaConf.create(asdict(AlgoConfig()) | own)
    OmegaConf.set_struct(config, True)
    done = compute_advantage_for_multi_trajectories(data, keys, name, config=config)
    return done.batch["advantages"]


def queue_with(monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """A TransferQueue that this process has begun to use."""
    tags = {"train": {key: {} for key in keys}}
    monkeypatch.setattr("transfer_queue.interface._TQ_CLIENT", object())
    monkeypatch.setattr("transfer_queue.interface.kv_list", lambda partition: tags)


@given(st.lists(st.integers(0, 16).map(lambda part: part / 16), min_size=4, max_size=12))
def test_in_verls_trainer_it_is_verls_grpo_where_all_rows_are_valid(rewards):
    keys = [f"3f0c-{i % 2}_{i}_0" for i in range(len(rewards))]
    keys.append("pad0a_0_0")
    ours, theirs = (
        verls_advantages(name, [*rewards, 0.0], keys) for name in (STATE_MASKED_GRPO, "grpo")
    )
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("config", [None, AlgoConfig(), AlgoConfig(norm_adv_by_std_in_grpo=False)])
def test_verls_config_needs_no_section_of_ours(config):
    rows = batch([1.0, 0.0], [True, True], ["g", "g"])
    ours, _ = compute_state_masked_grpo_advantage(*rows, config=config)
    by_std = config is None or config.norm_adv_by_std_in_grpo
    first = 0.5**0.5 if by_std else 0.5
    assert ours[:, 0].tolist() == pytest.approx([first, -first], abs=1e-5)


def test_in_verls_trainer_a_session_of_several_rows_is_refused(monkeypatch):
    keys = ["3f0c-1_0_0", "3f0c-1_0_1", "3f0c-1_1_0"]
    queue_with(monkeypatch, "3f0c-1", *keys)
    with pytest.raises(RuntimeError, match=r"row 3f0c-1_0_1.*algorithm.adv_estimator=grpo, have"):
        verls_advantages(STATE_MASKED_GRPO, [1.0, 1.0, 0.0], keys)


def test_other_groups_in_the_queue_may_have_sessions_of_several_rows(monkeypatch):
    queue_with(monkeypatch, "3f0c-1_0_0", "3f0c-1_1_0", "3f0c-2_0_0", "3f0c-2_0_1", "3f0c-1")
    advantages = verls_advantages(STATE_MASKED_GRPO, [1.0, 0.0], ["3f0c-1_0_0", "3f0c-1_1_0"])
    assert advantages.any()


def test_our_trainer_has_told_the_sessions_and_is_not_refused(monkeypatch):
    queue_with(monkeypatch, "g_0_0", "g_0_1", "g_1_0")
    token = sessions_of_sequences.set((STATE_MASKED_GRPO, np.array([0, 1])))
    try:
        advantages, _ = compute_state_masked_grpo_advantage(
            *batch([1.0, 0.0], [True, True], ["g", "g"])
        )
    finally:
        sessions_of_sequences.reset(token)
    assert advantages.any()


def test_in_verls_trainer_a_scale_is_refused():
    own = {"state_masked_grpo": {"scale": {"math": 2.0}}}
    with pytest.raises(ValueError, match=r"no source in uid='3f0c-1'.*or remove scale"):
        verls_advantages(STATE_MASKED_GRPO, [1.0, 0.0], ["3f0c-1_0_0", "3f0c-1_1_0"], **own)
