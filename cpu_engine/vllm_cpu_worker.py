"""In vLLM's own process on a CPU: receives new weights and packs them for the CPU.

verl adapter: `vLLMColocateWorkerExtension` (workers/rollout/vllm_rollout/utils.py at 0.9.1). vLLM
packs the weights of linear layers for the CPU and discards the plain weights. verl's loading in
place therefore fails. vLLM's layerwise reload restores the plain weights and packs the new ones,
except for a tied `lm_head`, which is packed here.
"""

# vLLM is no dependency of the project.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import torch

import cpu_engine.vllm_cpu_name  # noqa: F401  # isort: skip  # before verl's
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class PackedWeightsExtension(vLLMColocateWorkerExtension):
    model_runner: Any

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive one whole version of the weights, and load it.

        Raises:
            ValueError: LoRA adapters were sent, or parameters are missing (`load`).
        """
        if peft_config is not None:
            raise ValueError("rollout.name=vllm_cpu takes full weights; set lora_rank=0")
        weights: dict[str, torch.Tensor] = {}

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # Copied, because the buffer is used again for the next bucket.
            weights.update((name, tensor.clone()) for name, tensor in bucket)

        BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        ).receive_weights(on_bucket_received=keep)
        self.load(weights)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace the weights, as `reload_weights` of vLLM's runner, which only warns if some lack.

        Raises:
            ValueError: parameters of the model are missing in `weights`.
        """
        model = self.model_runner.get_model()
        parameters = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights.items())
        finalize_layerwise_reload(model, self.model_runner.model_config)
        if missing := sorted(parameters - loaded):
            raise ValueError(
                f"weight sync incomplete: {len(missing)} of {len(parameters)} parameters missing, "
                f"first {missing[:3]}; the rollout would mix two policies"
            )
        if model.config.tie_word_embeddings:
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
