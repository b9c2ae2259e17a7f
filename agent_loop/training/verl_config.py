"""What verl itself refuses of a run config, before Ray starts.

verl builds a part of its config classes in the trainer and the others in Ray's workers, minutes
into a run. The trainer builds all of them here before it starts Ray. `verl-mixed check` runs this
module as a program, because the import of verl takes five seconds and 400 MB.

Source: `main` in trainer/main_ppo.py and `init_model` in workers/engine_workers.py of verl 0.9.1.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, cast

RENAMED_FOR_REF: Mapping[str, str] = {
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}
"""Keys of the reference model -> their names in the class of the actor, which verl builds of it."""


def refusals(config: Any) -> list[str]:
    """A sentence for each part of a resolved config (a `DictConfig`) that verl refuses.

    Empty if verl is not installed, which `verl_mixed.checks.packages` reports.
    """
    try:
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import omega_conf_to_dataclass, validate_config
    except ModuleNotFoundError:
        return []
    config = _without_what_is_not_here(config)
    parts, has_ref = config.actor_rollout_ref, need_reference_policy(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every run without a critic
        has_critic = need_critic(config)
    sections = {
        "actor_rollout_ref.actor": parts.actor,
        "actor_rollout_ref.rollout": parts.rollout,
        **({"actor_rollout_ref.ref": ref_as_actor(parts.ref)} if has_ref else {}),
        **({"critic": config.critic} if has_critic else {}),
    }
    found = [
        f"{where}: verl refuses it: {text}; correct the value, or remove the key"
        for where, section in sections.items()
        if (text := _words_of(omega_conf_to_dataclass, section))
    ]
    if found:
        return found  # validate_config builds actor and critic too, and would repeat their words
    text = _words_of(validate_config, config, has_ref, has_critic)
    return [f"verl refuses the config: {text}; correct the values"] if text else []


def _without_what_is_not_here(config: Any) -> Any:
    """A copy that verl can judge without the model and without vLLM.

    A critic loads its model when its class is built, and a model may be still to download. A rank
    of LoRA is compared with those of the installed vLLM; `verl_mixed.checks.config.lora` has the
    same rule.
    """
    from omegaconf import OmegaConf

    config = config.copy()
    OmegaConf.update(config, "critic.model", None)
    if find_spec("vllm") is None:
        OmegaConf.update(config, "actor_rollout_ref.model.lora.merge", True, force_add=True)
    return config


def ref_as_actor(ref: Any) -> Any:
    """The reference model's section with the names of the actor's class."""
    from omegaconf import OmegaConf

    given = cast(dict[str, Any], OmegaConf.to_container(ref))
    return OmegaConf.create({RENAMED_FOR_REF.get(key, key): given[key] for key in given})


def _words_of(build: Callable[..., object], *arguments: object) -> str:
    """verl's words if it refuses, else empty. A package that is not here refuses nothing."""
    try:
        build(*arguments)
    except ImportError:
        return ""
    except Exception as error:  # verl raises what it likes
        reason = error.__cause__ or error
        return " ".join(str(reason).split()) or type(reason).__name__
    return ""


if __name__ == "__main__":
    from omegaconf import OmegaConf

    sys.stdout.write(json.dumps(refusals(OmegaConf.create(json.load(sys.stdin)))))
