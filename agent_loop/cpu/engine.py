"""verl's FSDP2 engines for device `cpu`.

verl adapter: `EngineRegistry` (workers/engine/base.py at 0.9.1), which registers FSDP for cuda and
npu only.
"""

from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)


class _NoAcceleratorOffload:
    """FSDP2 without the offload policy that needs pinned memory."""

    engine_config: Any

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        if config.strategy == "fsdp":
            raise ValueError(
                "cannot build strategy='fsdp' on a CPU: verl synchronises module states, which "
                "FSDP1 refuses for CPU parameters; set actor_rollout_ref.actor.strategy=fsdp2"
            )
        # A forward-only model (the reference policy) would be given
        # CPUOffloadPolicy(pin_memory=True) (engine/fsdp/transformer_impl.py), and pinning needs an
        # accelerator.
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


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngineWithValueHead(_NoAcceleratorOffload, FSDPEngineWithValueHead):
    """The critic: the model's body with one value per token, for `algorithm.adv_estimator=gae`."""

    model_config: Any

    def _build_module(self) -> torch.nn.Module:
        """verl's module, with the attention that the config names.

        For a value model verl calls `load_valuehead_model`, which asks for flash attention whatever
        the config says (utils/model.py:649 and 674 at 0.9.1). For a language model it takes the
        class that the config's architectures name and leaves attention to the config, so here they
        name the class for one label per token while verl builds.
        """
        hf_config, told = self.model_config.hf_config, self.model_config.model_type
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
            object.__setattr__(self.model_config, "model_type", told)
