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

WITHIN_SESSIONS = ("state_masked_grpo", "grpo", "rloo", "remax", "grpo_passk", "gpg",
    "rloo_vectorized", "grpo_vectorized")  # fmt: skip
"""Estimators whose advantage is one number for a trajectory, made of rewards only. A session of
several rows is judged as one trajectory. The others of verl need its tokens: `opo` weights rewards
by lengths, and `reinforce_plus_plus_baseline` whitens over the tokens of the rows."""

RETURNS_OF_TOKENS = ("reinforce_plus_plus", "gae")
"""Estimators with a return for each token. A row of a session has the session's reward at its end.
Without a discount (`gamma=1`, for `gae` also `lam=1`) the return of every token is then the
session's reward, however it is cut: the Monte Carlo return (Schulman et al. 2016, "High-Dimensional
Continuous Control Using Generalized Advantage Estimation", eq. 18; Hu 2025, "REINFORCE++",
arXiv 2501.03262). With a discount it would depend on the order of the rows, which no source
defines."""

WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "gae")
"""Estimators that compare a trajectory with something else than its group."""
