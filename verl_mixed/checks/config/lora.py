"""Checks of LoRA: which engine reads which keys, and how adapters reach the rollout.

The rules are those of verl 0.9.1: `workers/engine/fsdp/transformer_impl.py` (`_build_lora_module`,
`get_per_tensor_param`), `workers/engine_workers.py` (`update_weights`) and
`utils/checkpoint/fsdp_checkpoint_manager.py`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config.lookup import at
from verl_mixed.checks.config.algorithm import is_count

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = ("fsdp", "fsdp2")

_ONLY_WITH_A_RANK: Mapping[str, Any] = {
    "lora_alpha": 16,
    "target_modules": "all-linear",
    "exclude_modules": None,
    "lora_adapter_path": None,
}
"""Keys of the model that are read with `lora_rank` > 0 only, and verl's defaults."""

_VLLMS_RANK = 512
"""The largest of vLLM's `MaxLoRARanks`, which verl asks for the engine's `max_lora_rank`."""

_PLAIN = {"peft_type": "LORA", "use_dora": False, "use_rslora": False, "bias": "none"}
"""Settings of an adapter that verl's checkpoints do not keep; others could not be exported."""


def lora_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Combinations of LoRA with an engine or a backend that cannot work or were never tried."""
    strategy = at(config, f"{_ACTOR}.strategy")
    ranks = {key: at(config, key, 0) for key in (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank")}
    if wrong := {key: value for key, value in ranks.items() if type(value) is not int or value < 0}:
        for key, value in wrong.items():
            yield f"{key}={value!r}: want a whole number >= 0; 0 trains all weights"
        return
    rank, of_megatron = ranks.values()
    if at(config, "critic.model.lora_rank"):
        yield (
            "critic.model.lora_rank: no critic was tried with LoRA; set it to 0, which trains all "
            "weights of the critic"
        )
    if strategy != "megatron" and of_megatron:
        yield (
            f"{_MODEL}.lora.rank={of_megatron} with {_ACTOR}.strategy={strategy}: only megatron "
            f"reads it; set {_MODEL}.lora_rank instead"
        )
    if strategy not in _FSDP and rank:
        remedy = f"set {_MODEL}.lora.rank instead" if strategy == "megatron" else "set it to 0"
        yield (
            f"{_MODEL}.lora_rank={rank} with {_ACTOR}.strategy={strategy}: verl has LoRA under "
            f"this key for fsdp and fsdp2 only; {remedy}"
        )
    if not rank:
        for key, default in _ONLY_WITH_A_RANK.items():
            if (value := at(config, f"{_MODEL}.{key}", default)) != default:
                yield (
                    f"{_MODEL}.{key}={value!r} with {_MODEL}.lora_rank=0: it is not read; set "
                    "lora_rank, or remove the override"
                )
    if rank and not is_count(alpha := at(config, f"{_MODEL}.lora_alpha")):
        yield f"{_MODEL}.lora_alpha={alpha!r}: want a whole number >= 1; 2 x lora_rank is common"
    if rank or of_megatron:
        yield from _sync_problems(config, max(rank, of_megatron))
    if rank and strategy in _FSDP:
        yield from _fsdp_problems(config, rank)


def _sync_problems(config: Mapping[str, Any], rank: int) -> Iterator[str]:
    """Ways to the rollout on which adapters would be refused, or lost in silence."""
    backend, mode = at(config, f"{_ROLLOUT}.name"), at(config, "trainer.v1.trainer_mode")
    engine = at(config, f"{_ROLLOUT}.checkpoint_engine.backend")
    if mode == "mixed_separate_async" and engine == "delta_sharded":
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend={engine!r} with LoRA: verl sends the changes of "
            "full weights this way, and no adapters; choose nccl or another"
        )
    if at(config, f"{_MODEL}.lora.merge"):
        return
    modules = at(config, f"{_MODEL}.target_modules")
    if backend == "sglang" and isinstance(modules, str) and modules != "all-linear":
        yield (
            f"{_MODEL}.target_modules={modules!r} with {_ROLLOUT}.name=sglang: SGLang takes no "
            "regular expression; list the modules, take all-linear, or set lora.merge to true"
        )
    if backend == "vllm" and rank > _VLLMS_RANK:
        yield (
            f"a LoRA rank of {rank} with {_ROLLOUT}.name=vllm: vLLM serves adapters up to rank "
            f"{_VLLMS_RANK}; lower it, or set {_MODEL}.lora.merge to true"
        )
    if backend == "hf" or mode == "mixed_separate_async":
        why = "takes full weights only" if backend == "hf" else "would get no adapter from verl"
        where = f"{_ROLLOUT}.name=hf" if backend == "hf" else f"the rollout of {mode}"
        yield f"{_MODEL}.lora.merge=False with LoRA: {where} {why}; set it to true"
    if (
        at(config, f"{_ROLLOUT}.layered_summon")
        and at(config, f"{_ROLLOUT}.load_format") == "dummy"
    ):
        yield (
            f"{_ROLLOUT}.layered_summon=True with {_ROLLOUT}.load_format='dummy' and LoRA: the "
            "first sync must send the base model, which verl then refuses; set load_format to "
            "safetensors"
        )


def _fsdp_problems(config: Mapping[str, Any], rank: int) -> Iterator[str]:
    """What verl's FSDP engine and its checkpoints cannot do with adapters."""
    if at(config, f"{_MODEL}.target_parameters"):
        yield (
            f"{_MODEL}.target_parameters: adapters of single parameters were not tried; name "
            "modules in target_modules"
        )
    if "hf_model" in (at(config, f"{_ACTOR}.checkpoint.save_contents") or ()):
        yield (
            f"{_ACTOR}.checkpoint.save_contents has hf_model, with LoRA: verl would write weights "
            "that transformers does not load; leave it out, and use `verl-mixed export`"
        )
    if not isinstance(path := at(config, f"{_MODEL}.lora_adapter_path"), str):
        return
    key = f"{_MODEL}.lora_adapter_path={path!r}"
    try:
        adapter = json.loads((Path(path).expanduser() / "adapter_config.json").read_text())
        found = {name: adapter.get(name, wanted) for name, wanted in _PLAIN.items()}
        found |= {"lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"]}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        yield f"{key}: no adapter's folder ({error}); want one with an adapter_config.json of peft"
        return
    wanted = {**_PLAIN, "lora_rank": rank, "lora_alpha": at(config, f"{_MODEL}.lora_alpha")}
    for name, value in wanted.items():
        if found[name] != value:
            yield (
                f"{key}: the adapter has {name}={found[name]!r}, where {value!r} is wanted; set "
                f"{_MODEL}.{name} to the adapter's, or choose another adapter"
                if name.startswith("lora_")
                else f"{key}: the adapter has {name}={found[name]!r}, which was not tried; choose "
                "an adapter of plain LoRA"
            )
