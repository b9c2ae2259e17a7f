"""State-masked GRPO against verl's GRPO and against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agent_loop.advantage import compute_state_masked_grpo_advantage

DR_GRPO = OmegaConf.create({"norm_adv_by_std_in_grpo": False})


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


def test_dr_grpo_does_not_divide_by_the_std():
    scores, mask, index = batch([1.0, 0.0], [True, True], ["g", "g"])
    advantages, _ = compute_state_masked_grpo_advantage(scores, mask, index, config=DR_GRPO)
    assert advantages[:, 0].tolist() == [0.5, -0.5]
