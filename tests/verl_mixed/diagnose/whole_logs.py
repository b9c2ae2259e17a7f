# ruff: noqa: E501 - lines of logs are as long as they are
"""Whole logs of failed runs, for test_whole_logs.py: noise, the cause, and what followed from it.

They were written after the signatures, from memory of threads and their logs, and not from the
signatures' patterns. A name says which failure the log has.
"""

RAY = """\
2026-03-11 09:14:02,118\tINFO worker.py:1918 -- Started a local Ray instance. View the dashboard at 127.0.0.1:8265
(TaskRunner pid=4711) TaskRunner hostname: gpu-12, PID: 4711
(TaskRunner pid=4711) {'actor_rollout_ref': {'actor': {'loss_agg_mode': 'token-mean', 'on_error': 'raise',
(TaskRunner pid=4711)                                  'ppo_micro_batch_size_per_gpu': 8}},
(TaskRunner pid=4711)  'trainer': {'logger': ['console', 'wandb'], 'nnodes': 1}}
(TaskRunner pid=4711) dataset len: 7473
(TaskRunner pid=4711) filter dataset len: 7473
(TaskRunner pid=4711) Size of train dataloader: 29, Size of val dataloader: 1
(pid=5012) /opt/env/lib/python3.11/site-packages/pydantic/_internal/_fields.py:198: UserWarning: Field name "json" shadows an attribute in parent
(WorkerDict pid=5012) Flash Attention 2.0 only supports torch.float16 and torch.bfloat16 dtypes, but the current dype in Qwen2ForCausalLM is torch.float32.
(WorkerDict pid=5012) [rank0]:[W311 09:15:01.2 ProcessGroupNCCL.cpp:4561] [PG ID 0] using GPU 0 to perform barrier as devices used by this process are currently unknown.
(WorkerDict pid=5012) WARNING 03-11 09:15:22 [cuda.py:412] Detected different devices in the system. Please make sure to set `CUDA_DEVICE_ORDER=PCI_BUS_ID`
"""
STEPS = """\
(TaskRunner pid=4711) step:1 - global_seqlen/mean:81234.0 - actor/pg_loss:0.003 - actor/grad_norm:0.21 - timing_s/step:91.2
(TaskRunner pid=4711) Training Progress:   3%|3         | 1/29 [01:31<42:36, 91.3s/it]
(TaskRunner pid=4711) step:2 - global_seqlen/mean:80112.0 - actor/pg_loss:0.001 - actor/grad_norm:0.22 - timing_s/step:90.7
"""


def driver(error: str, frame: str = "/opt/verl/verl/trainer/main_ppo.py") -> str:
    """What the driver prints when its task failed."""
    return (
        "Error executing job with overrides: ['algorithm.adv_estimator=grpo']\n"
        "Traceback (most recent call last):\n"
        f'  File "{frame}", line 42, in main\n    run_ppo(config)\n'
        '  File "/opt/env/lib/python3.11/site-packages/ray/_private/worker.py", line 961, in get\n'
        "    raise value.as_instanceof_cause()\n"
        f"{error}\n\n"
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    )


def task_error(error: str) -> str:
    name = error.split(":")[0].rsplit(".")[-1]
    return driver(
        f"ray.exceptions.RayTaskError({name}): \x1b[36mray::TaskRunner.run()\x1b[39m (pid=4711)\n"
        '  File "/opt/verl/verl/trainer/ppo/ray_trainer.py", line 1120, in fit\n'
        "    output = self.actor_rollout_wg.update_actor(batch)\n"
        f"{error}"
    )


DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict\n\tpid: 5012\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
)
LOST = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker. Worker ID: 9f Node ID: 3a\n"
)


def vllm(
    *lines: str, before: str = "(EngineCore_DP0 pid=6001) ERROR 03-11 09:16:40 [core.py:708] "
) -> str:
    return "".join(f"{before}{line}\n" for line in lines)


def engine(error: str) -> str:
    """A failure of vLLM's engine process, and the one of the server that waits for it."""
    return vllm(
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "/opt/env/lib/python3.11/site-packages/vllm/v1/engine/core.py", line 699, in run',
        "    engine_core = EngineCoreProc(*args, **kwargs)",
        "                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        error,
    ) + (
        "(vLLMHttpServer pid=5900) Traceback (most recent call last):\n"
        '(vLLMHttpServer pid=5900)   File "vllm/v1/engine/utils.py", line 1031, in wait\n'
        "(vLLMHttpServer pid=5900) RuntimeError: Engine core initialization failed. See root cause "
        "above. Failed core proc(s): {}\n"
    )


WATCHDOG = "".join(
    f"[rank{rank}]:[E419 10:42:28.8589 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=4486, OpType=ALLTOALL, Timeout(ms)=600000) ran "
    "for 600013 milliseconds before timing out.\n"
    f"[rank{rank}]:[E419 10:42:28.8619 ProcessGroupNCCL.cpp:1785] [PG ID 2 Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: 4486\n"
    for rank in (7, 3)
)
ABORTED = (
    "[rank7]:[E419 10:42:29.1 ProcessGroupNCCL.cpp:681] [Rank 7] Some NCCL operations have failed or "
    "timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run "
    "on corrupted/incomplete data.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
TORCHRUN = """\
W0419 10:43:01.001 81 site-packages/torch/distributed/elastic/multiprocessing/api.py:897] Sending process 82 closing signal SIGTERM
E0419 10:43:02.001 81 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 7 (pid: 88) of binary: /opt/env/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
sft.py FAILED
"""

LOGS: dict[str, tuple[str, str]] = {
    # name: (id of the first finding, log)
    "the update does not fit into the GPU": (
        "cuda-out-of-memory",
        RAY
        + STEPS
        + task_error(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 3 has a "
            "total capacity of 79.11 GiB of which 2.05 GiB is free."
        )
        + LOST,
    ),
    "the kernel killed a worker, only consequences": (
        "worker-lost",
        RAY + STEPS + LOST + driver(DIED),
    ),
    "the host ran out of memory": (
        "ray-memory-monitor",
        RAY + STEPS + "(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 "
        "Workers crashed due to other reasons at node (ID: 3a, IP: 10.0.0.5) over the last time "
        "period.\n" + LOST + driver(DIED),
    ),
    "a collective of an SFT run timed out": (
        "nccl-timeout",
        "[1743] {'loss': 3.5534, 'grad_norm': 1.41, 'learning_rate': 2.0e-06, 'epoch': 0.01}\n"
        "  1%|          | 24/1752 [01:08<1:22:51,  2.88s/it]\r" + WATCHDOG + ABORTED + TORCHRUN,
    ),
    "no room for a KV cache": (
        "vllm-kv-cache",
        RAY
        + engine(
            "ValueError: To serve at least one request with the models's max seq len (32768), "
            "(3.50 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(1.12 GiB). Based on the available memory, the estimated maximum model length is 9000."
        )
        + driver(DIED),
    ),
    "an assertion in vLLM that nobody knows": (
        "unknown-error",
        RAY
        + STEPS
        + vllm(
            "EngineCore encountered a fatal error.",
            "Traceback (most recent call last):",
            '  File "/opt/vllm/v1/core/sched/scheduler.py", line 977, in update_from_output',
            "    assert not prompt_logprobs_tensors",
            "AssertionError",
        )
        + driver(
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
            "trace (above) for the root cause."
        ),
    ),
    "an old vLLM's background loop ended by an illegal access": (
        "cuda-illegal-access",
        "".join(
            f"ERROR 06-26 06:20:13 async_llm_engine.py:52] {line}\n"
            for line in (
                "Engine background task failed",
                "Traceback (most recent call last):",
                '  File "/usr/lib/vllm/engine/async_llm_engine.py", line 42, in _log_task',
                "    return_value = task.result()",
                "RuntimeError: CUDA error: an illegal memory access was encountered",
                "CUDA kernel errors might be asynchronously reported at some other API call.",
            )
        )
        + 'INFO:     10.94.90.10:51000 - "POST /v1/completions HTTP/1.1" 500 Internal Server '
        "Error\nvllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored\n",
    ),
    "a scheduler of SGLang met a full GPU": (
        "cuda-out-of-memory",
        RAY + "(WorkerDict pid=108920) [2025-05-29 15:17:45 TP1] Scheduler hit an exception: "
        "Traceback (most recent call last):\n"
        '(WorkerDict pid=108920)   File "/opt/sglang/srt/managers/scheduler.py", line 2271, in run\n'
        "(WorkerDict pid=108920) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00"
        " MiB. GPU 1 has a total capacity of 79.15 GiB\n"
        "(WorkerDict pid=108920) \n"
        "(WorkerDict pid=108920) [2025-05-29 15:17:45] Received sigquit from a child process. It "
        "usually means the child failed.\n" + driver(DIED),
    ),
    "munge does not run on the login node": (
        "slurm-credential",
        "+ PARTITION=super_priority\n+ srun -p super_priority --gres=gpu:1 python -u train.py\n"
        "srun: error: If munged is up, restart with --num-threads=10\n"
        'srun: error: Munge encode failed: Failed to access "/var/run/munge/munge.socket.2": No '
        "such file or directory\n"
        "srun: error: slurm_send_node_msg: auth_g_create: REQUEST_RESOURCE_ALLOCATION has "
        "authentication error\n"
        "srun: error: Srun communication socket apparently being written to by something else\n",
    ),
    "a prolog of Slurm failed": (
        "slurm-prolog",
        "srun: job 23 queued and waiting for resources\n"
        "srun: error: Task launch for 23.0 failed on node hpc: Job prolog failed\n"
        "srun: error: Application launch failed: Job prolog failed\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: Timed out waiting for job step to complete\n",
    ),
    "no node has so many CPUs": (
        "slurm-config-unavailable",
        "sbatch: error: CPU count per node can not be satisfied\n"
        "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
    ),
    "the script is not on the node": (
        "slurm-exec",
        "slurmstepd: error: execve(): /tmp/slurmd/job2997814/slurm_script: No such file or "
        "directory\nsrun: error: c002: task 0: Exited with exit code 2\n",
    ),
    "Slurm finds no configuration": (
        "unknown-error",
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: error: _establish_config_source: failed to fetch config\n"
        "sbatch: fatal: Could not establish a configuration source\n",
    ),
    "the time of the job is over": (
        "slurm-cancelled",
        RAY + STEPS + "slurmstepd: error: *** JOB 88123 ON gpu-12 CANCELLED AT "
        "2026-03-11T12:00:11 DUE TO TIME LIMIT ***\nsrun: Job step aborted: Waiting up to 32 seconds"
        " for job step to finish.\nsrun: error: gpu-12: task 0: Terminated\n"
        "[2026-03-11 12:00:12,003 E 5012 5012] core_worker.cc:1200: :info_message: Attempting to "
        "recover 3 lost objects\n",
    ),
    "the CUDA of a wheel is missing": (
        "cuda-library-missing",
        RAY
        + driver(
            "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
            "/opt/env/lib/python3.11/site-packages/vllm/platforms/cuda.py",
        ),
    ),
    "a column of the data is missing": (
        "unknown-error",
        RAY
        + "(TaskRunner pid=4711) Using dataset class: RLHFDataset\n"
        + task_error("KeyError: 'question_text'")
        + LOST,
    ),
    "the reward of a user raises, seen in a worker": (
        "unknown-error",
        RAY + STEPS + "(RewardLoopWorker pid=77) Traceback (most recent call last):\n"
        '(RewardLoopWorker pid=77)   File "/home/me/rewards/maths.py", line 31, in compute_score\n'
        "(RewardLoopWorker pid=77)     return float(groups[1])\n"
        "(RewardLoopWorker pid=77) IndexError: list index out of range\n" + LOST + driver(DIED),
    ),
    "a batch does not divide": (
        "verl-micro-batch-uneven",
        RAY
        + task_error(
            "AssertionError: only support equal chunk. Got size of DataProto 30 and chunk 8."
        ),
    ),
    "a key that is not in the config": (
        "config-refused",
        "Could not override 'actor_rollout_ref.rollout.num_workers'.\n"
        "To append to your config use +actor_rollout_ref.rollout.num_workers=8\n"
        "Key 'num_workers' is not in struct\n    full_key: actor_rollout_ref.rollout.num_workers\n"
        "    object_type=dict\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete "
        "stack trace.\n",
    ),
    "the disk is full when a checkpoint is written": (
        "disk-full",
        RAY
        + STEPS
        + "(WorkerDict pid=5012) INFO:2026-03-11 10:01:01,100:[Rank 0] Saving model\n"
        + task_error("OSError: [Errno 28] No space left on device: '/runs/x/checkpoints'")
        + "wandb: WARNING could not write the summary, ignoring\n",
    ),
    "a node left Ray": (
        "node-died",
        RAY + STEPS + "(raylet, ip=10.0.0.7) [2026-03-11 10:11:11,003 W 81 81] Node 3a has missed "
        "too many heartbeats\n"
        "[rank4]:[E311 10:21:12.1 ProcessGroupNCCL.cpp:616] [Rank 4] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600013 milliseconds\n"
        + driver("ray.exceptions.ActorDiedError: The actor died because its node has died."),
    ),
    "the GPU of one rank has defective memory": (
        "gpu-ecc-xid",
        RAY
        + STEPS
        + "[71231.11] NVRM: Xid (PCI:0000:3b:00): 48, pid=5012, name=ray::WorkerDict, An uncorrectable"
        " double bit error (DBE) has been detected\n"
        "[71231.15] NVRM: Xid (PCI:0000:3b:00): 45, pid=5012, name=ray::WorkerDict, Ch 00000008\n"
        + task_error("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
        + LOST,
    ),
    "InfiniBand times out": (
        "nccl-ib-timeout",
        RAY + STEPS + "gpu-12:5012:5301 [3] NCCL INFO Channel 00/02 : 0 1\n"
        "gpu-12:5012:5301 [3] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
        "10.2.1.9<54862> with status=12 opcode=0 len=0 vendor err 129 (Send)\n"
        + task_error(
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
            "NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version "
            "2.21.5"
        )
        + LOST,
    ),
    "a data loader's worker was killed": (
        "dataloader-killed",
        "Epoch 0:  29% 1034/3597 [51:02<2:06:30,  2.96s/it]\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 170, in train\n    loss = model(batch)\n'
        '  File "torch/utils/data/_utils/signal_handling.py", line 66, in handler\n'
        "    _error_if_any_worker_fails()\n"
        "RuntimeError: DataLoader worker (pid 2978) is killed by signal: Killed.\n",
    ),
    "the model is not on the node": (
        "hub-repo-id",
        RAY
        + task_error(
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/data/models/qwen'. Use `repo_type` argument if needed."
        ),
    ),
    "the key of ssh is refused, while a copy is made": (
        "ssh-key-refused",
        "sending incremental file list\nme@gpu-13: Permission denied (publickey,password).\n"
        "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\n"
        "rsync error: unexplained error (code 255) at io.c(231) [sender=3.2.7]\n",
    ),
    "another Ray has the port": (
        "port-in-use",
        "2026-03-11 09:14:02,118\tINFO usage_lib.py:447 -- Usage stats collection is disabled.\n"
        "Local node IP: 10.0.0.4\nTraceback (most recent call last):\n"
        '  File "/opt/env/bin/serve", line 8, in <module>\n'
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address "
        "already in use\n",
    ),
    "a package was built for another torch": (
        "torch-abi",
        "WARNING 03-11 09:15:22 [interface.py:171] Failed to import from vllm._C\n"
        + driver(
            "ImportError: /opt/env/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-"
            "x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
        ),
    ),
    "vLLM under journald": (
        "model-type-unknown",
        "".join(
            f"Aug 17 18:42:18 box vllm[8052]: (APIServer pid=8052) {line}\n"
            for line in (
                "INFO 08-17 18:42:10 [api_server.py:1896] vLLM API server version 0.11.0",
                "Traceback (most recent call last):",
                '  File "/opt/vllm/entrypoints/openai/api_server.py", line 7, in <module>',
                "    uvloop.run(run_server(args))",
                "ValueError: The checkpoint you are trying to load has model type `newmodel` but "
                "Transformers does not recognize this architecture.",
            )
        )
        + "Aug 17 18:42:19 box systemd[1]: vllm.service: Main process exited, code=exited\n",
    ),
    "lines with the time before Ray's prefix": (
        "nan-probabilities",
        "".join(f"[2026-03-12 11:50:31] {line}\n" for line in (RAY + STEPS).splitlines())
        + "[2026-03-12 11:50:40] (vLLMHttpServer pid=9) Traceback (most recent call last):\n"
        '[2026-03-12 11:50:40] (vLLMHttpServer pid=9)   File "vllm/v1/sample/sampler.py", line 9\n'
        "[2026-03-12 11:50:40] (vLLMHttpServer pid=9) RuntimeError: probability tensor contains "
        "either `inf`, `nan` or element < 0\n"
        f"[2026-03-12 11:50:41] {LOST}",
    ),
    "a check of Ray's own code failed": (
        "ray-check-failed",
        RAY
        + "(TaskRunner pid=2915798) [2025-07-06 07:14:27,052 C 2915798 2915798] task_receiver.cc"
        ":219:  Check failed: objects_valid \n(TaskRunner pid=2915798) *** StackTrace Information"
        " ***\n(TaskRunner pid=2915798) ray/_raylet.so(+0x13ddb7a) [0x73a4e4830b7a] ray::operator\n"
        + LOST,
    ),
    "the raylet of the driver's host ended": (
        "ray-raylet-gone",
        RAY + STEPS + "2026-03-11 10:30:19,237\tWARNING worker.py:1851 -- Raylet is terminated: "
        "ip=192.168.207.5, id=abc3. Termination is unexpected. Possible reasons include: (1) SIGKILL "
        "by the user or system OOM killer, (2) Invalid memory access from Raylet\n"
        "    [state-dump]        CoreWorkerService.grpc_client.Exit - 389 total (0 active)\n",
    ),
    "a rich traceback of a script": (
        "unknown-error",
        "╭───────────── Traceback (most recent call last) ─────────────╮\n"
        "│ /home/me/train.py:281 in train                              │\n"
        "│ ❱ 281     trainer.fit(model)                                │\n"
        "╰─────────────────────────────────────────────────────────────╯\n"
        "TypeError: fit() missing 1 required positional argument: 'batch'\n",
    ),
}
