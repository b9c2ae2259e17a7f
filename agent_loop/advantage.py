"""`state_masked_grpo`: group-relative advantage over valid trajectories only.

GRPO: Shao et al. 2024, sec. 4.1; without the division by the group's std it is Dr.GRPO, Liu et al.
2025. Where we differ: a trajectory whose mask is all zero (an infrastructure fault ended it) is not
part of its group's mean and std; a group with fewer than two valid trajectories has zero advantage;
and mean and std are taken in double precision. In single precision the mean of three equal rewards
can be one rounding off, the std is then that rounding too, and their quotient a push of -0.05 on
every trajectory of a group that has nothing to teach.

verl adapter: `core_algos.register_adv_est` (trainer/ppo/core_algos.py at 0.9.1).
"""

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

STATE_MASKED_GRPO = "state_masked_grpo"


@register_adv_est(STATE_MASKED_GRPO)
def compute_state_masked_grpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of each trajectory within its group, laid on the tokens with mask 1.

    Args:
        token_level_rewards: (B, T); only the sum over T counts.
        response_mask: (B, T), 1 = sampled by the policy.
        index: (B,) group of each trajectory.
        config: verl's algorithm config: `norm_adv_by_std_in_grpo` divides by the group's std (GRPO)
            or does not (Dr.GRPO). None divides.
        epsilon: added to the std.

    Returns:
        (advantages, returns), both (B, T) and equal: 0 where the mask is 0.
    """
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        rewards = token_level_rewards.sum(dim=-1).double()  # (B,)
        valid = response_mask.bool().any(dim=-1)  # (B,)
        advantages = torch.zeros_like(rewards, dtype=torch.float32)
        for group in np.unique(index):
            members = torch.as_tensor(index == group, device=rewards.device) & valid
            if int(members.sum()) < 2:
                continue
            rewards_G = rewards[members]
            centred = rewards_G - rewards_G.mean()
            scaled = centred / (rewards_G.std() + epsilon) if by_std else centred
            advantages[members] = scaled.float()
        spread = advantages.unsqueeze(-1) * response_mask
    return spread, spread
