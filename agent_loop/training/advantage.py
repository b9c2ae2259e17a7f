"""`state_masked_grpo` and `state_masked_remax`: advantages over the valid trajectories of a group;
and `per_session`, which lets any estimator of single rewards judge sessions of several sequences.

GRPO: Shao et al. 2024, sec. 4.1; without the division by the group's std it is Dr.GRPO, Liu et al.
2025. Three differences:

- A trajectory whose mask is all zero (an infrastructure fault ended it) is in no mean and no std.
- A group with fewer than two valid trajectories has zero advantage.
- Mean and std are computed in double precision. In single precision the mean of three equal rewards
  can be wrong in the last bit. The std is then as small as that error, and their quotient gives
  every trajectory of the group an advantage of -0.05 where it should be 0.

The advantage is multiplied by the `scale` of its source, which changes no statistic, because a
group has one source.

verl adapter: functions of the kind that `register_adv_est` takes (trainer/ppo/core_algos.py at
0.9.1). `agent_loop.plugin` registers them.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from config.schema import StateMaskedGRPOConfig
from samplers.uid import prompt_of

STATE_MASKED_GRPO = "state_masked_grpo"
STATE_MASKED_REMAX = "state_masked_remax"
PER_SESSION = "per_session"


def compute_state_masked_grpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantage of each trajectory in its group, on the tokens with mask 1.

    Args:
        token_level_rewards: (B, T); only the sum over T counts.
        response_mask: (B, T), 1 = sampled by the policy. A row without a 1 (padding, or lost to
            an infrastructure fault) is in no statistic and has zero advantage.
        index: (B,) group of each trajectory; a uid of `make_uid` if `scale` names a source.
        config: verl's algorithm config, with a `StateMaskedGRPOConfig` in `state_masked_grpo`.
            None divides by the std, as its `norm_adv_by_std_in_grpo` does.
        epsilon: added to the std.

    Returns:
        (advantages, returns), both (B, T) and equal: 0 where the mask is 0.

    Raises:
        RuntimeError: a trainer of verl's own has a session of several rows.
        ValueError: `scale` is set, and the uids are not ours.
    """
    algorithm = {} if config is None else config
    by_std = algorithm.get("norm_adv_by_std_in_grpo", True)
    own = algorithm.get("state_masked_grpo") or {}
    settings = StateMaskedGRPOConfig.model_validate({**own})
    if sessions_of_sequences.get(None) is None:  # a trainer of verl's own
        from agent_loop.training.stock_trainer import refuse

        refuse(index, settings.scale)
    with torch.no_grad():
        rewards = token_level_rewards.sum(dim=-1, dtype=torch.float64)  # (B,)
        valid = response_mask.bool().any(dim=-1)  # (B,)
        groups, group_of_row = np.unique(index, return_inverse=True)  # (N,), (B,)
        group = torch.as_tensor(group_of_row, device=rewards.device)

        def per_group(values: torch.Tensor) -> torch.Tensor:
            """(B,) -> (N,) sums over the valid trajectories of each group."""
            return values.new_zeros(len(groups)).index_add_(0, group, values.where(valid, 0.0))

        size = per_group(torch.ones_like(rewards))
        mean = per_group(rewards) / size.clamp(min=1)
        centred = rewards - mean[group]
        factor = (size >= 2).double()  # (N,)
        if by_std and not settings.dr_grpo:
            std = (per_group(centred.square()) / (size - 1).clamp(min=1)).sqrt()
            factor /= std + epsilon
        if settings.scale:
            factor *= torch.tensor(
                [
                    # A group of padding has factor 0, and a uid without a source.
                    settings.scale.get(prompt_of(uid)[0], 1.0) if is_compared else 1.0
                    for uid, is_compared in zip(groups, factor.tolist(), strict=True)
                ]
            ).to(factor)
        advantages = (centred * factor[group]).where(valid, 0.0).float()
        spread = advantages.unsqueeze(-1) * response_mask
    return spread, spread


greedy_baselines: ContextVar[Mapping[str, float | None]] = ContextVar("greedy_baselines")
"""uid -> reward of the group's greedy trajectory, None if it was lost; the trainer sets it."""


def compute_state_masked_remax_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax, Li et al. 2023, alg. 1: reward to go minus the reward of the greedy trajectory.

    Each group has one greedy trajectory. If it was lost, the advantage of the group is zero. In a
    config the estimator's name is `remax`.

    Args:
        token_level_rewards: (B, T).
        response_mask: (B, T), 1 = sampled by the policy.
        index: (B,) uid of each row's group, as in `greedy_baselines`.

    Returns:
        (advantages, returns), both (B, T), 0 where the mask is 0.
    """
    from verl.trainer.ppo.core_algos import compute_remax_outcome_advantage

    of_groups = greedy_baselines.get()
    of_rows = [of_groups[uid] for uid in index]
    baselines = torch.tensor([0.0 if value is None else value for value in of_rows])
    advantages, returns = compute_remax_outcome_advantage(
        token_level_rewards=token_level_rewards,
        reward_baselines=baselines.to(token_level_rewards),
        response_mask=response_mask,
    )
    has_one = torch.tensor([value is not None for value in of_rows], device=advantages.device)
    # verl's values are not 0 on tool tokens between tokens of the policy (core_algos.py:764).
    return advantages * has_one.unsqueeze(-1) * response_mask, returns * response_mask


sessions_of_sequences: ContextVar[tuple[str, np.ndarray]] = ContextVar("sessions_of_sequences")
"""Name of an estimator, and (B,) the number of each sequence's session; our trainers set it."""


def compute_per_session_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantage that an estimator gives to each session, on the tokens of all its sequences.

    The estimator gets one sequence of each session, so that a session is one member of its group.
    Its advantage must be one number for a sequence, made of rewards only (`WITHIN_SESSIONS`).

    Args:
        token_level_rewards: (B, T); every sequence has the reward of its session.
        response_mask: (B, T), each sequence with a 1.
        index: (B,) uid of each row's group.

    Returns:
        (advantages, returns), both (B, T), 0 where the mask is 0.
    """
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    name, sessions = sessions_of_sequences.get()
    first = np.unique(sessions, return_index=True)[1]  # (N,)
    mask = response_mask[first]
    by_std = {} if config is None else config
    judged = get_adv_estimator_fn(name)(
        token_level_rewards=token_level_rewards[first],
        response_mask=mask,
        index=index[first],
        config=config,
        norm_adv_by_std_in_grpo=by_std.get("norm_adv_by_std_in_grpo", True),
        **others,
    )
    rows, at = torch.arange(len(first)), mask.bool().int().argmax(dim=-1)
    advantages, returns = (
        values[rows, at][torch.as_tensor(sessions)].unsqueeze(-1) * response_mask
        for values in judged
    )
    return advantages, returns
