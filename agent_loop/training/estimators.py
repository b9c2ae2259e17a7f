"""Advantage estimators by name: `algorithm.adv_estimator`. No verl.

verl's own: `AdvantageEstimator` (trainer/ppo/core_algos.py at 0.9.1).
"""

ESTIMATORS = ("state_masked_grpo", "grpo", "rloo", "reinforce_plus_plus", "remax", "gae")
"""Those that the project runs on the real trainer in its tests."""

UNTRIED = (
    "reinforce_plus_plus_baseline",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
)
"""Others of verl that need no more than rewards and groups."""

WITHIN_GROUPS = (*UNTRIED, "grpo", "rloo")
"""Those of verl that compare a trajectory with its group. Of a group of one they take the mean for
0, so that its reward is its advantage; `grpo_passk` raises. `state_masked_grpo` knows better."""

WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "gae")
"""Those that compare a trajectory with something else."""
