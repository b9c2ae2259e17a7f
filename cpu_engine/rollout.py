"""Rollout backend `hf`: a Ray actor that decodes on a CPU behind verl's server interface.

verl adapters: `RolloutReplica` (workers/rollout/replica.py at 0.9.1) starts the server,
`BaseRollout` (workers/rollout/base.py) sends it weights from the training process, `TokenOutput`
is its answer. The decoding itself is `cpu_engine.decoder`.
"""

# Overrides take what this backend needs and swallow the rest; Ray handles are untyped.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from cpu_engine.async_decoder import AsyncDecoder
from cpu_engine.decoder import BatchDecoder, Request
from cpu_engine.sampling import Sampling
from cpu_engine.seeds import seed_from


class WeightSync:
    """Receives one version of a model's weights in parts, and refuses an incomplete one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        tied = dict(model.named_parameters(remove_duplicate=False))
        self._aliases = tied.keys() - self._parameters.keys()
        self._received: set[str] = set()

    @torch.no_grad()
    def receive(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, last: bool) -> None:
        """Copy one part into the model.

        Raises:
            RuntimeError: the model lacks a name, a shape differs, a value is not a finite float, or
                names are missing after the last part. The model is then a mixture of two versions,
                and must not generate.
        """
        for name, tensor in named_tensors:
            if name in self._aliases:
                continue  # a tied weight that arrives under its second name
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                ours = None if parameter is None else tuple(parameter.shape)
                raise RuntimeError(
                    f"weight sync refused: name={name!r} has shape={tuple(tensor.shape)}, the "
                    f"rollout model has {ours}; trainer and rollout must load the same model"
                )
            # The sum is not finite if a value is not, and costs less than the copy. Another float
            # type is allowed: a bfloat16 rollout gets the trainer's float32.
            if not tensor.is_floating_point() or not tensor.sum(dtype=torch.float32).isfinite():
                raise RuntimeError(
                    f"weight sync refused: name={name!r} of dtype={tensor.dtype} has values that "
                    "are not finite floats; look at actor/grad_norm of the last steps"
                )
            parameter.copy_(tensor)
            self._received.add(name)
        if last:
            missing = sorted(self._parameters.keys() - self._received)
            self._received = set()
            if missing:
                raise RuntimeError(
                    f"weight sync incomplete: {len(missing)} of {len(self._parameters)} parameters "
                    f"missing, first {missing[:3]}; the rollout would mix two policies"
                )


class HFServer:
    """An async Ray actor that generates for many agent loops. Weights change between two steps."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        self.replica_rank = replica_rank
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(
            model_config, dataclass_type=HFModelConfig
        )
        options = (self.config.engine_kwargs or {}).get("hf") or {}
        torch.set_num_threads(int(options.get("num_threads", os.environ.get("OMP_NUM_THREADS", 1))))
        model = self._load_model()
        self.weights = WeightSync(model)
        self.decoder = BatchDecoder(
            model,
            eos_token_ids=[] if self.config.ignore_eos else self._eos_token_ids(),
            seed=seed_from(self.config.seed, replica_rank),
            raw_log_probs=self.config.logprobs_mode == "raw_logprobs",
            decode=self._decode,
            prefix_cache_bytes=int(options.get("prefix_cache_mb", 256)) << 20,
            deterministic=self.config.full_determinism,
            max_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.global_steps: int | None = None
        self.engine = AsyncDecoder(self.decoder, self.config.max_num_seqs)
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False
        self._fault: str | None = None

    async def ready(self) -> str:
        return f"hf-{ray.get_runtime_context().get_actor_id()}"

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **ignored: Any,
    ) -> TokenOutput:
        """Continue `prompt_ids`, and return when the request is finished.

        A cancelled request is no longer decoded. Only `ray.cancel` cancels it, not the cancellation
        of a task that awaits the answer. An aborted request returns its tokens so far with
        `stop_reason="aborted"`. A second request with these tokens after the prompt and the same
        seed gets the tokens that would have followed; stop strings are searched in those only.

        Raises:
            ValueError: images, video or audio were given, or a sampling parameter is out of range.
            RuntimeError: the last weight sync or a decode step failed.
        """
        if any(ignored.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise ValueError("rollout.name=hf generates from text only")
        ids = list(normalize_token_ids(prompt_ids))
        request = Request(prompt_ids=ids, sampling=self._sampling(sampling_params, len(ids)))
        while not self._open.is_set() and not self._rejects:
            await self._open.wait()
        if self._fault:
            raise RuntimeError(f"the rollout server stopped generating: {self._fault}")
        # All tokens have the version of the first: requests are aborted before the weights change.
        steps = self.global_steps
        if self._open.is_set():
            await self.engine.generate(request)
        else:
            request.stop_reason = "aborted"
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.log_probs if sampling_params.get("logprobs", True) else None,
            stop_reason=request.stop_reason,
            num_preempted=0,
            extra_fields={"global_steps": steps, "num_cached_tokens": request.cached_tokens},
        )

    async def update_weights(
        self, named_tensors: list[tuple[str, torch.Tensor]], last: bool
    ) -> None:
        """`WeightSync.receive`. After an error generation is refused until the next whole sync."""

        def receive() -> None:
            self.decoder.weights_changed()
            self.weights.receive(named_tensors, last=last)

        try:
            await self.engine.run(receive)
        except RuntimeError as error:
            self._fault = str(error)
            raise
        if last:
            self._fault = None

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the version of the weights, from which seeds are made: a resumed run has the same."""
        self.global_steps = global_steps
        seed = seed_from(self.config.seed, self.replica_rank, global_steps)
        await self.engine.run(lambda: self.decoder.reseed(seed))

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort running requests. New ones wait for `resume_generation`, or are aborted at once too
        with `reject_request`."""
        self._open.clear()
        self._rejects = reject_request
        aborted = await self.engine.abort_all()
        return {"aborted_count": len(aborted), "request_ids": []}

    async def resume_generation(self) -> None:
        self._rejects = False
        self._open.set()

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def sleep(self) -> None:
        await self.release_kv_cache()

    async def clear_kv_cache(self) -> None:
        await self.engine.run(self.decoder.prefixes.clear)

    async def release_kv_cache(self) -> None:
        await self.engine.run(self.decoder.free_memory)

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...

    def _sampling(self, params: dict[str, Any], prompt_length: int) -> Sampling:
        config, stop = self.config, params.get("stop")
        budget = params.get("max_tokens") or params.get("max_new_tokens")
        if budget is None:
            total = config.prompt_length + config.response_length
            budget = min(config.response_length, total - prompt_length)
        return Sampling(
            max_tokens=int(budget),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k") or -1),
            stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
            # The answer is token ids, which include the stop string. `include_stop_str_in_output`
            # is not read.
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            seed=params.get("seed"),
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.model_config.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _load_model(self) -> Any:
        hf_config = self.model_config.hf_config
        hf_config._attn_implementation = "sdpa"
        names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        dtype = getattr(torch, names.get(self.config.dtype, self.config.dtype))
        if self.config.load_format == "dummy":  # the first weight sync fills it
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                str(self.model_config.local_path), config=hf_config, dtype=dtype
            )
        return model.eval()

    def _eos_token_ids(self) -> list[int]:
        generation = self.model_config.generation_config
        ids = getattr(generation, "eos_token_id", None) or self.model_config.hf_config.eos_token_id
        return [i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]


class HFReplica(RolloutReplica):
    """Starts one `HFServer`."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                f"rollout.name=hf runs in one process, got world_size={self.world_size}; set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = f"hf_server_{kind}{self.replica_rank}_0{self.name_suffix}"
        server = (
            ray.remote(HFServer)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
            )
        )
        self._server_address = await server.ready.remote()
        self.servers, self._server_handle = [server], server

    def rollout_worker_use_gpu(self) -> bool:
        return False


class HFServerAdapter(BaseRollout):
    """In the training process: sends the weights to the server of the same rank."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.sleep_level = 1  # read by verl; 1 keeps the weights in memory
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **ignored: Any,
    ) -> None:
        """Send all weights in buckets of at most `update_weights_bucket_megabytes`.

        Args:
            weights: yields (name, tensor).
            wire_format: must be `named_tensors`, which are full tensors.

        Raises:
            ValueError: another wire format.
            RuntimeError: the server refused them (see `WeightSync.receive`).
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=hf takes wire_format=named_tensors, got {wire_format!r}"
            )
        if self._server is None:
            self._server = ray.get_actor(f"hf_server_{self.replica_rank}_0")
        capacity = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[tuple[str, torch.Tensor]] = []
        size_bytes = 0
        async for name, weight in ensure_async_iterator(weights):
            tensor = weight.detach().cpu().clone()
            if bucket and size_bytes + tensor.nbytes > capacity:
                await self._server.update_weights.remote(bucket, False)
                bucket, size_bytes = [], 0
            bucket.append((name, tensor))
            size_bytes += tensor.nbytes
        await self._server.update_weights.remote(bucket, True)
        if global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)
