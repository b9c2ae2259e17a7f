"""Who runs agent loops, what these are given, and how they reach the engine."""

from tests.verl_hooks.hook import Hook

_ADAPTERS = "agent_loop/training/verl_adapters"
_LOOPS = "trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ"

AGENT_LOOPS = (
    Hook(
        f"{_LOOPS}.generate_sequences",
        f"{_ADAPTERS}/loop_worker.py: sampling parameters, and columns of the rows",
        says=(
            'batch["validate"]',
            "logprobs=config.calculate_log_probs",
            "config.val_kwargs.temperature",
            '"agent_name" not in batch',
            "get_trajectory_info(",
            "self._run_prompt(",
        ),
    ),
    Hook(
        f"{_LOOPS}._run_prompt",
        f"{_ADAPTERS}/dataset.py: a group's size is a column; a loop that raises fails its group",
        says=(
            'prompt.pop("__rollout_n__"',
            "for i in range(n):",
            "session_id=i",
            "_settle_session_tasks(tasks)",
            'status = "failure"',
            'status = "finished"',
        ),
        takes=("prompt", "sampling_params", "trajectory", "trace"),
    ),
    Hook(
        f"{_LOOPS}._agent_loop_postprocess",
        "agent_loop/training/trained_batch.py: the names of rows, and what a row carries",
        says=(
            "self._compute_score(outputs, kwargs=kwargs)",
            'keys.append(f"{uid}_{session_id}_{i}")',
            "field = output.as_dict()",
            "field.update(kwargs)",
            'field["loss_mask"] = field["response_mask"]',
            '"seq_len": prompt_len + response_len',
            'field["extra_fields"].get("min_global_steps")',
            'field["extra_fields"].get("max_global_steps")',
        ),
        takes=("output", "validate", "kwargs"),
    ),
    Hook(
        "trainer.ppo.v1.agent_loop_tq:apply_greedy_sampling_params",
        f"{_ADAPTERS}/loop_worker.py: the greedy trajectory of remax",
        says=('params["temperature"] = 0',),
    ),
    Hook(
        "experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        f"{_ADAPTERS}/loop_worker.py makes loops with what verl gives them",
        says=(
            "hydra.utils.instantiate(",
            "trainer_config=DictConfigWrap(config=self.config)",
            "server_manager=self.llm_client",
            "tokenizer=self.tokenizer",
            "processor=self.processor",
        ),
        takes=("sampling_params", "trajectory", "agent_name", "trace"),
    ),
    Hook(
        "experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score",
        "agent_loop/turn_agent_loop.py: a loop that sets its reward is not judged again",
        says=("final_output.reward_score is None",),
    ),
    Hook(
        "experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict",
        f"{_ADAPTERS}/engine_client.py: routes by token, with zeros for missing rows",
        says=("routed_experts.new_zeros((total_length", "aligned[:num_rows] ="),
    ),
    Hook(
        "experimental.agent_loop.tool_agent_loop:ToolAgentLoop._handle_generating_state",
        f"{_ADAPTERS}/engine_client.py: the last request has the routes of all tokens",
        says=("agent_data.routed_experts = output.routed_experts",),
    ),
    Hook(
        "experimental.agent_loop.agent_loop:AgentLoopBase.__init__",
        "agent_loop/turn_agent_loop.py",
        says=("self.config =", "self.rollout_config", "self.continuous_token_builder"),
        takes=("trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls"),
    ),
    Hook(
        "workers.rollout.llm_server:LLMServerClient.generate",
        f"{_ADAPTERS}/engine_client.py wraps the handle that it asks for",
        says=(
            "server_id, server = await self._acquire_server(",
            "await server.generate.remote(",
            "sampling_params=sampling_params",
            "self._release_server(",
        ),
        takes=("request_id", "prompt_ids", "sampling_params"),
    ),
    Hook(
        "workers.rollout.llm_server:LLMServerClient._release_server",
        f"{_ADAPTERS}/engine_client.py gives a server back",
        takes=("server_id", "request_id"),
    ),
    Hook(
        "utils.tokenizer.continuous_token:ContinuousTokenBuilder.build_initial_tokens",
        "agent_loop/turn_agent_loop.py",
        takes=("messages",),
    ),
    Hook(
        "tools.function_tool:normalize_function_tool_return",
        "agent_loop/react_agent_loop.py calls verl's tools",
    ),
    Hook(
        "experimental.agent_loop.agent_loop:AgentLoopWorker.__init__",
        "agent_loop/evaluation/worker.py: a worker without TransferQueue",
        says=("self.llm_client = llm_client", "self.tokenizer =", "load_all_tools("),
        takes=("config", "llm_client"),
    ),
    Hook(
        "workers.rollout.llm_server:LLMServerManager._initialize_llm_servers",
        "agent_loop/evaluation/servers.py starts servers without workers beside them",
        says=(
            "self.rollout_replicas = [",
            "replica_rank=",
            "config=self.rollout_config",
            "model_config=self.model_config",
            "server.init_standalone()",
            "self.server_handles = [",
            "self.server_addresses = [",
        ),
    ),
    Hook(
        "workers.rollout.llm_server:LLMServerClient.__init__",
        "agent_loop/evaluation/engine_openai.py: a client without verl's load balancer",
        takes=("config", "load_balancer_handle"),
    ),
    Hook(
        "trainer.ppo.utils:create_rl_dataset",
        "agent_loop/evaluation/main.py: the rows of a validation",
        takes=("data_paths", "data_config", "tokenizer", "processor", "is_train", "max_samples"),
    ),
)
