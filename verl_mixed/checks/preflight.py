"""What is wrong with a run config, all of it at once, before Ray starts.

Decides by the config, the data files' columns, the ports and the packages of this machine. verl's
own rules are restated where breaking them would end a run late, in silence, or by hanging for ever
(`utils/config.py`, `workers/engine/utils.py` and `single_controller/ray/base.py` at 0.9.1).
"""

import ctypes
import re
import socket
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from agent_loop.rewards import default_reward, reward_for
from agent_loop.rewards.terms import free_length
from agent_loop.tools.limiter import rate_of
from agent_loop.turns.loop_settings import STRING_STOPS
from cluster.placement import need_of, own_node, placement_problems
from config.lookup import at
from config.schema import (
    TOOL_CONFIG,
    MixedConfig,
    SourceConfig,
    ToolConfig,
)
from verl_mixed.checks.config.algorithm import algorithm_problems, is_count
from verl_mixed.checks.config.data import data_problems, row_problems
from verl_mixed.checks.config.gpus import gpu_problems, package_gaps
from verl_mixed.checks.config.numbers import number_problems
from verl_mixed.checks.config.prompts import model_problems
from verl_mixed.run.compose import unset_problems
from verl_mixed.run.environment import plugin_problems
from verl_mixed.run.name import name_problems
from verl_mixed.run.sections import agent_loops, named_sources, section_of, sound_sources
from verl_mixed.run.settings import ADDRESS_KEY

HEALTH_TIMEOUT_S = 5.0

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_FUSED = "actor_rollout_ref.model.use_fused_kernels"

_VERLS_AGENTS = {"tool_agent", "single_turn_agent"}
"""Agent loops that verl registers itself."""

_MANAGER = "agent_loop.loop_worker.MixedAgentLoopManager"

_MODES = ("mixed_sync", "mixed_colocate_async", "mixed_separate_async")
"""Trainers of the mixture; see `agent_loop.training.trainer`."""


def preflight(
    config: Mapping[str, Any], *, own_tool_server: bool, data: bool = True, machine: bool = True
) -> list[str]:
    """Every problem that this machine can see without starting anything.

    Args:
        config: the resolved run config.
        own_tool_server: the run starts its tool server on a free port; otherwise the one that is
            named must answer.
        data: look into the data files; False when they are not made yet.
        machine: ask for the GPUs and nodes too; False where the run will start elsewhere.

    Returns:
        One sentence each: what, where, the rule, the remedy. Empty when the run may start.
    """
    problems = mixture_problems(config, data=data)
    problems += plugin_problems()
    problems += _mode_problems(config)
    problems += _loop_problems(config)
    problems += _batch_problems(config)
    problems += _resume_problems(config)
    problems += _device_problems(config)
    if machine:
        problems += machine_problems(config)
    problems += _dashboard_problems(config)
    if data:
        problems += row_problems(config)
        problems += model_problems(config)
    problems += _server_problems(config)
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if tools is not None and not own_tool_server:
        for url in tools.server_urls:
            problems += _given_server_problems(url)
    return problems


def mixture_problems(config: Mapping[str, Any], *, data: bool = True) -> list[str]:
    """The part of `preflight` that is the same on every machine: mixture, rows, numbers.

    Args:
        config: the resolved run config.
        data: look into the data files.
    """
    _, problems = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    problems += section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)[1]
    problems += _limit_problems(config)
    problems += unset_problems(config)
    problems += name_problems(at(config, "mixed.experiment"))
    loops, loop_problems = agent_loops(config)
    agents = None if loops is None else loops.keys() | _VERLS_AGENTS
    problems += loop_problems
    problems += _choice_problems(config, agents)
    problems += _schedule_problems(config)
    problems += _source_problems(config)
    problems += algorithm_problems(config)
    problems += number_problems(config)
    if data:
        problems += data_problems(config, agents)
    return problems


def _server_problems(config: Mapping[str, Any]) -> list[str]:
    """What the run's own tool server would not take; its place and its limiter are the run's."""
    given = at(config, "mixed.tool_server", {})
    if not given or not isinstance(given, Mapping):
        return []  # what is no mapping is said by the schema
    from agent_loop.tools.server.settings import ServerSettings  # dear, and hardly ever needed

    ours = {"host", "port", "token", "limiter_path"}
    problems = [
        f"mixed.tool_server.{name}: the run sets it itself; leave it out"
        for name in sorted(ours & given.keys())
    ]
    try:
        ServerSettings.model_validate(dict(given))
    except ValidationError as error:
        problems += [
            f"mixed.tool_server.{'.'.join(map(str, item['loc']))}: {item['msg']}; see `verl-mixed "
            "serve-tools --help`"
            for item in error.errors()
        ]
    return problems


def _limit_problems(config: Mapping[str, Any]) -> list[str]:
    """Shares of no source; and limits, each right for itself, that cannot be kept together."""
    shares, sources = at(config, "mixed.rate_limit.shares"), named_sources(config)
    unknown = {*shares} - {"", *sources} if isinstance(shares, Mapping) else set()
    problems = [
        f"mixed.rate_limit.shares.{name}: no such source; name one of {sorted(sources, key=str)}"
        for name in sorted(unknown, key=str)
    ]
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None:
        return problems
    try:
        rate_of(tools, mixed)
    except ValueError as error:
        problems.append(f"{TOOL_CONFIG} and mixed.rate_limit: {error}")
    return problems


def _choice_problems(config: Mapping[str, Any], agents: set[str] | None) -> list[str]:
    """Agents and rewards that sources name and that do not exist."""
    problems = []
    for name, source in named_sources(config).items():
        given = source if isinstance(source, Mapping) else {}
        agent, reward = given.get("agent"), given.get("reward") or default_reward(name)
        options = given.get("reward_options") or {}
        if agent is not None and agents is not None and agent not in agents:
            problems.append(
                f"mixed.sources.{name}.agent={agent!r}: no such agent; there are "
                f"{', '.join(sorted(agents))}"
            )
        if not isinstance(reward, str) or not isinstance(options, Mapping):
            continue  # said by the check of the section
        try:
            reward_for(reward, options)
        except ValueError as error:
            for line in str(error).splitlines():
                place = "" if line.startswith("reward_options") else "reward: "
                problems.append(f"mixed.sources.{name}.{place}{line}")
    return problems


def _schedule_problems(config: Mapping[str, Any]) -> list[str]:
    """Schedules that leave no source a share at some step, or that cannot be followed."""
    sources = sound_sources(config)
    schedules = {name: source.schedule for name, source in sources.items()}
    moving = [name for name, schedule in schedules.items() if len(schedule) > 1]
    problems = []
    if moving and at(config, "mixed.apportionment") == "fixed":
        problems.append(
            f"mixed.apportionment='fixed' with a schedule for source={', '.join(moving)}: every "
            "batch would hold the same counts; set it to carry, or give one ratio each"
        )
    if len(sources) < len(named_sources(config)) or not any(
        own.takes_part for own in sources.values()
    ):
        return problems  # said by the check of the section
    steps = sorted({0}.union(*schedules.values()))
    empty = [step for step in steps if not any(_at_step(own, step) for own in schedules.values())]
    problems += [
        f"every ratio is 0 after {step} steps ({', '.join(schedules)}): a batch needs a source; "
        "give at least one a ratio above 0 there (mixed.sources.<name>.ratio)"
        for step in empty
    ]
    return problems


def _at_step(schedule: Mapping[int, float], step: int) -> float:
    """A schedule's ratio at one step; exactly 0 where it is."""
    knots = sorted(schedule)
    return float(np.interp(step, knots, [schedule[knot] for knot in knots]))


def _source_problems(config: Mapping[str, Any]) -> list[str]:
    """Settings of sources that verl's engines could not keep."""
    longest = at(config, "data.max_response_length")
    common = at(config, f"{_ROLLOUT}.temperature")
    fused = at(config, _FUSED)
    problems = []
    for name, source in sound_sources(config).items():
        length, temperature = source.max_response_length, source.temperature
        if length is not None and isinstance(longest, int) and length > longest:
            problems.append(
                f"mixed.sources.{name}.max_response_length={length}: every response is padded to "
                f"data.max_response_length={longest}, so no source may have more; lower it, or "
                "raise that"
            )
        if isinstance(longest, int):
            problems += _length_term_problems(name, source, longest)
        if fused and temperature is not None and temperature != common:
            problems.append(
                f"mixed.sources.{name}.temperature={temperature} with {_FUSED}=true: verl's fused "
                f"kernels take one temperature for all rows ({_ROLLOUT}.temperature={common}); set "
                f"{_FUSED}=false, or leave out the source's own"
            )
    return problems


def _length_term_problems(name: str, source: SourceConfig, longest: int) -> list[str]:
    """A punishment that no response is long enough for."""
    term, room = source.reward_terms.length, source.max_response_length or longest
    if term is None or (free := free_length(term, room)) < room:
        return []
    return [
        f"mixed.sources.{name}.reward_terms.length: its first {free} tokens are free, and its "
        f"responses have at most {room}: it would never count; lower free or limit"
    ]


# --- numbers ------------------------------------------------------------------------------------


def _resume_problems(config: Mapping[str, Any]) -> list[str]:
    """A checkpoint to begin from that is none, or was interrupted."""
    if at(config, "trainer.resume_mode") != "resume_path":
        return []
    given = at(config, "trainer.resume_from_path")
    if isinstance(given, str):
        folder = Path(given)
        if re.fullmatch(r"global_step_\d+", folder.name) and (folder / "data.pt").is_file():
            return []
    return [
        f"trainer.resume_from_path={given!r}: want the folder global_step_N of a checkpoint, with "
        "the data.pt that one has which was not interrupted; correct it"
    ]


def _processes(config: Mapping[str, Any]) -> int:
    """Training processes over all nodes; 0 where a number is wrong."""
    per_node, nodes = at(config, "trainer.n_gpus_per_node"), at(config, "trainer.nnodes")
    return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else 0


def _mode_problems(config: Mapping[str, Any]) -> list[str]:
    """Ways of verl to train that would lose the mixture."""
    problems = []
    mode = at(config, "trainer.v1.trainer_mode")
    if mode not in _MODES:
        problems.append(
            f"trainer.v1.trainer_mode={mode!r}: no such trainer of the mixture; choose "
            f"{', '.join(_MODES)}"
        )
    if at(config, "skip.rollout_tq.enable"):
        problems.append(
            "skip.rollout_tq.enable=True: it puts saved rollouts past the replay buffer, which "
            "keeps the quotas; set it to false"
        )
    sampler = at(config, "trainer.v1.sampler.custom_sampler.path")
    if sampler:
        problems.append(
            f"trainer.v1.sampler.custom_sampler.path={sampler!r}: the mixture has a sampler of its "
            "own, which keeps the quotas; set it to null"
        )
    if at(config, f"{_ACTOR}.shuffle"):
        problems.append(
            f"{_ACTOR}.shuffle=True: mini-batches would be drawn by chance and lose their quotas; "
            "set it to false"
        )
    limit = at(config, "data.train_max_samples", -1)
    if limit is not None and limit > 0:
        problems.append(
            f"data.train_max_samples={limit}: verl would leave rows out that the mixture plan "
            "counts on; name smaller files, or set it to -1"
        )
    if at(config, "data.filter_overlong_prompts"):
        problems.append(
            "data.filter_overlong_prompts=True: verl would leave rows out that the mixture plan "
            "counts on; set it to false, long prompts are named before the run starts"
        )
    return problems


def _foreign_problems(config: Mapping[str, Any]) -> list[str]:
    """Settings of a source that verl's own agent loops do not read."""
    ours = ("max_turns", "max_response_length", "observation_style")
    return [
        f"mixed.sources.{name}.{key}={getattr(source, key)!r} with agent={source.agent!r}: verl's "
        f"own loops read no limits of a source; set it for all, or use another agent"
        for name, source in sound_sources(config).items()
        if source.agent in _VERLS_AGENTS
        for key in ours
        if getattr(source, key) is not None
    ]


def _loop_problems(config: Mapping[str, Any]) -> list[str]:
    """Settings of the agent loops that contradict one another, or their backend."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None:
        return []  # said by the check of the sections
    problems = _foreign_problems(config)
    backend = at(config, f"{_ROLLOUT}.name")
    if mixed.turns.stop_at_tag == "strings" and backend not in STRING_STOPS:
        problems.append(
            f"mixed.turns.stop_at_tag='strings' with {_ROLLOUT}.name={backend!r}: only "
            f"{', '.join(sorted(STRING_STOPS))} stop at strings; choose auto"
        )
    for name in ("turn_s", "trajectory_s", "step_s"):
        longest = getattr(mixed.deadlines, name)
        if longest is not None and tools.timeout >= longest:
            problems.append(
                f"{TOOL_CONFIG}.timeout={tools.timeout:g} is not below mixed.deadlines.{name}="
                f"{longest:g}: a tool that hangs would end trajectories as `deadline`, which "
                "trains, and not as `infra_error`; lower the timeout or raise the deadline"
            )
    if not tools.state_masking and at(config, "algorithm.rollout_correction.rollout_is"):
        problems.append(
            f"{TOOL_CONFIG}.state_masking=false with algorithm.rollout_correction: tokens that the "
            "policy never sampled have no rollout log-prob to correct by; use one of the two"
        )
    if at(config, f"{_ROLLOUT}.agent.agent_loop_manager_class") != _MANAGER:
        problems.append(
            f"{_ROLLOUT}.agent.agent_loop_manager_class: want {_MANAGER}, which counts what agent "
            "loops raise and judges them; remove the override"
        )
    return problems


def _separate_problems(config: Mapping[str, Any], batch: int, mini: int) -> list[str]:
    """What verl asserts of a trainer with rollout on GPUs of its own."""
    problems = []
    key = "trainer.v1.separate_async.parameter_sync_step"
    updates = at(config, key)
    if not is_count(updates) or batch != updates * mini:
        problems.append(
            f"data.train_batch_size={batch} is not {key}={updates!r} times "
            f"{_ACTOR}.ppo_mini_batch_size={mini}: mixed_separate_async trains one mini-batch at a "
            "time and sends weights after so many; make it their product"
        )
    for key in (f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node"):
        value = at(config, key)
        if not is_count(value):
            problems.append(
                f"{key}={value!r}: mixed_separate_async generates on GPUs of its own; want a whole "
                "number >= 1"
            )
    backend = at(config, f"{_ROLLOUT}.checkpoint_engine.backend")
    if backend == "naive":
        problems.append(
            f"{_ROLLOUT}.checkpoint_engine.backend='naive': it cannot send weights to GPUs of "
            "another process, as mixed_separate_async must; choose nccl or another of verl's, on a "
            "CPU tcp_store"
        )
    return problems


def _batch_problems(config: Mapping[str, Any]) -> list[str]:
    """Sizes that verl must be able to split evenly; without even splits it pads or raises."""
    batch, n = at(config, "data.train_batch_size"), at(config, f"{_ROLLOUT}.n")
    mini = at(config, f"{_ACTOR}.ppo_mini_batch_size")
    processes = _processes(config)
    if not all(is_count(size) for size in (batch, n, mini, processes)):
        return []  # said by the check of numbers
    problems = []
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    if separate:
        problems += _separate_problems(config, batch, mini)
    elif batch % mini:
        problems.append(
            f"data.train_batch_size={batch} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: "
            "the last mini-batch would be filled with padding; choose a divisor"
        )
    sources = sound_sources(config).values()
    groups = {source.rollout_n or n for source in sources if source.takes_part}
    if len(groups) > 1:
        return problems  # the trainer pads each optimizer update to a number that can be split
    n = groups.pop() if groups else n
    at_once, key = (
        (mini, f"{_ACTOR}.ppo_mini_batch_size") if separate else (batch, "data.train_batch_size")
    )
    if (at_once * n) % processes:
        problems.append(
            f"{key}={at_once} times {n} trajectories a prompt ({_ROLLOUT}.n or a source's "
            f"rollout_n) is no multiple of the {processes} training processes "
            "(trainer.n_gpus_per_node * trainer.nnodes): each trains an equal part; change one "
            "of them"
        )
    if problems:
        return problems
    if not at(config, f"{_ACTOR}.use_dynamic_bsz"):
        key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), mini * n, processes)
    if not at(config, f"{_ROLLOUT}.log_prob_use_dynamic_bsz"):
        key = f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), at_once * n, processes)
    needs_reference = at(config, "algorithm.use_kl_in_reward") or at(
        config, f"{_ACTOR}.use_kl_loss"
    )
    if needs_reference and not at(config, f"{_REF}.log_prob_use_dynamic_bsz"):
        key = f"{_REF}.log_prob_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), at_once * n, processes)
    return problems


def _micro_problems(key: str, micro: Any, trajectories: int, processes: int) -> list[str]:
    if not isinstance(micro, int) or micro < 1:
        return [f"{key}={micro!r}: want a whole number >= 1"]
    share = trajectories / processes
    if share % micro == 0:
        return []
    return [
        f"{key}={micro} does not divide the {share:g} trajectories of one process "
        f"({trajectories} over {processes}): verl stops at the first step; choose a divisor"
    ]


# --- machine ------------------------------------------------------------------------------------


def _device_problems(config: Mapping[str, Any]) -> list[str]:
    if at(config, "trainer.device") == "cuda":
        return gpu_problems(config)
    if at(config, "trainer.device") != "cpu":
        return []
    rules: dict[str, Any] = {
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_REF}.strategy": "fsdp2",
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    }
    if at(config, f"{_ROLLOUT}.name") == "vllm_cpu":
        rules |= {
            f"{_ROLLOUT}.enforce_eager": True,
            f"{_ROLLOUT}.enable_sleep_mode": False,
            f"{_ROLLOUT}.free_cache_engine": False,
            # vLLM 0.28 moves back the seeds of prompts that it takes in parts, which a CPU refuses
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


def _own_placement_problems(config: Mapping[str, Any]) -> list[str]:
    """What the Ray that the run starts could never place; a cluster that is up is asked itself."""
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


def machine_problems(config: Mapping[str, Any]) -> list[str]:
    """What this machine lacks that the run needs; a cluster that is there answers for its own."""
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


def cuda_devices() -> int:
    """NVIDIA GPUs that this process may use, told by the driver: importing torch takes seconds."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def _dashboard_problems(config: Mapping[str, Any]) -> list[str]:
    ray_init = at(config, "ray_kwargs.ray_init", {})
    port = ray_init.get("dashboard_port")
    if not ray_init.get("include_dashboard", True) or port is None or ray_init.get("address"):
        return []
    if _is_free(ray_init.get("dashboard_host", "127.0.0.1"), port):
        return []
    return [
        f"ray_kwargs.ray_init.dashboard_port={port}: the port is in use; another run may be going "
        "on, else set RAY_DASHBOARD_PORT to a free one"
    ]


def _given_server_problems(server_url: str) -> list[str]:
    try:
        with urllib.request.urlopen(
            f"{server_url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S
        ) as answer:
            answer.read(1)
    except (OSError, ValueError, HTTPException) as error:
        return [
            f"no answer from {server_url}/health (TOOL_SERVER_URL): {error}; start the server with "
            "`verl-mixed serve-tools`, or unset TOOL_SERVER_URL to have one started"
        ]
    return []


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
