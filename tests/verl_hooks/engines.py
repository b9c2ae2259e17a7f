"""What trains the policy and what generates: FSDP, workers, rollout servers."""

from tests.verl_hooks.hook import Hook

_FSDP = "workers.engine.fsdp.transformer_impl:FSDPEngine"

ENGINES = (
    Hook(
        f"{_FSDP}._build_fsdp_module",
        "cpu_engine/engine.py: a forward-only model would be offloaded with pinned memory",
        says=(
            'self.engine_config.strategy == "fsdp"',
            "sync_module_states=True",
            'self.engine_config.strategy == "fsdp2"',
            "self.engine_config.offload_policy or self.engine_config.forward_only",
            "CPUOffloadPolicy(pin_memory=True)",
        ),
    ),
    Hook(
        f"{_FSDP}._build_module",
        "cpu_engine/engine.py: a language model alone leaves its class to the config",
        says=(
            'self.model_config.model_type == "language_model"',
            "get_hf_auto_model_class(hf_config=self.model_config.hf_config)",
            "auto_class.from_pretrained(",
            "config=self.model_config.hf_config",
            "load_valuehead_model(",
        ),
    ),
    Hook(
        "utils.model:load_valuehead_model",
        "cpu_engine/engine.py, config/profile/gpu.yaml: the critic wants flash attention",
        says=('attn_implementation="flash_attention_2"',),
    ),
    Hook(
        "workers.config.model:HFModelConfig",
        "config/profile/*.yaml: attention is set in override_config",
        says=('override_config.get("attn_implementation", "flash_attention_2")',),
    ),
    Hook(
        "workers.engine.fsdp.transformer_impl",
        "agent_loop/training/optimizer_steps.py: one temperature per row; "
        "an update without a gradient is skipped",
        says=("if not torch.isfinite(grad_norm)", "if not isinstance(temperature, torch.Tensor)"),
    ),
    Hook(
        "workers.engine_workers:ActorRolloutRefWorker",
        "config/profile/gpu.yaml: micro-batches of actor and rollout",
        says=(
            "self.config.actor.use_dynamic_bsz == self.config.rollout.log_prob_use_dynamic_bsz",
            "self.config.rollout.log_prob_max_token_len_per_gpu",
            "get_rollout_class(",
        ),
    ),
    Hook(
        "utils.seqlen_balancing:rearrange_micro_batches",
        "verl_mixed/checks/config/devices.py: a micro-batch holds the longest sequence",
        says=("assert max_token_len >= max_seq_len",),
    ),
    Hook(
        "experimental.separation.engine_workers:DetachActorWorker._get_strategy_handlers",
        "cpu_engine/saved_weights.py keeps copies of the weights that a step began with",
        says=("fsdp2_sharded_load_from_cpu", "fsdp2_sharded_save_to_cpu"),
    ),
    Hook(
        "utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
        "cpu_engine/saved_weights.py: .cpu() copies nothing on a CPU",
        says=(
            "cpu_sharded_state[param_name] = (local_cpu_tensor, param._spec)",
            "return cpu_sharded_state",
        ),
    ),
    Hook(
        "utils.distributed:initialize_global_process_group_ray",
        "cpu_engine/process_group.py: called by every worker, and replaced on a CPU",
        says=("if not torch.distributed.is_initialized():", "init_process_group("),
    ),
    Hook(
        "single_controller.ray.base:RayWorkerGroup._create_worker",
        "cpu_engine/process_group.py: these variables tell worker groups apart",
        says=(
            '"WORLD_SIZE": str(world_size)',
            '"RANK": str(rank)',
            '"WG_PREFIX": self.name_prefix',
            '"MASTER_ADDR": self._master_addr',
            '"MASTER_PORT": self._master_port',
        ),
    ),
    Hook(
        "checkpoint_engine.base:CheckpointEngineWorker.__init__",
        "cpu_engine/process_group.py: the worker of a rollout server has such a group too",
        says=('initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")',),
    ),
)

ROLLOUT = (
    Hook(
        "workers.rollout.replica:RolloutReplica.__init__",
        "cpu_engine/rollout.py",
        says=(
            "self.world_size",
            "self.gpus_per_replica_node = min(gpus_per_node, self.world_size)",
            "self.world_size % self.gpus_per_replica_node == 0",
            "self.name_suffix =",
            "self._server_address",
            "self._server_handle",
        ),
        takes=("replica_rank", "config", "model_config", "gpus_per_node", "is_reward_model"),
    ),
    Hook(
        "workers.rollout.llm_server",
        "verl_mixed/checks/config/devices.py: GPUs that make no whole engine are left over",
        says=("num_replicas = world_size // rollout_world_size",),
    ),
    Hook(
        "workers.rollout.base:BaseRollout.update_weights",
        "cpu_engine/rollout.py",
        takes=("weights", "wire_format"),
    ),
    Hook(
        "checkpoint_engine.base:CheckpointEngineRegistry",
        "cpu_engine/checkpoint_engine.py",
        says=("def register(backend: str)", "def get(cls, backend: str)"),
    ),
)

VLLM_SERVER = (
    # verl's module imports vLLM, so it is read from its file.
    '"skip_tokenizer_init": False',  # string stops need a tokenizer in the engine
    '"worker_extension_cls": self._get_worker_extension_cls()',
    '"enable_sleep_mode": self.config.enable_sleep_mode',
    '"logprobs_mode": self.config.logprobs_mode',
    "async def generate(",
    "max_possible_tokens = self.config.max_model_len - len(prompt_ids)",
    'max_tokens = sampling_params.pop("max_tokens")',
    'sampling_params["logprobs"] = 0 if sampling_params.pop("logprobs", False) else None',
    'sampling_params.setdefault("seed"',  # a seed of ours comes before it
    "SamplingParams(max_tokens=max_tokens, **sampling_params)",  # stop, stop_token_ids and others
    'extra_fields = {"global_steps": self.global_steps}',  # the version of the weights
    "token_ids = final_res.outputs[0].token_ids",
    'stop_reason = "aborted"',
    "async def sleep(self)",
    "self.config.free_cache_engine",
    "def _get_worker_extension_cls(self) -> str",
    "self.server_class = ray.remote(vLLMHttpServer)",
    "max_concurrency=self.max_concurrency",  # `most_open_requests` counts on its slots
    "def _get_server_name_prefix(self) -> str",
)
"""Of workers/rollout/vllm_rollout/vllm_async_server.py, in this order; for agent_loop/ and the gpu
profile."""
