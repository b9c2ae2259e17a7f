"""Lines that real components write, for test_diagnose.py; a comment names the source of each.

Versions: ray 2.60.0, torch 2.13.0, verl 0.9.1, transformers 5.10.4, wandb 0.31.0; vLLM and NCCL are
not installed, so their lines are from issues of their projects.
"""

FAILURES: dict[str, tuple[str, ...]] = {
    # agent_loop/training/alarms.py FaultWindow.check
    "infra-error-limit": (
        "agent_loop.training.alarms.RubbleError: source=math lost 12 of 16 trajectories of the "
        "last 1 steps, more than mixed.infra_error_limit=0.01: no policy is trained on rubble; "
        "tool=calculate, last error: ToolTimeout: no answer from http://127.0.0.1:39199 for "
        "tool='calculate' within timeout=1.0 s; is the server up, and the rate limit high enough?",
        "agent_loop.training.alarms.TooManyFaults: source=math lost 12 of 16 trajectories of the "
        "last 1 steps, more than mixed.infra_error_limit=0.01: tool=calculate, last error: x",
    ),
    # agent_loop/training/trainer.py _check_faults
    "no-trained-tokens": (
        "agent_loop.training.alarms.RubbleError: cannot train step=3, "
        "stop reasons={'deadline': 16}, no fault: none of 16 trajectories has a token "
        "with mask 1; look at runs/x/3.jsonl",
        "agent_loop.training.alarms.TooManyFaults: cannot train step=3, "
        "stop reasons={'deadline': 16}, no fault",
    ),
    # agent_loop/training/trainer.py _check_faults
    "loop-error-limit": (
        "agent_loop.training.alarms.RubbleError: an agent loop raised in step=2, source=nq "
        "row_id=17: KeyError: 'golden'; its trace is in train.log; mend it",
        "agent_loop.training.alarms.TooManyFaults: an agent loop raised in step=2, source=nq "
        "row_id=17: KeyError: 'golden'",
    ),
    # samplers/replay_buffer.py _check_patience
    "source-starved": (
        "samplers.replay_buffer.SourceStarved: step=4 cannot fill its batch with source='taco': "
        "waited 601 s, 600 s are allowed; it has 1/6 finished groups and 5 under way",
    ),
    # agent_loop/training/trainer.py _check_batch
    "batch-short": (
        "agent_loop.training.trainer.MixtureError: cannot train step=2: planned prompts "
        "{'math': 4}, finished {'math': 3}, groups that lost trajectories: 1; an agent loop raised",
    ),
    # agent_loop/training/trainer.py _compute_old_log_prob
    "rollout-mismatch": (
        "RuntimeError: rollout and trainer disagree in step=7: rollout_probs_diff_max=3.10e-01 is "
        "above mixed.max_probs_diff=0.01 (uid=a row 3 token 17)",
    ),
    # agent_loop/training/trainer.py _drift, through verl's logging format
    "drift": (
        "WARNING:2026-11-22 09:19:52,042:step=3 drift: trajectory=ab_0_0 source=nq row_id=7: mask "
        "1 is not on the 31 sampled tokens",
    ),
    # cpu_engine/rollout.py WeightReceiver.receive
    "weight-sync": (
        "RuntimeError: weight sync refused: name='lm_head.weight' has shape=(64, 8), the rollout "
        "model has (32, 8); trainer and rollout must load the same model",
        "RuntimeError: weight sync incomplete: 3 of 40 parameters missing, first ['a', 'b']",
    ),
    # tool_server/sandbox/__init__.py open_sandbox;
    # verl_mixed/launch/tool_server.py ToolServer.start
    "sandbox-unavailable": (
        "tool_server.sandbox.program.SandboxUnavailable: no sandbox for untrusted code with "
        "sandbox='auto' (bubblewrap: not installed; landlock: no such call)",
        "no isolation for programs at http://x, so none is run: bubblewrap: not installed",
    ),
    # agent_loop/calls/client.py _pause of release 1.1.0; aiohttp/web_log.py AccessLogger; uvicorn's
    # own; aiohttp/client_exceptions.py ClientResponseError
    "tool-server-overloaded": (
        "tool_server.wire.protocol.ToolUnavailable: no answer from http://10.0.0.4:8100 for "
        'tool=\'retrieve\': 4 attempts within timeout=30.0 s, last: HTTP 429 {"error": "full"}',
        '10.0.0.7 [22/Nov/2026:09:19:52 +0000] "POST /retrieve HTTP/1.1" 429 212 "-" "aiohttp"',
        '10.0.0.7 [22/Nov/2026:09:19:52 +0000] "POST /retrieve HTTP/1.0" 429 212 "-" "aiohttp"',
        "requests.exceptions.HTTPError: 429 Client Error: 429 Too Many Requests for url: http://x",
    ),
    # rate_limit/file_limiter.py _try_reserve; rate_limit/slots.py _left_s;
    # agent_loop/calls/client.py _call_in_time
    "limiter-timeout": (
        "rate_limit.gcra.LimiterTimeout: no slot for n=1 calls from runs/x/rate_limit.state: the "
        "next is 31.402 s away, beyond timeout_s=29.0; wait longer or raise the rate",
        "rate_limit.gcra.LimiterTimeout: no free slot of slots=8 at runs/x/rate_limit.slots within "
        "timeout_s=29.0; wait longer or allow more at once",
        "ToolTimeout: no place for tool='run_code' at http://127.0.0.1:8100 within timeout=30.0 s "
        "(it still waited); raise rate_limit_per_minute",
    ),
    # aiohttp/client_exceptions.py ClientConnectorError.__str__; agent_loop/calls/servers.py check
    # and agent_loop/calls/client.py _pause of release 1.1.0; agent_loop/calls/client.py _lost;
    # verl_mixed/checks/preflight.py _given_server_problems
    "tool-server-down": (
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 127.0.0.1:39199 "
        "ssl:default [Connect call failed ('127.0.0.1', 39199)]",
        "tool_server.wire.protocol.ToolUnavailable: not calling http://127.0.0.1:8100 for "
        "tool='search': its last 5 requests failed; trying again after 10.0 s",
        "tool_server.wire.protocol.ToolTimeout: no answer from http://127.0.0.1:8100 for "
        "tool='search': 2 attempts within timeout=30.0 s, last: HTTP 503 ; check the tool server",
        "tool_server.wire.protocol.ToolTimeout: no answer from http://10.0.0.4:8100 for "
        "tool='search' within timeout=30 s: 3 attempts, 12.0 s of waiting for the server, last: "
        "ServerDisconnectedError: Server disconnected; is the server up, and the rate limit high "
        "enough? ask http://10.0.0.4:8100/health",
        "tool_server.wire.protocol.ToolTimeout: no answer from http://10.0.0.4:8100 for "
        "tool='search' within the 8.21 s that were left of mixed.deadlines.trajectory_s: 0 "
        "attempts, 8.2 s of waiting for the server, last: ClientConnectorError: Cannot connect to "
        "host 10.0.0.4:8100 ssl:default [Connect call failed ('10.0.0.4', 8100)]; is the server up",
        "  - no answer from http://10.0.0.4:8100/health (TOOL_SERVER_URL): <urlopen error [Errno "
        "111] Connection refused>; start the server with `verl-mixed serve-tools`",
    ),
    # verl_mixed/launch/server_process.py restart_words
    "tool-server-restarted": (
        "the tool server at http://127.0.0.1:4711 ended: killed by SIGKILL (out of memory?); "
        "started again, 1 of 3 times",
    ),
    # agent_loop/calls/client.py _call_in_time of release 1.1.0; agent_loop/calls/client.py _lost
    "tool-timeout": (
        "tool_server.wire.protocol.ToolTimeout: no answer from http://127.0.0.1:8100 for "
        "tool='run_code' within timeout=30.0 s; is the server up, and the rate limit high enough?",
        "tool_server.wire.protocol.ToolTimeout: no answer from http://127.0.0.1:8100 for "
        "tool='run_code' within the 8.21 s that were left of mixed.deadlines.step_s: 0 attempts; "
        "is the server up, and the rate limit high enough?",
    ),
    # tool_server/edge.py say_errors_in_json
    "tool-server-error": ("no answer to POST /run_code",),
    # agent_loop/watchdog.py Watchdog.report
    "stuck-rollouts": (
        "stuck source=nq row_id=train-17 turn=2 waits_for=tool for_s=61",
        "stuck source=nq row_id=train-17 turn=2 waits_for=server for_s=61",
        "WARNING:2026-11-22 09:19:52,042:stuck source=nq row_id=a b turn=2 waits_for=engine "
        "for_s=130",
    ),
    # agent_loop/loop_settings.py name_once; verl/trainer/ppo/v1/agent_loop_tq.py:136
    "loop-error": (
        "ERROR:2026-11-22 09:19:52,042:agent loop raised source=math row_id=5",
        "agent loop raised again source=math row_id=9 times=2 error=KeyError: 'x'",
        "ERROR:2026-11-22 09:19:52,042:Error in _run_prompt for uid=3f.12",
    ),
    # agent_loop/training/main.py main; verl_mixed/checks/packages.py plugin_problems
    "plugin-not-loaded": (
        "RuntimeError: verl did not load the entry point verl.plugins -> agent_loop.plugin: "
        "install the project (pip install --no-deps -e .) and unset VERL_USE_EXTERNAL_PLUGINS",
        "  - no entry point verl.plugins mixed_agent_loop -> agent_loop.plugin: verl would train "
        "without this project",
        "  - VERL_USE_EXTERNAL_PLUGINS='none' switches mixed_agent_loop off; unset it",
    ),
    # agent_loop/calls/limiter.py settled_limits
    "limiter-not-shared": (
        "RuntimeError: mixed.rate_limit.backend=file does not reach all nodes: node 10.0.0.5 takes "
        "a lock that 10.0.0.4 holds",
    ),
    # verl_mixed/checks/config/data.py; samplers/mixture_rows.py;
    # verl/utils/dataset/rl_dataset.py
    "data-rows": (
        "  - no ratio for source='search_qa' (data/train.parquet, 1182 rows): every source of "
        "data.train_files needs one; add mixed.sources.search_qa.ratio",
        "  - no rows of source='nq' in data.train_files (data/train.parquet): it has "
        "mixed.sources.nq.ratio=0.3",
        "ValueError: data_source is null in 12 rows: each needs its source",
        "KeyError: 'reward_model'",
    ),
    # github.com/vllm-project/vllm/issues/10439 and /34076
    "vllm-kv-cache": (
        "(EngineCore_DP0 pid=223840) ERROR 10-25 13:08:43 [core.py:708] ValueError: No available "
        "memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
        "(EngineCore_DP0 pid=1094) ValueError: To serve at least one request with the models's max "
        "seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available KV "
        "cache memory (3.18 GiB).",
    ),
    # github.com/pytorch/pytorch/issues/175666
    "vllm-gpu-busy": (
        "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU memory utilization",
    ),
    # torch c10/cuda/CUDACachingAllocator.cpp, as in github.com/pytorch/pytorch/issues/16417;
    # c10/cuda/CUDAException.cpp
    "cuda-out-of-memory": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.15 GiB of which 1.31 GiB is free. Including non-PyTorch memory",
        "RuntimeError: CUDA error: out of memory",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB.",
    ),
    # torch c10/cuda/CUDAFunctions.cpp device_count_impl; torch/csrc/cuda/utils
    "cuda-driver": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver",
        "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
    ),
    # torch/cuda/__init__.py:522; libtorch's CUDAFunctions.cpp, CUDAHooks
    "no-gpu": (
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
    ),
    # torch c10/cuda/CUDAException.cpp; aten/src/ATen/cuda/CUDABlas.cpp; the NVIDIA kernel module
    "cuda-error": (
        "torch.AcceleratorError: CUDA error: misaligned address",
        "[123456.789012] NVRM: Xid (PCI:0000:1e:00): 69, pid=1234, Class Error",
        "RuntimeError: cublas: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle",
    ),
    # transformers/modeling_utils.py:1710
    "flash-attention": (
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the "
        "following error: the package for FlashAttention2 doesn't seem to be installed.",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: /env/flash_attn_2_cuda.so: undefined symbol: x",
    ),
    # linux mm/oom_kill.c, memcontrol; slurmstepd's, github.com/nextflow-io/nextflow/issues/5932
    "host-out-of-memory": (
        "[Sun Mar 30 08:24:00 2025] Out of memory: Killed process 7899 (python) total-vm:26184840kB"
        ", anon-rss:15370088kB",
        "kernel: Memory cgroup out of memory: Killed process 31 (ray::WorkerDict) total-vm:1kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks "
        "have been OOM Killed.",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=191.batch cgroup.",
    ),
    # ray's raylet (2.60: "%d worker(s) were killed due to ..."), node_manager.cc
    "ray-memory-monitor": (
        "(raylet) 2 worker(s) were killed due to the node running low on memory. Refer to the docs",
        "(raylet) [2025-12-07 09:57:19,206 E 393463 393463] (raylet) node_manager.cc:3277: 2 "
        "Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    # the shell; absl's failure handler; NCCL's shmutils.cc
    "shared-memory": (
        "Bus error (core dumped)",
        "*** SIGBUS received at time=1706692238 on cpu 68 ***",
        "node1:81:99 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-xPSN",
    ),
    # ray/_private/services.py:2249
    "object-store-slow": (
        "2026-11-22 08:51:58,244 WARNING services.py:2249 -- WARNING: The object store is using "
        "/tmp instead of /dev/shm because /dev/shm has only 67108864 bytes available.",
    ),
    # ray/exceptions.py:618
    "object-store-full": (
        "ray.exceptions.ObjectStoreFullError: Failed to put object",
        "The local object store is full of objects that are still in scope and cannot be evicted.",
    ),
    # absl's failure handler through ray's logging.cc (github.com/ray-project/ray/issues/33285);
    # CPython's faulthandler
    "worker-crashed": (
        "*** SIGSEGV received at time=1678337610 on cpu 12 ***",
        "*** SIGABRT received at time=1678337610 on cpu 12 ***",
        "*** SIGFPE received at time=1678337610 on cpu 12 ***",
        "*** SIGILL received at time=1678337610 on cpu 12 ***",
        "Fatal Python error: Segmentation fault",
    ),
    # errno 24
    "open-files": ("OSError: [Errno 24] Too many open files: '/tmp/x'",),
    # errno 28 and 122; ray/exceptions.py:635
    "disk-full": (
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded: '/home/a/x'",
        "ray.exceptions.OutOfDiskError: Local disk is full",
    ),
    # errno 13; ssh
    "permission-denied": ("PermissionError: [Errno 13] Permission denied: '/data/runs'",),
    # ray's _raylet.so; ray/_private/authentication/authentication_constants.py
    "ray-token": (
        "ray.exceptions.AuthenticationError: InvalidAuthToken: Authentication token is missing or "
        "incorrect",
        "RuntimeError: Token authentication is enabled but no authentication token was found",
        "Ray token authentication is enabled but expected token is empty",
    ),
    # ray/_private/utils.py:1426-1440
    "ray-version": ("RuntimeError: Version mismatch: The cluster was started with:",),
    # ray/_private/utils.py:1158, state.py:161, services.py:459
    "ray-unreachable": (
        "Unable to connect to GCS (ray head) at 10.0.0.4:6379. Check that (1) Ray with matching",
        "[2026-11-22 08:51:58,244 W 1 1] gcs_rpc_client.h: Failed to connect to GCS at address "
        "10.0.0.4:6379 within 5 seconds.",
        "ConnectionError: Could not find any running Ray instance. Please specify the one to",
    ),
    # ray/_private/utils.py:1761; CPython's socketmodule.c
    "ray-socket-path": (
        "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: "
        "/very/long",
        "OSError: AF_UNIX path too long",
    ),
    # ray's gcs_server and _raylet.so
    "node-died": (
        "(raylet) The node with node id: 8c5a and address: 10.0.0.5 and node name: 10.0.0.5 has "
        "been marked dead because the detector has missed too many heartbeats from it.",
        "[2026-11-22 08:51:58,244 W 1 1] gcs_node_manager.cc: health check failed due to missing "
        "too many heartbeats",
        "ray.exceptions.ActorDiedError: The actor died because its node has died. Node Id: 8c5a",
    ),
    # github.com/rllm-org/rllm/issues/35; ray/autoscaler/v2/event_logger.py:115;
    # verl/single_controller/ray/base.py:241; vLLM's ray_utils.py
    "resources-missing": (
        "(autoscaler +34s) Error: No available node types can fulfill resource request "
        "defaultdict(<class 'float'>, {'CPU': 8.0, 'GPU': 8.0}).",
        "(autoscaler +5s) No available node types can fulfill resource requests {'GPU': 1.0}*8.",
        "ValueError: Total available GPUs 0 is less than total desired GPUs 8",
        "(EngineCore pid=84) INFO 06-07 18:13:55 [ray_utils.py:464] Waiting for creating a "
        "placement group of specs for 150 seconds. specs=[{'GPU': 1.0}].",
    ),
    # raylet's worker_pool.cc
    "workers-late": (
        "(raylet) [2026-11-22 08:51:58,244 E 1 1] (raylet) worker_pool.cc:581: Some workers of the "
        "worker process(31) have not registered within the timeout. The process is still alive",
    ),
    # ray/exceptions.py:954
    "runtime-env": (
        "ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.",
        "Failed to set up runtime environment.",
    ),
    # CPython's asyncio/base_events.py; torch TCPStore in libtorch_cpu; zmq
    "port-in-use": (
        "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8100): "
        "address already in use",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: x",
        "zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.4:5555')",
    ),
    # github.com/hiyouga/LlamaFactory/issues/7396
    "nccl-timeout": (
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE) ran for 600060 "
        "milliseconds before timing out.",
    ),
    # github.com/vllm-project/vllm/issues/10523, github.com/pytorch/pytorch/issues/149984
    "nccl-error": (
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error",
        "raised the following async exception: NCCL error: unhandled system error, NCCL version 2",
    ),
    # libtorch_cpu; github.com/vllm-project/vllm/issues/19670
    "rendezvous": (
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/"
        "pair.cc:144] no error",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
        "trying to connect to (172.17.0.9, 46229).",
    ),
    # transformers/utils/hub.py:470 and :514, tokenization_utils_base.py:1733; huggingface_hub
    "model-not-found": (
        "OSError: /models/none is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files.",
        "OSError: Can't load tokenizer for 'Qwen/x'. If you were trying to load it from",
        "Can't load the configuration of 'Qwen/x'. If you were trying to load it from",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached",
        "OSError: You are trying to access a gated repo.",
    ),
    # transformers/tokenization_utils_base.py:3270
    "chat-template": (
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set "
        "and no template argument was passed!",
    ),
    # torch's MultinomialKernel, libtorch_cpu
    "nan-probabilities": (
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    ),
    # pyarrow; datasets/builder.py
    "data-unreadable": (
        "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is "
        "corrupted or this is not a parquet file.",
        "datasets.exceptions.DatasetGenerationError: An error occurred while generating the "
        "dataset",
    ),
    # libtorch_python: DataLoader.cpp
    "dataloader": (
        "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
        "RuntimeError: DataLoader worker (pid 4711) exited unexpectedly with exit code 1.",
    ),
    # libtorch_cpu's inline_container.cc; verl/trainer/ppo/v1/trainer_base.py:866; safetensors;
    # torch/nn/modules/module.py load_state_dict; verl's FSDP checkpoint files
    "checkpoint-broken": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
        "directory",
        "AssertionError: resume ckpt must specify the global_steps",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "RuntimeError: Error(s) in loading state_dict for Qwen2ForCausalLM:",
        "FileNotFoundError: [Errno 2] No such file or directory: "
        "'runs/x/checkpoints/global_step_5/actor/model_world_size_2_rank_1.pt'",
    ),
    # wandb/sdk/lib/wbauth/authenticate.py:142, wbauth/prompt.py:99
    "wandb-login": (
        "wandb.errors.errors.UsageError: No API key configured. Use `wandb login` to log in.",
        "wandb: ERROR No API key configured. Use `wandb login` to log in.",
    ),
    # CPython's import
    "package-missing": (
        "ModuleNotFoundError: No module named 'vllm'",
        "ImportError: cannot import name 'x' from 'transformers'",
    ),
    # verl_mixed/launch/launcher.py train; hydra/_internal/config_loader_impl.py:393;
    # omegaconf/dictconfig.py:163; verl/utils/config.py:125
    "config-refused": (
        "cannot start, 2 problems:",
        "Could not override 'actor_rollout_ref.actor.lr'.",
        "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct",
        "AssertionError: real_train_batch_size (7) must be divisible by minimal possible batch "
        "size (2)",
    ),
    # slurmstepd; github.com/marbl/canu/issues/1052
    "slurm-cancelled": (
        "slurmstepd: error: *** JOB 494583 ON node023 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME "
        "LIMIT ***",
        "slurmstepd: error: *** STEP 494583.0 ON node023 CANCELLED AT 2024-04-20T09:09:37 ***",
    ),
    # github.com/vllm-project/vllm/issues/31940, /17431; cpu_engine/rollout.py HFServer;
    # agent_loop/training/verl_adapters/engine_client.py
    "engine-died": (
        "(APIServer pid=697224) ERROR 01-08 17:16:15 [serving_chat.py:1278] "
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
        "trace (above) for the root cause.",
        "(EngineCore_DP0 pid=9) ERROR 01-08 17:16:15 [core.py:710] EngineCore encountered a fatal "
        "error.",
        "ERROR 04-30 10:20:36 [core.py:396] EngineCore failed to start.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {}",
        "RuntimeError: the rollout server stopped generating: ValueError: x",
        "tool_server.wire.protocol.ToolUnavailable: no tokens from the rollout server: "
        "TimeoutError: 600 s",
    ),
    # ray's _raylet.so and raylet; ray/exceptions.py:411
    "worker-lost": (
        "(raylet) A worker died or was killed while executing a task by an unexpected system "
        "error. To troubleshoot the problem, check the logs for the dead worker. Worker exit "
        "detail: (1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this "
        "task. Check python-core-worker-*.log files for more information.",
    ),
    # ray/exceptions.py:456, :531
    "actor-died": (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation "
        "task, ray::WorkerDict.__init__() (pid=1, ip=10.0.0.4)",
        "ray.exceptions.ActorUnavailableError: The actor 3f is unavailable: x",
    ),
    # gloo's pair.cc and torch's TCPStore, libtorch_cpu
    "peer-lost": (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[10.0.0.5]:4711",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ),
    # CPython's asyncio; urllib3 through requests; gRPC in Ray's libraries; OpenSSH
    "connection-refused": (
        "ConnectionRefusedError: [Errno 111] Connect call failed ('10.0.0.4', 8100)",
        "requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.4', port=8265): Max "
        "retries exceeded with url: /api/version (Caused by NewConnectionError('<urllib3."
        "connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno "
        "111] Connection refused'))",
        "[2026-11-22 08:51:58,244 W 81 99] gcs_rpc_client.h:179: failed to connect to all "
        "addresses; last error: UNKNOWN: ipv4:10.0.0.4:6379: Failed to connect to remote host: "
        "connect: Connection refused (111)",
    ),
    # CPython; subprocess; requests; httpx; a user's own program
    "timeout": (
        "TimeoutError",
        "TimeoutError: [Errno 110] Connection timed out",
        "subprocess.TimeoutExpired: Command '['nvidia-smi']' timed out after 10 seconds",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): "
        "Read timed out. (read timeout=10)",
        "httpx.ConnectTimeout",
        "ERROR Tool call timeout",
        "Environment allocation failed: timeout after 60 s",
    ),
}

HARMLESS = r"""
/opt/verl/agent_loop/main_mixed.py:38: UserWarning: Disabled critic as algorithm.adv_estimator != gae. If it is not intended, please set critic.enable=True
  use_critic=need_critic(config),
[validate_config] All configuration checks passed successfully!
ray init kwargs: {'num_cpus': 16, 'runtime_env': {'env_vars': {'NCCL_DEBUG': 'WARN', 'VLLM_LOGGING_LEVEL': 'WARN'}, 'working_dir': None}, 'num_gpus': 1, 'object_store_memory': 300000000}
2026-11-22 08:51:58,244	INFO worker.py:2029 -- Started a local Ray instance. View the dashboard at http://127.0.0.1:8265
(TaskRunnerV1 pid=24447) /v/site-packages/verl/workers/engine/__init__.py:32: UserWarning: torchtitan engine is not available: ModuleNotFoundError("No module named 'torchtitan'")
(TaskRunnerV1 pid=24447)   warnings.warn(f"torchtitan engine is not available: {e!r}", stacklevel=1)
(TaskRunnerV1 pid=24447)                                  'gpu_memory_utilization': 0.5,
(TaskRunnerV1 pid=24447)  'mixed': {'infra_error_limit': 0.01, 'fail_on_loop_error': False,
(TaskRunnerV1 pid=24447) dataset len: 600
(TaskRunnerV1 pid=24447) Checkpoint tracker file does not exist: /runs/mixed_demo/checkpoints/latest_checkpointed_iteration.txt
(TaskRunnerV1 pid=24447) Training from scratch
(TaskRunnerV1 pid=24447) INFO:2026-11-22 08:52:30,100:all initialize finished, ready to fit
(WorkerDict pid=24620) Warning: Failed to set NUMA affinity: libnuma.so: cannot open shared object file: No such file or directory
(WorkerDict pid=24620) Using blocking ray.get inside async actor. This blocks the event loop.
(WorkerDict pid=24620) Monkey patch _flash_attention_forward in transformers.integrations.flash_attention
(WorkerDict pid=24620) Skipping monkey patch for Qwen2ForCausalLM as use_fused_kernels is False
(WorkerDict pid=24620) Before FSDP, memory allocated (GB): 0.0, memory reserved (GB): 0.0, device memory used/total (GB): 6.10/16.0
(WorkerDict pid=24620) [rank0]:W1122 08:52:40.1 24620 .venv/lib/python3.11/site-packages/torch/fx/_symbolic_trace.py:53] is_fx_tracing will return true
(WorkerDict pid=24620) INFO:2026-11-22 08:53:10,100:[Rank 0] Saved model to /runs/x/checkpoints/global_step_5/actor/model_world_size_1_rank_0.pt
(SimpleStorageUnit pid=24533) 2026-11-22 08:54:37,051 - WARNING - transfer_queue.utils.common - target_num_threads 8 should not exceed total physical CPU cores 2. Setting to 2. [repeated 134x across cluster]
(TaskRunnerV1 pid=24447) WARNING:2026-11-22 08:54:37,008:target_num_threads 8 should not exceed total physical CPU cores 2. Setting to 2.
(TaskRunnerV1 pid=24447) Training Progress:  31%|###       | 5/16 [00:49<01:30, 8.12s/it]
(TaskRunnerV1 pid=24447) step:2 - global_seqlen/min:8334.0 - actor/loss:-0.04 - actor/grad_norm:0.61 - actor/entropy:np.float64(0.38) - mixed/math/infra_error_rate:0.0 - training/rollout_probs_diff_mean:3.5e-07 - timing_s/step:6.64
(TaskRunnerV1 pid=24447) ("Final validation metrics: {'val-aux/nq/infra_error/mean@1': np.float64(0.0), "
(TaskRunnerV1 pid=24447) 'Final validation metrics: None'
(vLLMHttpServer pid=31) INFO 11-22 09:19:52 [loggers.py:257] Engine 000: Avg prompt throughput: 71.0 tokens/s, Running: 3 reqs, GPU KV cache usage: 1.5%
(vLLMHttpServer pid=31) INFO 11-22 09:19:52 [gpu_worker.py:298] Available KV cache memory: 41.22 GiB
(vLLMHttpServer pid=31) INFO 11-22 09:19:52 [kv_cache_utils.py:1087] GPU KV cache size: 337,536 tokens
(EngineCore_DP0 pid=99) INFO 11-22 09:19:52 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/m'
[2023-03-09 12:53:30,446 E 957 30467] logging.cc:361: *** SIGSEGV received at time=1678337610 on cpu 12 *** (a copy of the line before it)
(raylet) Spilled 2048 MiB, 12 objects, write throughput 230 MiB/s.
(autoscaler +1m2s) Tip: use `ray status` to view detailed cluster status.
node1:81:99 [0] NCCL INFO Channel 00/02 :    0   1
2026-11-22 08:51:58,244 WARNING utils.py:1434 -- Python patch version mismatch: The cluster was started with:
wandb: Tracking run with wandb version 0.31.0
wandb: W&B syncing is set to `offline` in this directory.
tool server listening url=http://127.0.0.1:41443 pid=23980
tool server stopping cancelled=0
tool server listening url=http://127.0.0.1:41443 pid=23980 tool_timeout=30 timeout=60
(TaskRunnerV1 pid=24447)                              'tool_config': {'timeout': 30.0,
(WorkerDict pid=24620) INFO:2026-11-22 08:52:30,100:process group is up, timeout=600 s, no error
(TaskRunnerV1 pid=24447) actor_rollout_ref.nccl_timeout: 600
(WorkerDict pid=24620) INFO:2026-11-22 08:52:30,100:heartbeat every 10 s, with a timeout of 60 s
10.0.0.7 [22/Nov/2026:09:19:52 +0000] "POST /retrieve HTTP/1.1" 200 429 "-" "aiohttp"
Token authentication is enabled for this Ray cluster. Set RAY_AUTH_MODE=disabled to opt out.
{"step": 2, "time": 1795337564.9, "metrics": {"actor/loss": -0.04, "timing_s/step": 6.6}}
""".strip().splitlines()  # noqa: E501
