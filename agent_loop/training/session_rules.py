"""Settings in which the gradient would depend on how a session is cut into sequences. Pure.

`verl-mixed check` refuses them where an agent may return several sequences (`several_rows` of its
class). The trainer refuses a batch with such a session too, because a class that cannot be imported
where the check runs says nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.training.estimators import RETURNS_OF_TOKENS, WITHIN_SESSIONS
from config.lookup import at
from config.schema import TOOL_CONFIG

LOSSES_OF_TOKENS = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo")
"""Policy losses of verl in which each token has a term of its own. In the others a token's term
depends on the rest of its sequence (`gspo`, `geo_mean`), on the others of a micro-batch
(`clip_cov`, `kl_cov`), or all sequences have equal weight whatever `loss_agg_mode` says
(`sapo`)."""

_ACTOR, _ALGORITHM = "actor_rollout_ref.actor", "algorithm"
_CORRECTION = f"{_ALGORITHM}.rollout_correction"


def faults_of_sequences(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(setting with its value, rule, remedy)."""
    estimator = at(config, f"{_ALGORITHM}.adv_estimator")
    gamma, lam = at(config, f"{_ALGORITHM}.gamma", 1.0), at(config, f"{_ALGORITHM}.lam", 1.0)
    setting = f"{_ALGORITHM}.adv_estimator={estimator!r}"
    if estimator not in WITHIN_SESSIONS + RETURNS_OF_TOKENS:
        rule = "its advantages depend on the tokens of each row"
        yield setting, rule, f"choose {', '.join((*WITHIN_SESSIONS, *RETURNS_OF_TOKENS))}"
    if estimator in RETURNS_OF_TOKENS and gamma != 1:
        rule = "a discounted return over several rows is not defined"
        yield f"{setting} with {_ALGORITHM}.gamma={gamma!r}", rule, "set gamma to 1"
    if estimator == "gae" and lam != 1:
        rule = "a discounted advantage over several rows is not defined"
        yield f"{setting} with {_ALGORITHM}.lam={lam!r}", rule, "set lam to 1"
    critic = at(config, "critic.loss_agg_mode")
    if estimator == "gae" and critic != "token-mean":
        rule = "the critic's loss would count each row"
        yield f"{setting} with critic.loss_agg_mode={critic!r}", rule, "set it to token-mean"
    if at(config, f"{_ALGORITHM}.use_kl_in_reward"):
        rule = "the reward would be made of the tokens of one row"
        remedy = f"set it to false; {_ACTOR}.use_kl_loss=true has a KL term for every token"
        yield f"{_ALGORITHM}.use_kl_in_reward=True", rule, remedy
    if (level := at(config, f"{_CORRECTION}.rollout_is")) == "sequence":
        rule = "the weight is a product over the tokens of one row"
        yield f"{_CORRECTION}.rollout_is={level!r}", rule, "set it to token"
    if rejects := at(config, f"{_CORRECTION}.rollout_rs"):
        rule = "one row of a session may be rejected without the others"
        yield f"{_CORRECTION}.rollout_rs={rejects!r}", rule, "set it to null"
    loss = at(config, f"{_ACTOR}.policy_loss.loss_mode")
    if loss not in LOSSES_OF_TOKENS:
        rule = "its terms depend on whole rows"
        remedy = f"choose {', '.join(LOSSES_OF_TOKENS)}"
        yield f"{_ACTOR}.policy_loss.loss_mode={loss!r}", rule, remedy
    strategy = at(config, f"{_ACTOR}.strategy")
    mode = at(config, f"{_ACTOR}.loss_agg_mode")
    if mode == "seq-mean-token-mean" and strategy not in ("fsdp", "fsdp2"):
        rule = f"the weights of rows are tested with fsdp and fsdp2 only, not with {strategy!r}"
        yield f"{_ACTOR}.loss_agg_mode={mode!r}", rule, "set it to token-mean"
    if not at(config, f"{TOOL_CONFIG}.state_masking", True):
        rule = "tokens that begin several rows would be trained in each"
        yield f"{TOOL_CONFIG}.state_masking=False", rule, "set it to true"
    if at(config, "distillation.enabled"):
        rule = "verl asks the teacher about the last row only"
        yield "distillation.enabled=True", rule, "set it to false"
