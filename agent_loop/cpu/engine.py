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
    """The critic."""
