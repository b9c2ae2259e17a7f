"""Checks of `algorithm.rollout_correction`: the weights of trajectories that older weights sampled.

The rules are those of verl's V1 trainers at 0.9.1 (trainer/ppo/v1/trainer_base.py,
`_compute_old_log_prob` and `_compute_advantage`), which ignore several of its settings in silence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from config.lookup import at
from config.schema import TOOL_CONFIG
from verl_mixed.checks.finding import Finding, warning
from verl_mixed.run.compose import ASYNC_MODES

_CORRECTION = "algorithm.rollout_correction"

_REJECTS = {
    f"{level}_{kind}"
    for level, kinds in {
        "token": ("k1", "k2", "k3"),
        "seq_sum": ("k1", "k2", "k3"),
        "seq_mean": ("k1", "k2", "k3"),
        "seq_max": ("k2", "k3"),
    }.items()
    for kind in kinds
}
"""verl's `SUPPORTED_ROLLOUT_RS_OPTIONS` (trainer/ppo/rollout_corr_helper.py:77)."""


def correction_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of the correction that cannot work, or that verl would not read."""
    values = at(config, _CORRECTION) or {}
    level, rejects = values.get("rollout_is"), values.get("rollout_rs")
    bypasses, loss_type = values.get("bypass_mode"), values.get("loss_type", "ppo_clip")
    if level not in (None, "token", "sequence"):
        yield f"{_CORRECTION}.rollout_is={level!r}: no such level; choose token, sequence or null"
    if level and (why := _threshold_problem(values.get("rollout_is_threshold"))):
        yield f"{_CORRECTION}.rollout_is_threshold={values.get('rollout_is_threshold')!r}: {why}"
    threshold, named = values.get("rollout_rs_threshold"), list(dict.fromkeys(_parts(rejects)))
    if unknown := {*named} - _REJECTS:
        yield (
            f"{_CORRECTION}.rollout_rs={rejects!r}: no {', '.join(sorted(unknown))}; choose of "
            f"{', '.join(sorted(_REJECTS))}"
        )
    elif named and threshold is not None and (why := _thresholds_problem(named, threshold)):
        yield f"{_CORRECTION}.rollout_rs_threshold={threshold!r} with rollout_rs={rejects!r}: {why}"
    for name, needed in (("rollout_is", level), ("rollout_rs", rejects)):
        if needed and values.get(f"{name}_threshold") is None:
            yield (
                f"{_CORRECTION}.{name}={needed!r} without {name}_threshold: verl has no default "
                f"for it; set it, or set {name} to null"
            )
        if needed and bypasses:
            yield (
                f"{_CORRECTION}.{name}={needed!r} with bypass_mode=True: the loss then compares "
                "with the rollout's log-probs itself, and verl's V1 trainers do not read it; set "
                "it to null, or bypass_mode to false"
            )
    if loss_type != "ppo_clip":
        yield (
            f"{_CORRECTION}.loss_type={loss_type!r}: verl's V1 trainers do not read it; choose "
            "the loss by actor_rollout_ref.actor.policy_loss.loss_mode, and set it to ppo_clip"
        )
    if not (level or rejects or bypasses):
        return
    if not at(config, f"{TOOL_CONFIG}.state_masking", True):
        yield (
            f"{TOOL_CONFIG}.state_masking=false with {_CORRECTION}: tokens that the policy never "
            "sampled have no rollout log-prob to correct by; use one of the two"
        )
    if not at(config, "actor_rollout_ref.rollout.calculate_log_probs"):
        yield (
            f"actor_rollout_ref.rollout.calculate_log_probs=False with {_CORRECTION}: there are no "
            "rollout log-probs to correct by; set it to true"
        )


def _threshold_problem(threshold: Any) -> str:
    """Why verl would refuse it; empty if verl takes it: a number, or two as `0.5_2.0`."""
    try:
        bounds = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        bounds = [] if threshold is not None else [1.0]  # none at all is another problem
    if not 0 < len(bounds) <= 2 or min(bounds) <= 0 or bounds != sorted(bounds):
        return "want a number above 0, or a lower and an upper one as '0.5_2.0'"
    return ""


def _thresholds_problem(rejects: Sequence[str], thresholds: Any) -> str:
    """Why verl would refuse the thresholds of these rules; empty if verl takes them."""
    given = _parts(thresholds)
    if len(given) not in (1, len(rejects)):
        return f"want one threshold for all, or {len(rejects)} with commas, one for each"
    for name, threshold in zip(rejects, given * (len(rejects) // len(given)), strict=True):
        if why := _threshold_problem(threshold):
            return why
        if "_" in threshold and not name.endswith("k1"):
            return f"{name} has no lower threshold; want one number above 0"
    return ""


def _parts(value: Any) -> list[str]:
    """The words of a value with commas; none of null."""
    text = "" if value is None else str(value)
    return [word.strip() for word in text.split(",") if word.strip()]


def correction_warnings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Warnings if probabilities are not compared, or older trajectories are not corrected."""
    limit, bypass = at(config, "mixed.max_probs_diff"), f"{_CORRECTION}.bypass_mode"
    if limit is not None and at(config, bypass):
        yield warning(
            "probabilities",
            f"mixed.max_probs_diff={limit!r} with {bypass}=True: the trainer computes no "
            "log-probs before the update, so they are not compared with the rollout's, and the run "
            "does not stop where they differ",
            f"set {bypass}=false to have them compared",
        )
    mode, values = at(config, "trainer.v1.trainer_mode"), at(config, _CORRECTION) or {}
    if mode not in ASYNC_MODES or values.get("rollout_is") or values.get("bypass_mode"):
        return
    if at(config, f"{TOOL_CONFIG}.state_masking", True):
        setting = f"{_CORRECTION}.rollout_is=None"
        remedy = "remove the override, or set it to token"
    else:
        setting = f"{TOOL_CONFIG}.state_masking=False"
        remedy = "set it to true, or train with mixed_sync"
    yield warning(
        "importance correction",
        f"{setting} with trainer.v1.trainer_mode={mode}: the importance correction is off, so "
        "trajectories of older weights are trained as if they were of the current ones",
        remedy,
    )
