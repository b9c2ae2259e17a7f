"""verl's FSDP2 engines for device `cpu`.

verl adapter: `EngineRegistry` (workers/engine/base.py at 0.9.1), which registers FSDP for cuda and
npu only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead


class _NoAcceleratorOffload:
    """FSDP2 without verl's offload policy, which needs pinned memory."""

    engine_config: Any

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        if config.strategy == "fsdp":
            raise ValueError(
                "cannot build strategy='fsdp' on a CPU: verl synchronises module states, which "
                "FSDP1 refuses for CPU parameters; set actor_rollout_ref.actor.strategy=fsdp2"
            )
        # verl gives a forward-only model (the reference policy) CPUOffloadPolicy(pin_memory=True)
        # (engine/fsdp/transformer_impl.py). Pinning memory needs an accelerator.
        forward_only, offload_policy = config.forward_only, config.offload_policy
        object.__setattr__(config, "forward_only", False)
        object.__setattr__(config, "offload_policy", False)
        try:
            return super()._build_fsdp_module(module)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            object.__setattr__(config, "forward_only", forward_only)
            object.__setattr__(config, "offload_policy", offload_policy)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngineWithLMHead(_NoAcceleratorOffload, FSDPEngineWithLMHead):
    """The policy and the reference model."""

    module: torch.nn.Module

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and merged weight, base + adapter, of each parameter of the base model.

        verl rounds these weights to bfloat16 (engine/fsdp/transformer_impl.py:1082 at 0.9.1). Here
        they stay in fp32, because rollout and trainer would otherwise disagree by more than 1e-5.
        The weights are copied, because the context restores the base weights in place.
        """
        with merged_lora_context(self.module, backup_adapters=True):
            for name, weight in normalize_peft_param_name(self.module.state_dict()).items():
                whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                yield name, whole.detach().clone()


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngineWithValueHead(_NoAcceleratorOffload, FSDPEngineWithValueHead):
    """The critic: the model's body with one value per token, for `algorithm.adv_estimator=gae`."""

    model_config: Any

    def _build_module(self) -> torch.nn.Module:
        """verl's module, with the attention of the config.

        For a value model verl calls `load_valuehead_model`, which requires flash attention (lines
        649 and 674 of utils/model.py at 0.9.1). For a language model verl takes the class from the
        config's `architectures`, and the attention from the config. So the config says language
        model, and names the class with one label per token, while verl builds.
        """
        hf_config, model_type = self.model_config.hf_config, self.model_config.model_type
        body = hf_config.architectures[0].split("For")[0]
        for name, value in {
            "architectures": [f"{body}ForTokenClassification"],
            "num_labels": 1,
            "classifier_dropout": 0.0,
            "hidden_dropout": 0.0,
            "summary_dropout_prob": 0.0,
        }.items():
            setattr(hf_config, name, value)
        object.__setattr__(self.model_config, "model_type", "language_model")
        try:
            return super()._build_module()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            object.__setattr__(self.model_config, "model_type", model_type)
