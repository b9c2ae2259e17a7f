"""Checks of verl's own settings: values that verl accepts and then fails on or misuses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from config.lookup import at
from samplers.mixture_plan import MAX_BATCH_SIZE

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_VALIDATION = f"{_ROLLOUT}.val_kwargs"
_HYBRID = "trainer.v1.separate_async.hybrid_rollout"
_STORE = "transfer_queue.backend.SimpleStorage"

_STRICT = ConfigDict(strict=True)

_Count: Any = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=0, lt=1)]

_COUNT = (_Count, "a whole number >= 1")
_TOP_K = (Annotated[int, Field(ge=-1)], "a whole number, -1 for all tokens")
_EVERY = (int, "a whole number, -1 for never")
_POSITIVE = (_Positive, "a number > 0")
_WEIGHT = (Annotated[float, Field(ge=0, allow_inf_nan=False)], "a number >= 0")
_SHARE = (Annotated[float, Field(gt=0, le=1)], "a number above 0 and up to 1")
_DISCOUNT = (Annotated[float, Field(ge=0, le=1)], "a number from 0 to 1")
_KL = (
    Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "k3+"],
    "k1, k2, k3, abs or another name that verl has for them",
)

_Dtype = Literal["auto", "bfloat16", "float16", "float32", "float", "half", "bf16", "fp16", "fp32"]
_LogProbs = Literal["processed_logprobs", "raw_logprobs"]
_Resume = Literal["auto", "disable", "resume_path"]
_Logger = Literal[
    "console", "tensorboard", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio",
    "file", "rl_insight",
]  # fmt: skip

KINDS: Mapping[str, tuple[Any, str]] = {
    "data.train_batch_size": (
        Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)],
        f"a whole number >= 1 and <= {MAX_BATCH_SIZE}",
    ),
    "data.max_prompt_length": _COUNT,
    "data.max_response_length": _COUNT,
    f"{_ACTOR}.ppo_mini_batch_size": _COUNT,
    f"{_ACTOR}.ppo_epochs": _COUNT,
    f"{_ACTOR}.optim.lr": (_Rate, "a number from 0 (learns nothing) to below 1"),
    f"{_ACTOR}.clip_ratio": _POSITIVE,
    f"{_ACTOR}.clip_ratio_low": _POSITIVE,
    f"{_ACTOR}.clip_ratio_high": _POSITIVE,
    f"{_ACTOR}.entropy_coeff": _WEIGHT,
    f"{_ACTOR}.kl_loss_coef": _WEIGHT,
    f"{_ACTOR}.kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl.type": (Literal["fixed", "adaptive"], "fixed or adaptive"),
    "algorithm.kl_ctrl.kl_coef": _WEIGHT,
    "algorithm.kl_ctrl.target_kl": _POSITIVE,
    "algorithm.kl_ctrl.horizon": _POSITIVE,
    "algorithm.gamma": _DISCOUNT,
    "algorithm.lam": _DISCOUNT,
    f"{_ROLLOUT}.temperature": (_Positive, "a number > 0: log-probs are divided by it"),
    f"{_ROLLOUT}.top_p": _SHARE,
    f"{_ROLLOUT}.top_k": _TOP_K,
    f"{_VALIDATION}.n": _COUNT,
    f"{_VALIDATION}.temperature": _WEIGHT,
    f"{_VALIDATION}.top_p": _SHARE,
    f"{_VALIDATION}.top_k": _TOP_K,
    f"{_ROLLOUT}.dtype": (_Dtype, "bfloat16, float16, float32 or auto"),
    f"{_ROLLOUT}.logprobs_mode": (_LogProbs | None, "processed_logprobs or raw_logprobs"),
    f"{_ROLLOUT}.gpu_memory_utilization": _SHARE,
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": _COUNT,
    f"{_ROLLOUT}.multi_turn.max_turn_length": (_Count | None, "a whole number >= 1, or null"),
    f"{_ROLLOUT}.agent.num_workers": (
        _Count | None,
        "a whole number >= 1, or null for as many as the trajectories at once need",
    ),
    f"{_STORE}.total_storage_size": (_Count | None, "a whole number >= 1, or null for no limit"),
    f"{_STORE}.num_data_storage_units": (
        _Count | None,
        "a whole number >= 1, or null for 8, or 2 a node where that is more",
    ),
    "trainer.n_gpus_per_node": _COUNT,
    "trainer.nnodes": _COUNT,
    "trainer.total_training_steps": _COUNT,
    "trainer.critic_warmup": (Annotated[int, Field(ge=0)], "a whole number >= 0"),
    "trainer.save_freq": _EVERY,
    "trainer.test_freq": _EVERY,
    "trainer.max_actor_ckpt_to_keep": (_Count | None, "a whole number >= 1, or null for all"),
    "trainer.v1.colocate_async.num_warmup_batches": _WEIGHT,
    "trainer.v1.separate_async.num_warmup_batches": _WEIGHT,
    f"{_HYBRID}.enable_switch": (bool, "true or false"),
    f"{_HYBRID}.adaptive_switch_threshold": (bool, "true or false"),
    f"{_HYBRID}.switch_threshold_ratio": _SHARE,
    f"{_HYBRID}.switch_threshold_step_up": _WEIGHT,
    f"{_HYBRID}.switch_threshold_step_down": _WEIGHT,
    f"{_HYBRID}.switch_threshold_release_steps": _COUNT,
    f"{_HYBRID}.switch_cost_window_size": _COUNT,
    "trainer.v1.sampler.max_off_policy_strategy": (Literal["drop", "wait"], "drop or wait"),
    "trainer.v1.sampler.max_off_policy_threshold": (
        _Count | None,
        "a whole number >= 1, or null for no limit",
    ),
    "trainer.resume_mode": (_Resume, "auto, disable or resume_path"),
    "trainer.logger": (
        list[_Logger] | _Logger,
        "some of console, tensorboard, wandb, mlflow, swanlab, clearml, trackio, file",
    ),
}


def number_problems(config: Mapping[str, Any]) -> list[str]:
    """One sentence for each wrong value."""
    problems = []
    for key, (kind, wanted) in KINDS.items():
        value = at(config, key)
        if key.startswith(_VALIDATION) and value == at(config, key.replace(_VALIDATION, _ROLLOUT)):
            continue  # it follows the rollout's, which is reported
        try:
            TypeAdapter(kind, config=_STRICT).validate_python(value)
        except ValidationError:
            problems.append(f"{key}={value!r}: want {wanted}")
    return problems
