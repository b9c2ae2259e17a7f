"""What known failures say in a log, why they happen and what to do. Standard library only.

A line belongs to the first signature whose pattern finds it, so order decides where one message
quotes another (a run stopped for lost trajectories names the last tool error). `cues` are bytes one
of which every such line holds: the scan looks for these alone and tries patterns on what it finds.
What numbers of steps say (`verl_mixed.diagnose.step_checks`) has signatures without a pattern.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Severity = Literal["fatal", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """How many events, and how close together, make a thing worth a word."""

    events: int
    seconds: float
    lines: int
    """The window where lines carry no time."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One known failure."""

    id: str
    title: str
    cause: str
    remedy: str
    severity: Severity = "fatal"
    cues: tuple[str, ...] = ()
    pattern: str = ""
    """Of a line without colours and without the `(actor pid=...)` before it. A group named `of`
    says of what: counts are kept for each."""

    follows: bool = False
    """It commonly follows another failure, and is named after any other."""

    storm: Storm | None = None

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu "
    "with use_dynamic_bsz)"
)

SIGNATURES: tuple[Signature, ...] = (
    # --- our own words, which quote others' ------------------------------------------------------
    Signature(
        id="infra-error-limit",
        title="too many trajectories of a source were lost to infrastructure",
        cause="tools, limiter or engine failed for more of a source than mixed.infra_error_limit "
        "allows; the line names the tool and its last error",
        remedy="mend what the line names (`verl-mixed doctor`, the run's tool_server.log), then "
        "start the same command again; only if such losses are meant: raise "
        "mixed.infra_error_limit",
        cues=("RubbleError",),
        pattern=r"source=(?P<of>\S+) lost \d+ of \d+ trajectories .*more than "
        r"mixed\.infra_error_limit=",
    ),
    Signature(
        id="no-trained-tokens",
        title="a batch without a token to train",
        cause="every trajectory was lost, or none has a token with mask 1; the line has their stop "
        "reasons",
        remedy="read the trajectories that the line names; raise mixed.deadlines where they were "
        "late, run `verl-mixed doctor` where tools failed, then start the same command again",
        cues=("RubbleError",),
        pattern=r"cannot train step=\d+, stop reasons=",
    ),
    Signature(
        id="loop-error-limit",
        title="an agent loop raised, and mixed.fail_on_loop_error stops the run for it",
        cause="an exception in an agent loop's or a reward's own code; its trace is above",
        remedy="mend the loop, or set mixed.fail_on_loop_error=false to count such trajectories "
        "and go on",
        cues=("RubbleError",),
        pattern=r"an agent loop raised in step=\d+, source=(?P<of>\S+)",
    ),
    Signature(
        id="source-starved",
        title="a source cannot fill its seats",
        cause="its groups are evicted or late: all alike in reward, failed, or stuck at a tool",
        remedy="look at what the line says was replaced and at the last fault; raise "
        "mixed.max_replacements or mixed.max_wait_s, lower the source's ratio, or take out its "
        "prompts that all succeed or all fail",
        cues=("SourceStarved",),
        pattern=r"cannot fill its batch with source='?(?P<of>[^':\s]+)",
    ),
    Signature(
        id="batch-short",
        title="a batch does not hold what was planned",
        cause="groups lost trajectories because an agent loop raised; its traceback is above",
        remedy="mend the loop, or have such groups replaced: "
        "trainer.v1.sampler.sync_refill_failed_groups=true",
        cues=("MixtureError",),
        pattern=r"cannot train step=\d+: planned prompts ",
    ),
    Signature(
        id="rollout-mismatch",
        title="rollout and trainer give other probabilities to the same tokens",
        cause="weights, masks or token ids differ between the two: a failed weight sync, another "
        "temperature, another tokenizer or precision",
        remedy="compare actor_rollout_ref.rollout.dtype with the actor's, set the same temperature "
        "for both, look at the token that the line names; mixed.max_probs_diff is the limit",
        cues=("Error",),
        pattern=r"rollout and trainer disagree in step=\d+",
    ),
    Signature(
        id="drift",
        title="trained tokens are not what the agent loop saw",
        cause="decoding or probabilities of a trajectory differ between rollout and trainer",
        remedy="see mixed/drift/found and training/rollout_probs_diff_max; use one tokenizer for "
        "both, and set mixed.max_probs_diff so that a run stops",
        severity="warning",
        cues=(" drift: ",),
        pattern=r"\bstep=\d+ drift: ",
    ),
    Signature(
        id="weight-sync",
        title="the rollout model did not take the trainer's weights",
        cause="trainer and rollout loaded different models, or a part of the weights never came",
        remedy="give both the same MODEL_PATH; start the same command again",
        cues=("Error",),
        pattern=r"weight sync (?:refused|incomplete): ",
    ),
    Signature(
        id="sandbox-unavailable",
        title="no sandbox for untrusted programs",
        cause="neither bubblewrap nor Landlock isolates on this host, and programs run isolated "
        "or not at all",
        remedy="install bubblewrap and allow user namespaces "
        "(`sysctl kernel.unprivileged_userns_clone=1`), or use a kernel with Landlock (5.13 or "
        "later); `verl-mixed doctor` shows which level a host has",
        cues=(
            "SandboxUnavailable",
            "no isolation for",
        ),
        pattern=r"SandboxUnavailable: |no isolation for programs",
    ),
    Signature(
        id="tool-server-overloaded",
        title="429 storm: the tool server turns calls away",
        cause="more requests than the server, or the search engine behind it, takes",
        remedy="lower RATE_LIMIT_PER_MINUTE or TOOL_MAX_WORKERS, or raise the server's "
        "--sandbox-workers and --queue-length; `verl-mixed limiter RUN` shows the pace",
        severity="warning",
        cues=(
            "HTTP 429",
            "Too Many Requests",
            'HTTP/1.1" 429',
            'HTTP/1.0" 429',
        ),
        pattern=r"HTTP 429\b|\b429 Too Many Requests|HTTP/1\.[01]\" 429 ",
        storm=Storm(events=20, seconds=60.0, lines=2000),
    ),
    Signature(
        id="limiter-timeout",
        title="calls waited for the rate limit longer than their deadline",
        cause="the limit is too low for this many trajectories, or a worker holds its slots",
        remedy="raise RATE_LIMIT_PER_MINUTE, TOOL_MAX_WORKERS or tool_config.timeout; "
        "`verl-mixed limiter RUN --watch` shows who waits",
        severity="warning",
        cues=(
            "LimiterTimeout",
            "ToolTimeout",
        ),
        pattern=r"no slot for n=\d+ calls|no free slot of slots=|no place for tool=",
    ),
    Signature(
        id="tool-server-down",
        title="the tool server refuses connections, or keeps failing",
        cause="nobody listens at the address, the network is cut, or the server fails every call "
        "(then the breaker is open)",
        remedy="start it (`verl-mixed serve-tools`) or correct TOOL_SERVER_URL; ask its /health "
        "from the node that names it, and read its log",
        cues=(
            "Cannot connect to host",
            "ToolUnavailable",
            "ToolTimeout",
            "TOOL_SERVER_URL",
        ),
        pattern=r"Cannot connect to host (?P<of>\S+)|not calling \S+ for tool=|no answer from "
        r"\S+ for tool=\S+ \d+ attempts|no answer from \S+/health \(TOOL_SERVER_URL\)",
    ),
    Signature(
        id="tool-timeout",
        title="tool calls without an answer in time",
        cause="a tool is slower than tool_config.timeout, or its server has too few workers",
        remedy="raise tool_config.timeout or the server's --sandbox-workers; ask its /metrics "
        "which tool is slow",
        severity="warning",
        cues=("ToolTimeout",),
        pattern=r"no answer from \S+ for tool='?(?P<of>[^'\s]+)'? within timeout=",
    ),
    Signature(
        id="tool-server-error",
        title="the tool server failed inside",
        cause="an exception in a tool's own code; its traceback follows in tool_server.log",
        remedy="read the traceback below the line; calls that met it count as infra_error",
        severity="warning",
        cues=("no answer to ",),
        pattern=r"no answer to (?:GET|POST|PUT|DELETE) (?P<of>/\S*)",
    ),
    Signature(
        id="stuck-rollouts",
        title="trajectories wait longer than mixed.deadlines.stuck_after_s",
        cause="what they wait for is slow or gone; engine: generation, limiter: the rate limit, "
        "tool: the tool server, reward: judging",
        remedy="for `limiter` raise RATE_LIMIT_PER_MINUTE, for `tool` look at the server's "
        "/health and log, for `engine` at the rollout workers' lines, for `reward` at the reward's "
        "own limits; mixed.deadlines ends such trajectories",
        severity="warning",
        cues=("source=",),
        pattern=r"\bstuck source=\S* row_id=.* waits_for=(?P<of>\w+) for_s=\d+",
    ),
    Signature(
        id="loop-error",
        title="an agent loop raised",
        cause="an exception in an agent loop's own code; its trace follows; the trajectory is not "
        "trained",
        remedy="mend the loop or reward named in the trace; mixed.fail_on_loop_error=true stops a "
        "run for it",
        severity="warning",
        cues=(
            "source=",
            "Error",
        ),
        pattern=r"agent loop raised (?:again )?source=(?P<of>\S+)|Error in _run_prompt",
    ),
    Signature(
        id="plugin-not-loaded",
        title="verl did not load this project's plugin",
        cause="the project is not installed in the Python that runs, or VERL_USE_EXTERNAL_PLUGINS "
        "switches it off",
        remedy="on every node: `pip install --no-deps -e .` in the repository, and unset "
        "VERL_USE_EXTERNAL_PLUGINS; `verl-mixed doctor` says whether it loads",
        cues=(
            "entry point verl.plugins",
            "VERL_USE_EXTERNAL_PLUGINS=",
        ),
        pattern=r"(?:did not load the|no) entry point verl\.plugins"
        r"|VERL_USE_EXTERNAL_PLUGINS=\S+ switches",
    ),
    Signature(
        id="limiter-not-shared",
        title="the rate limiter's file does not reach all nodes",
        cause="mixed.rate_limit.backend=file on a folder that is not shared, or whose locks do "
        "not reach other nodes",
        remedy="set mixed.rate_limit.backend=ray (or auto), or put the run on a shared folder; "
        "`verl-mixed doctor --locks FOLDER` tries one",
        cues=("Error",),
        pattern=r"mixed\.rate_limit\.backend=file does not reach all nodes",
    ),
    Signature(
        id="data-rows",
        title="data rows and mixture do not match",
        cause="a source without rows, rows without a ratio, or a column that is missing or null",
        remedy="run `verl-mixed check`; prepare the files again (`verl-mixed prepare`), or correct "
        "TRAIN_FILES and mixed.sources",
        cues=(
            "source=",
            "Error",
        ),
        pattern=r"no ratio for source=|no rows of source=|data_source is null in \d+ rows"
        r"|KeyError: '(?:prompt|raw_prompt|data_source|reward_model|extra_info|agent_name)'",
    ),
    # --- the GPU ---------------------------------------------------------------------------------
    Signature(
        id="vllm-kv-cache",
        title="no room for vLLM's KV cache",
        cause="after the weights, gpu_memory_utilization leaves less than one longest sequence "
        "needs",
        remedy="raise actor_rollout_ref.rollout.gpu_memory_utilization, lower "
        "actor_rollout_ref.rollout.max_model_len (or data.max_response_length), or raise "
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        cues=(
            "No available memory for",
            "KV cache memory",
        ),
        pattern=r"No available memory for the cache blocks"
        r"|larger than the available KV cache memory",
    ),
    Signature(
        id="vllm-gpu-busy",
        title="vLLM finds less free GPU memory than it is told to take",
        cause="the trainer or another process holds the GPU; gpu_memory_utilization counts from "
        "the whole of it",
        remedy="lower actor_rollout_ref.rollout.gpu_memory_utilization, offload the trainer "
        "(actor.fsdp_config.param_offload=true), and see `nvidia-smi` for leftovers of an earlier "
        "run (`./setup_cluster.sh restart`)",
        cues=("Free memory on device",),
        pattern=r"Free memory on device .*is less than desired GPU memory utilization",
    ),
    Signature(
        id="cuda-out-of-memory",
        title="CUDA out of memory",
        cause="a GPU has no room for a batch: micro-batches or responses too long, or vLLM keeps "
        "too much",
        remedy=f"lower {_MICRO_BATCHES}; lower data.max_response_length or "
        "actor_rollout_ref.rollout.gpu_memory_utilization; switch on "
        "actor_rollout_ref.model.enable_gradient_checkpointing and "
        "actor.fsdp_config.{param,optimizer}_offload",
        cues=(
            "CUDA out of memory",
            "CUDA error",
            "HIP out of memory",
        ),
        pattern=r"(?:CUDA|HIP) out of memory|CUDA error: out of memory",
    ),
    Signature(
        id="cuda-driver",
        title="the GPU driver is too old for this PyTorch",
        cause="PyTorch was built for a newer CUDA than the driver of this node knows",
        remedy="install a newer driver on the node, or a torch for its CUDA version on every node; "
        "`nvidia-smi` shows what the driver takes",
        cues=("NVIDIA driver on your system is too old", "CUDA driver version is insufficient"),
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
    ),
    Signature(
        id="no-gpu",
        title="no GPU where one is needed",
        cause="the process sees no GPU: no driver, an empty CUDA_VISIBLE_DEVICES, or a torch built "
        "for the CPU",
        remedy="run `nvidia-smi` on the node; install torch for CUDA; train without GPUs by "
        "PROFILE=laptop",
        cues=(
            "Found no NVIDIA driver",
            "No CUDA GPUs are available",
            "Torch not compiled with CUDA",
            "CUDA error",
        ),
        pattern=r"Found no NVIDIA driver|No CUDA GPUs are available|Torch not compiled with CUDA"
        r"|no CUDA-capable device is detected",
    ),
    Signature(
        id="cuda-error",
        title="a CUDA kernel failed",
        cause="a bad index (device-side assert), a fault of memory, or a failing GPU (Xid, ECC)",
        remedy="start once with CUDA_LAUNCH_BLOCKING=1 to see the line at fault; for Xid or ECC "
        "(`dmesg | grep Xid`, `nvidia-smi -q -d ECC`) take the node out of WORKER_NODES",
        cues=(
            "CUDA error",
            "NVRM: Xid",
            "CUBLAS_STATUS_",
        ),
        pattern=r"CUDA error: (?P<of>[^.(;]+)|NVRM: Xid|CUBLAS_STATUS_(?!SUCCESS)\w+ when calling",
    ),
    Signature(
        id="flash-attention",
        title="flash-attn is asked for and not usable",
        cause="verl's default is flash_attention_2, and the package is missing or built for "
        "another torch",
        remedy="set +actor_rollout_ref.model.override_config.attn_implementation=sdpa, or install "
        "flash-attn for this torch on every node",
        cues=(
            "FlashAttention",
            "Error",
        ),
        pattern=r"FlashAttention\d? ?has been toggled on, but it cannot be used"
        r"|No module named 'flash_attn|flash_attn\S*: undefined symbol",
    ),
    # --- memory and processes of a host ----------------------------------------------------------
    Signature(
        id="host-out-of-memory",
        title="the kernel's OOM killer ended a process",
        cause="the host (or the job's cgroup) ran out of memory",
        remedy="lower actor_rollout_ref.rollout.agent.num_workers and OBJECT_STORE_MEMORY, switch "
        "off param_offload and optimizer_offload, or give the job more memory (`#SBATCH --mem`)",
        cues=(
            "Out of memory: Killed",
            "Memory cgroup out of memory",
            "Detected ",
        ),
        pattern=r"ut of memory: Killed process \d+ \((?P<of>[^)]*)|Detected \d+ oom[-_]kill event",
    ),
    Signature(
        id="ray-memory-monitor",
        title="Ray's memory monitor killed workers",
        cause="a node used more than Ray's threshold (95 %) of its memory",
        remedy="lower actor_rollout_ref.rollout.agent.num_workers and OBJECT_STORE_MEMORY, or "
        "spread over more WORKER_NODES; RAY_memory_usage_threshold moves the limit "
        "(`./setup_cluster.sh restart` takes it)",
        cues=(
            "running low on memory",
            "Workers (tasks / actors) killed",
        ),
        pattern=r"killed due to the node running low on memory|killed due to memory pressure "
        r"\(OOM\)",
    ),
    Signature(
        id="shared-memory",
        title="/dev/shm is too small",
        cause="NCCL, a DataLoader or Ray ran out of shared memory; containers have 64 MB unless "
        "told otherwise",
        remedy="start the container with --shm-size=16g or --ipc=host (or remount /dev/shm); lower "
        "OBJECT_STORE_MEMORY; set data.dataloader_num_workers=0",
        cues=(
            "Bus error",
            "SIGBUS received",
            "Error",
        ),
        pattern=r"Bus error|\*\*\* SIGBUS received|creating shared memory segment",
    ),
    Signature(
        id="object-store-slow",
        title="Ray's object store is on a disk",
        cause="/dev/shm is smaller than the object store that was asked for",
        remedy="raise the container's --shm-size, or lower OBJECT_STORE_MEMORY below what "
        "`df /dev/shm` shows",
        severity="warning",
        cues=("The object store is using",),
        pattern=r"object store is using \S+ instead of /dev/shm",
    ),
    Signature(
        id="object-store-full",
        title="Ray's object store is full",
        cause="batches and weights in flight are larger than it",
        remedy="raise OBJECT_STORE_MEMORY and /dev/shm with it, then `./setup_cluster.sh restart`",
        cues=(
            "ObjectStoreFullError",
            "The local object store is full",
        ),
        pattern=r"ObjectStoreFullError|local object store is full of objects",
    ),
    Signature(
        id="worker-crashed",
        title="a worker process crashed",
        cause="a segmentation fault or abort in native code: mixed CUDA, NCCL or torch builds, or "
        "a driver's fault",
        remedy="read the stack below the line; make torch, vllm and flash-attn the same build on "
        "every node (`./setup_cluster.sh doctor`), then start the same command again",
        cues=(
            "SIGSEGV received",
            "SIGABRT received",
            "SIGFPE received",
            "SIGILL received",
            "Fatal Python error: ",
        ),
        pattern=r"^\*\*\* (?P<of>SIG(?!TERM)[A-Z]+) received at time=|Fatal Python error: "
        r"(?:Segmentation fault|Aborted|Illegal instruction|Floating)",
    ),
    Signature(
        id="open-files",
        title="too many open files",
        cause="the limit of open files (`ulimit -n`) is low for this many sockets",
        remedy="raise it to 65536 in the shell that starts Ray and on every node "
        "(/etc/security/limits.conf, LimitNOFILE), then `./setup_cluster.sh restart`",
        cues=("Too many open files",),
        pattern=r"Too many open files",
    ),
    Signature(
        id="disk-full",
        title="a disk is full",
        cause="checkpoints, Ray's session folder or its spilled objects filled it, or a quota did",
        remedy="free space (`df -h`, `du -sh runs/*/checkpoints`); lower "
        "trainer.max_actor_ckpt_to_keep, move RAY_TEMP_DIR, then start the same command again",
        cues=(
            "No space left on device",
            "Disk quota exceeded",
            "OutOfDiskError",
            "Object creation will fail",
        ),
        pattern=r"No space left on device|[Dd]isk quota exceeded|OutOfDiskError"
        r"|is over [\d.]+% full, available",
    ),
    Signature(
        id="permission-denied",
        title="permission denied",
        cause="a file or folder belongs to somebody else (an ssh key, where ssh says it)",
        remedy="correct the owner or mode of the path that the line names, or choose another "
        "folder (WANDB_DIR, RAY_TEMP_DIR); for ssh set SSH_USER and SSH_OPTIONS",
        cues=("Permission denied",),
        pattern=r"Permission denied",
    ),
    # --- Ray -------------------------------------------------------------------------------------
    Signature(
        id="ray-token",
        title="Ray refuses: authentication tokens differ",
        cause="this process and the cluster do not agree on RAY_AUTH_MODE or on the token",
        remedy="set RAY_AUTH_MODE the same on every node and in every shell; "
        "`./setup_cluster.sh restart` gives every node the token, or RAY_AUTH_MODE=disabled on a "
        "closed network",
        cues=(
            "InvalidAuthToken",
            "Token authentication is enabled but",
            "Ray token authentication",
        ),
        pattern=r"InvalidAuthToken|[Tt]oken authentication is enabled but",
    ),
    Signature(
        id="ray-version",
        title="Ray or Python differ between nodes",
        cause="a node runs another version than the head",
        remedy="make CONDA_ENV (or VENV) the same on every host; `./setup_cluster.sh doctor` shows "
        "who differs",
        cues=("Version mismatch: The cluster",),
        pattern=r"\bVersion mismatch: The cluster was started with",
    ),
    Signature(
        id="ray-unreachable",
        title="the Ray head cannot be reached",
        cause="no Ray runs at MASTER_IP, it just died, or a firewall is between",
        remedy="`./setup_cluster.sh status`; open RAY_PORT (6379) between the nodes; "
        "`./setup_cluster.sh restart`",
        cues=(
            "Failed to connect to GCS",
            "Unable to connect to GCS",
            "Could not find any running",
        ),
        pattern=r"(?:Failed|Unable) to connect to GCS|Could not find any running Ray instance",
    ),
    Signature(
        id="ray-socket-path",
        title="Ray's session folder has too long a name",
        cause="unix sockets end at 107 bytes",
        remedy="set RAY_TEMP_DIR to a short folder, as /tmp/ray_me",
        cues=("AF_UNIX path",),
        pattern=r"AF_UNIX path (?:length cannot exceed|too long)",
    ),
    Signature(
        id="node-died",
        title="a node was lost",
        cause="its raylet stopped, the machine went down, or the network was cut; Ray saw no "
        "heartbeat",
        remedy="`./setup_cluster.sh status` and `logs HOST`; see `dmesg` there; "
        "`./setup_cluster.sh setup` joins it again, then start the same command: it resumes from "
        "the last checkpoint",
        cues=(
            "heartbeats",
            "The actor died",
        ),
        pattern=r"has missed too many heartbeats|due to missing too many heartbeats"
        r"|because its node has died",
    ),
    Signature(
        id="resources-missing",
        title="Ray can never place what the run asks for",
        cause="the cluster has fewer GPUs or CPUs than trainer.nnodes x n_gpus_per_node need (3 "
        "CPUs and a GPU a process), so placement stays pending",
        remedy="compare `ray status` with trainer.nnodes, trainer.n_gpus_per_node, NUM_CPUS and "
        "NUM_GPUS (`verl-mixed doctor`); add WORKER_NODES or ask for less",
        cues=(
            "No available node types",
            "Total available GPUs",
            "Waiting for creating a placement",
        ),
        pattern=r"No available node types can fulfill resource request"
        r"|is less than total desired GPUs|Waiting for creating a placement group",
    ),
    Signature(
        id="workers-late",
        title="Ray's workers did not register in time",
        cause="importing torch takes too long: a slow shared folder, too few CPUs, or memory",
        remedy="put the environment on a local disk; lower NUM_CPUS; see "
        "RAY_TEMP_DIR/session_latest/logs/worker-*.err",
        severity="warning",
        cues=("Some workers of the worker process",),
        pattern=r"have not registered within the timeout",
    ),
    Signature(
        id="runtime-env",
        title="Ray could not set up the environment of its workers",
        cause="the runtime_env of ray.init cannot be made: a package, working_dir or its agent",
        remedy="read RAY_TEMP_DIR/session_latest/logs/runtime_env_setup-*.log; leave "
        "ray_kwargs.ray_init.runtime_env.working_dir empty and install the project on every node",
        cues=("Failed to set up runtime environment",),
        pattern=r"Failed to set up runtime environment",
    ),
    Signature(
        id="port-in-use",
        title="a port is in use",
        cause="another run, tool server or Ray listens on it",
        remedy="`ss -ltnp` shows who; choose another RAY_PORT, RAY_DASHBOARD_PORT or "
        "`serve-tools --port`, or end the other",
        cues=(
            "Address already in use",
            "EADDRINUSE",
            "Errno 98",
        ),
        pattern=r"[Aa]ddress already in use|EADDRINUSE",
    ),
    # --- collectives -----------------------------------------------------------------------------
    Signature(
        id="nccl-timeout",
        title="a NCCL collective timed out",
        cause="one rank is late or gone and the others wait for it: look for the rank whose lines "
        "stop first; else the network between nodes",
        remedy="mend what that rank met; for slow steps raise actor_rollout_ref.nccl_timeout; "
        "across nodes set NCCL_SOCKET_IFNAME and test with NCCL_DEBUG=INFO",
        cues=("Watchdog caught collective",),
        pattern=r"Watchdog caught collective operation timeout",
    ),
    Signature(
        id="nccl-error",
        title="NCCL failed",
        cause="an interface, a driver or a peer failed; the line says system, cuda or remote",
        remedy="start with NCCL_DEBUG=INFO; set NCCL_SOCKET_IFNAME to the interface of MASTER_IP, "
        "NCCL_IB_DISABLE=1 without InfiniBand; make the CUDA builds the same on every node",
        cues=("NCCL error",),
        pattern=r"NCCL error(?: in)?:",
    ),
    Signature(
        id="rendezvous",
        title="processes cannot reach each other",
        cause="a firewall, or an interface whose address other nodes cannot reach",
        remedy="open all ports between the nodes; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to "
        "the interface of MASTER_IP; check that hostnames resolve to reachable addresses",
        cues=(
            "Gloo connectFullMesh",
            "The client socket has timed out",
        ),
        pattern=r"connectFullMesh failed|client socket has timed out after \d+ms",
    ),
    # --- model, data, checkpoints ----------------------------------------------------------------
    Signature(
        id="model-not-found",
        title="the model cannot be loaded",
        cause="no such folder, no access to the hub (offline, gated, no token), or a broken "
        "download",
        remedy="set MODEL_PATH to a folder that every node has; for the hub set HF_TOKEN, or "
        "HF_ENDPOINT; `huggingface-cli download` once where there is a network",
        cues=(
            "Error",
            "We couldn't connect to",
            "Can't load",
        ),
        pattern=r"is not a valid model identifier|We couldn't connect to '\S+' to load"
        r"|Can't load (?:the (?:configuration|model)|tokenizer|image)|LocalEntryNotFoundError"
        r"|trying to access a gated repo",
    ),
    Signature(
        id="chat-template",
        title="the tokenizer has no chat template",
        cause="a base model's tokenizer",
        remedy="use an instruct model, or give one by actor_rollout_ref.model.custom_chat_template",
        cues=("Error",),
        pattern=r"tokenizer\.chat_template is not set",
    ),
    Signature(
        id="nan-probabilities",
        title="the model gives no probabilities (NaN)",
        cause="the weights are broken: training diverged, or a weight sync did",
        remedy="resume from a checkpoint before the step (trainer.resume_mode=resume_path) with a "
        "lower LEARNING_RATE; look at actor/grad_norm before it",
        cues=("Error",),
        pattern=r"probability tensor contains either",
    ),
    Signature(
        id="data-unreadable",
        title="a data file cannot be read",
        cause="no parquet file, a torn one, or no file at all",
        remedy="correct TRAIN_FILES and VAL_FILES, or prepare the file again; `verl-mixed check` "
        "names the file",
        cues=(
            "ArrowInvalid",
            "Error",
        ),
        pattern=r"ArrowInvalid|DatasetGenerationError"
        r"|(?:FileNotFoundError|No such file).*\.parquet'",
    ),
    Signature(
        id="dataloader",
        title="a DataLoader worker ended",
        cause="it was killed (memory) or raised; with num_workers=0 the error itself is seen",
        remedy="set data.dataloader_num_workers=0 and start again; see `dmesg` for the OOM killer",
        cues=("DataLoader worker (pid",),
        pattern=r"DataLoader worker \(pid(?:\(s\))? [^)]*\) exited unexpectedly",
    ),
    Signature(
        id="checkpoint-broken",
        title="a checkpoint is torn or missing",
        cause="a file was not written to its end (a kill, a full disk), or the folder is of "
        "another model or world size",
        remedy="remove the last checkpoints/global_step_N of the run and correct "
        "latest_checkpointed_iteration.txt, or resume by trainer.resume_mode=resume_path from an "
        "earlier one",
        cues=(
            "PytorchStreamReader failed",
            "Error",
        ),
        pattern=r"PytorchStreamReader failed|resume ckpt must|Error while deserializing header"
        r"|Error\(s\) in loading state_dict|(?:FileNotFoundError|No such file).*_rank_\d+\.pt",
    ),
    Signature(
        id="wandb-login",
        title="Weights & Biases has no key, or cannot be reached",
        cause="trainer.logger holds wandb, and WANDB_API_KEY is missing, wrong or useless offline",
        remedy="export WANDB_API_KEY, or WANDB_MODE=offline and `wandb sync` later, or "
        "trainer.logger=[console]",
        cues=(
            "No API key configured",
            "Error",
        ),
        pattern=r"No API key configured"
        r"|wandb\.errors\.(?:errors\.)?(?:CommError|AuthenticationError|UsageError)",
    ),
    Signature(
        id="package-missing",
        title="a package is missing or does not fit",
        cause="the Python that runs has not what is imported, or of another build",
        remedy="install it in CONDA_ENV (or VENV) on every node; `verl-mixed doctor` names what is "
        "missing or of the wrong version",
        cues=(
            "ModuleNotFoundError",
            "ImportError",
        ),
        pattern=r"ModuleNotFoundError: No module named '(?P<of>[^']+)'"
        r"|ImportError: (?:cannot import name|.*undefined symbol|.*cannot open shared object"
        r"|.*not found \(required by)",
    ),
    Signature(
        id="config-refused",
        title="the config is refused",
        cause="a key that is not there, a value that does not fit, or batch sizes that do not "
        "divide",
        remedy="run `verl-mixed check` with the same words: it names every problem; a new key "
        "takes a + before it",
        cues=(
            "cannot start, ",
            "Could not override",
            "Error",
        ),
        pattern=r"^cannot start, \d+ problems?:|Could not override '|Key '\S+' is not in struct"
        r"|must be divisible by (?:minimal|model_parallel|ppo_|n_gpus|n_seq)",
    ),
    Signature(
        id="slurm-cancelled",
        title="Slurm ended the job",
        cause="its time was over, it was preempted, or somebody cancelled it",
        remedy="start the same command again: it resumes from the last checkpoint; ask for more "
        "`#SBATCH --time`, and save more often (trainer.save_freq)",
        cues=("CANCELLED AT ",),
        pattern=r"\*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT \S+(?P<of> DUE TO [A-Z ]+)?",
    ),
    # --- what follows from another failure -------------------------------------------------------
    Signature(
        id="engine-died",
        title="the rollout engine died",
        cause="an error inside it, printed above; without one, the kernel killed it",
        remedy="look above for the engine's own traceback and in `dmesg`; then as that says",
        follows=True,
        cues=(
            "EngineCore encountered",
            "EngineCore failed",
            "Engine core init",
            "Error",
        ),
        pattern=r"EngineCore encountered a|EngineCore failed to start"
        r"|Engine core initialization failed|the rollout server stopped generating"
        r"|no tokens from the rollout server",
    ),
    Signature(
        id="worker-lost",
        title="a worker process is gone without a word",
        cause="something killed it (SIGKILL: the OOM killer, `ray stop --force`), or it crashed",
        remedy="on its node: `dmesg -T | grep -i -E 'killed process|segfault|Xid'`, and "
        "RAY_TEMP_DIR/session_latest/logs/*PID*.err; give those files to `verl-mixed diagnose` too",
        follows=True,
        cues=(
            "A worker died or was killed",
            "The actor is dead",
            "The worker died unexpectedly",
        ),
        pattern=r"while executing a task by an unexpected system error"
        r"|because its worker process has died|The worker died unexpectedly",
    ),
    Signature(
        id="actor-died",
        title="a Ray actor died",
        cause="its process ended, or raised while it started",
        remedy="look for the cause above it, and in the actor's own file "
        "RAY_TEMP_DIR/session_latest/logs/worker-*.err on its node",
        follows=True,
        cues=(
            "The actor died",
            "ActorUnavailableError",
        ),
        pattern=r"The actor died (?:unexpectedly|because of an error)"
        r"|ActorUnavailableError",
    ),
    Signature(
        id="peer-lost",
        title="a peer of a collective is gone",
        cause="another rank ended first; its lines have the reason",
        remedy="look at the rank that ended first",
        follows=True,
        cues=(
            "Connection closed by peer [",
            "Error",
        ),
        pattern=r"Connection closed by peer \[|failed to recv, got 0 bytes",
    ),
    # --- what the numbers of steps say (verl_mixed.diagnose.step_checks)
    # --------------------------------------
    Signature(
        id="loss-not-finite",
        title="loss or gradient is not a number",
        cause="training diverged: a learning rate too high, or bad log-probs",
        remedy="resume before that step (trainer.resume_mode=resume_path) with a lower "
        "LEARNING_RATE or actor.optim.lr_warmup_steps; look at rollout_probs_diff before it",
    ),
    Signature(
        id="gradient-explosion",
        title="the gradient norm jumped",
        cause="a batch of extreme advantages, a learning rate too high, or off-policy data",
        remedy="lower LEARNING_RATE or actor_rollout_ref.actor.grad_clip; look at the trajectories "
        "of that step (RUN/trajectories)",
        severity="warning",
    ),
    Signature(
        id="kl-blow-up",
        title="the policy leaves the one that sampled",
        cause="too many updates a batch, a learning rate too high, or stale rollouts",
        remedy="lower LEARNING_RATE or actor.ppo_epochs, raise actor.ppo_mini_batch_size; in "
        "asynchronous modes lower the allowed staleness",
        severity="warning",
    ),
    Signature(
        id="entropy-collapse",
        title="the policy's entropy collapsed",
        cause="it says the same for everything: rewards that one answer satisfies, or too long a "
        "run",
        remedy="read RUN/trajectories; raise actor.entropy_coeff or actor.clip_ratio_high, lower "
        "LEARNING_RATE",
        severity="warning",
    ),
    Signature(
        id="probabilities-differ",
        title="rollout and trainer drift apart",
        cause="the engine computes other probabilities than the trainer: precision, weight sync, "
        "masks or temperature",
        remedy="compare dtypes and temperature of both; set mixed.max_probs_diff so that a run "
        "stops; see training/rollout_probs_diff_mean",
        severity="warning",
    ),
    Signature(
        id="trajectories-lost",
        title="trajectories of a source are lost to infrastructure or its loop",
        cause="tools, limiter, engine or the agent loop fail for some",
        remedy="see mixed/SOURCE/infra_error_rate and loop_error_rate, the run's tool_server.log, "
        "and `verl-mixed doctor`; mixed.infra_error_limit stops a run for it",
        severity="warning",
    ),
    Signature(
        id="limiter-slowed",
        title="the rate limiter works at less than half its rate",
        cause="the tool server answers 429 or 503, and the limiter backs off",
        remedy="give the server more workers (--sandbox-workers, --queue-length), or lower "
        "RATE_LIMIT_PER_MINUTE to what it takes; `verl-mixed limiter RUN`",
        severity="warning",
    ),
    Signature(
        id="slow-step",
        title="steps far slower than those before",
        cause="the phase that grew is named; gen: rollouts and tools, update_actor: training, "
        "save_checkpoint: the disk, update_weights: the network",
        remedy="for gen look at stuck rollouts and `verl-mixed limiter RUN`, for save_checkpoint "
        "at the shared disk, else at what else runs on the node (`./setup_cluster.sh status`)",
        severity="warning",
    ),
)

BY_ID: Mapping[str, Signature] = {signature.id: signature for signature in SIGNATURES}

IN_LINES: tuple[Signature, ...] = tuple(s for s in SIGNATURES if s.pattern)
"""Those that a line can show, in order."""
