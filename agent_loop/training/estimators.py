"""Names of advantage estimators, `algorithm.adv_estimator`, by what they need. No verl.

verl's names: `AdvantageEstimator` (trainer/ppo/core_algos.py at 0.9.1).
"""

ESTIMATORS = ("state_masked_grpo", "grpo", "rloo", "reinforce_plus_plus", "remax", "gae")
"""Estimators that the tests of this project run on the real trainer."""

UNTRIED = (
    "reinforce_plus_plus_baseline",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
)
"""Further estimators of verl, which need rewards and groups only."""

WITHIN_GROUPS = (*UNTRIED, "grpo", "rloo")
"""Estimators of verl that compare a trajectory with its group. In a group of one they use 0 as the
mean, so that the advantage is the reward; `grpo_passk` raises. `state_masked_grpo` gives 0."""

WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "gae")
"""Estimators that compare a trajectory with something else than its group."""
