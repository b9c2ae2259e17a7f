"""Checks of `algorithm`, the losses and the critic: faults that end a run late, or are silent."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.training.estimators import ESTIMATORS, UNTRIED, WITHOUT_GROUPS
from config.lookup import at
from config.schema import StateMaskedGRPOConfig
from verl_mixed.run.sections import named_sources, section_of

FILTER_METRICS = ("reward", "acc", "format", "score")
"""Metrics for filtering groups: the reward, or a part that every source has."""

_ACTOR = "actor_rollout_ref.actor"
_LIBRARY = "actor_rollout_ref.model.external_lib"
_STATE_MASKED_GRPO = "algorithm.state_masked_grpo"


def algorithm_problems(config: Mapping[str, Any]) -> list[str]:
    """Every problem of the algorithm, one sentence each."""
    return [
        *_estimator_problems(config),
        *_critic_problems(config),
        *_grpo_problems(config),
        *_filter_problems(config),
    ]


LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro",
    "cispo", "bypass_mode",
)  # fmt: skip
"""The policy losses of verl, by `actor.policy_loss.loss_mode`."""


def _estimator_problems(config: Mapping[str, Any]) -> Iterator[str]:
    estimator = at(config, "algorithm.adv_estimator")
    is_own = bool(at(config, _LIBRARY))
    if estimator not in ESTIMATORS + UNTRIED and not is_own:
        yield (
            f"algorithm.adv_estimator={estimator!r}: no estimator that is supported; choose "
            f"{', '.join(ESTIMATORS)}, of verl's others {', '.join(UNTRIED)}, or register one in a "
            f"module that {_LIBRARY} names"
        )
    loss = at(config, f"{_ACTOR}.policy_loss.loss_mode")
    if loss not in LOSSES and not is_own:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={loss!r}: no such loss; choose {', '.join(LOSSES)}, "
            f"or register one in a module that {_LIBRARY} names"
        )
    n = at(config, "actor_rollout_ref.rollout.n")
    least = 1 if estimator in WITHOUT_GROUPS else 2
    if not is_count(n) or n < least:
        why = "want a whole number >= 1"
        if least == 2:
            why = f"{estimator} compares the trajectories of one prompt, so at least 2 are needed"
        yield f"actor_rollout_ref.rollout.n={n!r}: {why} (ROLLOUT_N)"


def _critic_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Faults of the critic of `gae`, which verl reports after minutes or at the first update, and
    a warmup that leaves out updates of the policy."""
    warmup, steps = (
        at(config, f"trainer.{key}") for key in ("critic_warmup", "total_training_steps")
    )
    if not has_critic(config):
        if is_count(warmup):
            yield (
                f"trainer.critic_warmup={warmup} with algorithm.adv_estimator="
                f"{at(config, 'algorithm.adv_estimator')}: there is no critic to warm up, and verl "
                "would train no policy before this step; set it to 0"
            )
        return
    if is_count(warmup) and is_count(steps) and warmup > steps:
        yield (
            f"trainer.critic_warmup={warmup} with trainer.total_training_steps={steps}: the policy "
            "is first trained at this step, so it would never be; lower it, or raise the steps"
        )
    if at(config, "critic.enable") is False:
        yield (
            "critic.enable=False with algorithm.adv_estimator=gae: its advantage is made of the "
            "critic's values; set it to null"
        )
    mini, of_actor = (at(config, f"{key}.ppo_mini_batch_size") for key in ("critic", _ACTOR))
    if mini != of_actor:
        yield (
            f"critic.ppo_mini_batch_size={mini!r} and {_ACTOR}.ppo_mini_batch_size={of_actor!r}: a "
            "batch is laid out in mini-batches once, with the mixture in each; make them equal"
        )


def _grpo_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Faults of our estimator's settings, and losses whose denominator would vary by chance."""
    values = at(config, _STATE_MASKED_GRPO, {})
    yield from section_of(StateMaskedGRPOConfig, values, _STATE_MASKED_GRPO)[1]
    settings = values if isinstance(values, Mapping) else {}
    scale, sources = settings.get("scale"), named_sources(config)
    unknown = {*scale} - {*sources} if isinstance(scale, Mapping) else set()
    for name in sorted(unknown, key=str):
        known = sorted(sources, key=str)
        yield f"{_STATE_MASKED_GRPO}.scale.{name}: no such source; name one of {known}"
    mode, factor = at(config, f"{_ACTOR}.loss_agg_mode"), at(config, f"{_ACTOR}.loss_scale_factor")
    by_constant = "seq-mean-token-sum-norm"
    if settings.get("dr_grpo") is True and mode != by_constant:
        yield (
            f"{_STATE_MASKED_GRPO}.dr_grpo=True with {_ACTOR}.loss_agg_mode={mode!r}: Dr.GRPO sums "
            f"a response's tokens and divides by a constant; set it to {by_constant}"
        )
    if mode == by_constant and not is_count(factor):
        yield (
            f"{_ACTOR}.loss_scale_factor={factor!r} with {_ACTOR}.loss_agg_mode={mode}: without a "
            "constant verl divides by the longest response of each micro-batch, so the horizon "
            "varies; set it to a whole number >= 1, such as data.max_response_length"
        )


def _filter_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A filter metric that no trajectory has, which would end the run at its first group."""
    key = "algorithm.filter_groups"
    metric = at(config, f"{key}.metric")
    if not at(config, f"{key}.enable"):
        return
    if at(config, "actor_rollout_ref.rollout.n") == 1:
        yield (
            f"{key}.enable=True with actor_rollout_ref.rollout.n=1: trajectories of one prompt are "
            "compared, so every group would be dropped; set it to false, or n to 2 or more"
        )
    elif metric not in FILTER_METRICS:
        yield (
            f"{key}.metric={metric!r}: want {' or '.join(FILTER_METRICS)}; the sum that other "
            "versions of verl call seq_reward is reward"
        )


def has_critic(config: Mapping[str, Any]) -> bool:
    """Whether a critic is trained."""
    return at(config, "algorithm.adv_estimator") == "gae" or bool(at(config, "critic.enable"))


def has_reference(config: Mapping[str, Any]) -> bool:
    """Whether a reference model is needed for a KL term."""
    return bool(at(config, "algorithm.use_kl_in_reward") or at(config, f"{_ACTOR}.use_kl_loss"))


def is_count(value: Any) -> bool:
    """Whether a value is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
