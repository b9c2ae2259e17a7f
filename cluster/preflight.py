"""What is wrong with a run config, all of it at once, before Ray starts.

Decides by the config, the data files' columns, the ports and the packages of this machine. verl's
own rules are restated where breaking them would end a run late, in silence, or by hanging for ever
(`utils/config.py`, `workers/engine/utils.py` and `single_controller/ray/base.py` at 0.9.1).
"""

import ctypes
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from cluster.compose import at, files_at, unset_keys, unset_problems
from cluster.environment import plugin_problems
from cluster.settings import TOOL_CONFIG
from config.schema import ConfigError, MixedConfig, Section, ToolConfig, load_section
from samplers.rows import read_sources

CPUS_PER_PROCESS = 3
"""Logical CPUs of one training process, for the roles that verl may place in it."""

HEALTH_TIMEOUT_S = 5.0

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def preflight(config: Mapping[str, Any], *, own_tool_server: bool, data: bool = True) -> list[str]:
    """Every problem that this machine can see without starting anything.

    Args:
        config: the resolved run config.
        own_tool_server: the run starts its tool server on a free port; otherwise the one that is
            named must answer.
        data: look into the data files; False when they are not made yet.

    Returns:
        One sentence each: what, where, the rule, the remedy. Empty when the run may start.
    """
    mixed, problems = _section(MixedConfig, config, "mixed")
    tools, tool_problems = _section(ToolConfig, config, TOOL_CONFIG)
    problems += tool_problems
    problems += unset_problems(config)
    problems += plugin_problems()
    problems += name_problems(at(config, "mixed.experiment"))
    agents, agent_problems = _agents(config)
    problems += agent_problems
    problems += _choice_problems(config, agents)
    problems += _number_problems(config)
    problems += _batch_problems(config)
    problems += _device_problems(config)
    problems += _dashboard_problems(config)
    if data:
        problems += _data_problems(config, mixed, agents)
        problems += _model_problems(config)
    if tools is not None and not own_tool_server:
        problems += _given_server_problems(tools.server_url)
    return problems


def _section(
    section: type[Section], config: Mapping[str, Any], path: str
) -> tuple[Any | None, list[str]]:
    try:
        return load_section(section, at(config, path, {}), path), []
    except ConfigError as error:
        return None, error.problems


def name_problems(experiment: Any) -> list[str]:
    """Why this cannot be the name of a run."""
    if isinstance(experiment, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", experiment):
        return []
    return [
        f"mixed.experiment={experiment!r}: it names a folder; "
        "use letters, digits, '.', '_' and '-' (EXPERIMENT_NAME)"
    ]


def _choice_problems(config: Mapping[str, Any], agents: set[str] | None) -> list[str]:
    """Agents and rewards that sources name and that do not exist."""
    from agent_loop.rewards import REWARDS  # pulls in the graders, which `--help` can do without

    problems = []
    for name, source in at(config, "mixed.sources", {}).items():
        for key, known in (("reward", set(REWARDS)), ("agent", agents)):
            choice = source.get(key) if isinstance(source, Mapping) else None
            if choice is not None and known is not None and choice not in known:
                problems.append(
                    f"mixed.sources.{name}.{key}={choice!r}: no such {key}; "
                    f"there are {', '.join(sorted(known))}"
                )
    return problems


def _agents(config: Mapping[str, Any]) -> tuple[set[str] | None, list[str]]:
    """Names of the agent loops in the file that the config names, and what is wrong with it."""
    key = f"{_ROLLOUT}.agent.agent_loop_config_path"
    path = at(config, key)
    file = Path(path or "")
    if not file.is_file():
        return None, [f"{key}={path!r}: no such file; name a YAML list of agent loops"]
    try:
        return {entry["name"] for entry in yaml.safe_load(file.read_text())}, []
    except (yaml.YAMLError, TypeError, KeyError) as error:
        return None, [f"{key}={path!r}: not a list of {{name, _target_}} ({error}); correct it"]


# --- data ---------------------------------------------------------------------------------------


def _data_problems(
    config: Mapping[str, Any], mixed: MixedConfig | None, agents: set[str] | None
) -> list[str]:
    problems = []
    for key in ("data.train_files", "data.val_files"):
        if key in unset_keys(config):
            continue  # said by then
        files = files_at(config, key)
        try:
            found = read_sources(files)
        except ValueError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
            continue
        if mixed is None:
            continue
        rows: Counter[str] = Counter()
        for file in found:
            rows.update(file.rows_by_source)
            problems += [
                f"no ratio for source={source!r} ({file.path}, {count} rows): every source of "
                f"{key} needs one; add mixed.sources.{source}.ratio (0 leaves it out)"
                for source, count in file.rows_by_source.items()
                if source not in mixed.sources
            ]
        problems += [
            f"no rows of source={source!r} in {key} ({', '.join(files)}): it has "
            f"mixed.sources.{source}.ratio={ratio}; add a file with its rows or set its ratio to 0"
            for source, ratio in mixed.ratios.items()
            if not rows[source]
        ]
        problems += _row_agent_problems(files, mixed, agents)
    return problems


def _row_agent_problems(
    files: Sequence[str], mixed: MixedConfig, agents: set[str] | None
) -> list[str]:
    """Agents that rows name themselves, where the mixture leaves it to them."""
    left_to_rows = {name for name in mixed.ratios if mixed.sources[name].agent is None}
    if agents is None or not left_to_rows:
        return []
    problems = []
    for path in files:
        table = pq.read_table(path, columns=["data_source", "agent_name"])
        pairs = Counter(
            zip(table["data_source"].to_pylist(), table["agent_name"].to_pylist(), strict=True)
        )
        problems += [
            f"{path}: {count} rows of source={source!r} have agent_name={agent!r}: no such agent; "
            f"there are {', '.join(sorted(agents))}, or set mixed.sources.{source}.agent"
            for (source, agent), count in pairs.items()
            if source in left_to_rows and agent not in agents
        ]
    return problems


def _model_problems(config: Mapping[str, Any]) -> list[str]:
    """A model folder that is not there, and prompts that do not fit; a hub's name is left alone."""
    key = "actor_rollout_ref.model.path"
    path = Path(str(at(config, key))).expanduser()
    if not path.is_absolute() or key in unset_keys(config):
        return []
    if not (path / "config.json").is_file():
        return [f"{key}={str(path)!r}: no config.json there; set MODEL_PATH to a model folder"]
    return _prompt_problems(config, path)


def _prompt_problems(config: Mapping[str, Any], model: Path) -> list[str]:
    """Files with prompts longer than `data.max_prompt_length`.

    verl would drop such rows, and the mixture plan counts on every row.
    """
    from transformers import AutoTokenizer  # a second or two

    limit = at(config, "data.max_prompt_length")
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    problems = []
    for path in [*files_at(config, "data.train_files"), *files_at(config, "data.val_files")]:
        try:
            prompts = pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
        except (OSError, pa.ArrowException):
            continue  # said by the check of the data
        texts = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        lengths = [len(ids) for ids in encoded]
        too_long = [row for row, length in enumerate(lengths) if length > limit]
        if too_long:
            problems.append(
                f"{path}: {len(too_long)} of {len(prompts)} prompts are longer than "
                f"data.max_prompt_length={limit} tokens, first row {too_long[0]}, longest "
                f"{max(lengths)}; raise it or leave those rows out"
            )
    return problems


# --- numbers ------------------------------------------------------------------------------------

_LEAST: Mapping[str, float] = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 1,
}


def _number_problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, least in _LEAST.items():
        value = at(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(f"{key}={value!r}: want a whole number >= {least}")
    rate = at(config, f"{_ACTOR}.optim.lr")
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        problems.append(
            f"{_ACTOR}.optim.lr={rate!r}: want a number from 0 (learns nothing) to below 1"
        )
    n = at(config, f"{_ROLLOUT}.n")
    if not isinstance(n, int) or n < 2:
        problems.append(
            f"{_ROLLOUT}.n={n!r}: advantages compare the trajectories of one prompt, so at least 2 "
            "are needed (ROLLOUT_N)"
        )
    return problems


def _processes(config: Mapping[str, Any]) -> int:
    """Training processes over all nodes; 0 where a number is wrong."""
    per_node, nodes = at(config, "trainer.n_gpus_per_node"), at(config, "trainer.nnodes")
    return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else 0


def _batch_problems(config: Mapping[str, Any]) -> list[str]:
    """Sizes that verl must be able to split evenly; without even splits it pads or raises."""
    batch, n = at(config, "data.train_batch_size"), at(config, f"{_ROLLOUT}.n")
    mini = at(config, f"{_ACTOR}.ppo_mini_batch_size")
    processes = _processes(config)
    sizes = (batch, n, mini, processes)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return []  # said by the check of numbers
    problems = []
    if batch % mini:
        problems.append(
            f"data.train_batch_size={batch} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: "
            "the last mini-batch would be filled with padding; choose a divisor"
        )
    if (batch * n) % processes:
        problems.append(
            f"data.train_batch_size={batch} times {_ROLLOUT}.n={n} is no multiple of the "
            f"{processes} training processes (trainer.n_gpus_per_node * trainer.nnodes): each "
            "trains an equal part; change one of them"
        )
    if problems:
        return problems
    if not at(config, f"{_ACTOR}.use_dynamic_bsz"):
        key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), mini * n, processes)
    if not at(config, f"{_ROLLOUT}.log_prob_use_dynamic_bsz"):
        key = f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        problems += _micro_problems(key, at(config, key), batch * n, processes)
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
        return _gpu_problems(config)
    if at(config, "trainer.device") != "cpu":
        return []
    rules: Mapping[str, Any] = {
        f"{_ACTOR}.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{_ROLLOUT}.name": "hf",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        "trainer.nnodes": 1,
    }
    problems = [
        f"{key}={at(config, key)!r}: with trainer.device=cpu it must be {wanted!r}; "
        "set it, or leave it to config/profile/laptop.yaml"
        for key, wanted in rules.items()
        if at(config, key) != wanted
    ]
    processes = at(config, "trainer.n_gpus_per_node")
    units = at(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 8)
    cpus = at(config, "ray_kwargs.ray_init.num_cpus")
    if isinstance(processes, int) and isinstance(units, int):
        least = CPUS_PER_PROCESS * processes + units + 2
        if not isinstance(cpus, int) or cpus < least:
            problems.append(
                f"ray_kwargs.ray_init.num_cpus={cpus!r}: verl would wait for ever; it needs at "
                f"least {least} logical CPUs ({CPUS_PER_PROCESS} a training process, {units} for "
                "storage, 2 for itself), which may be more than the machine has"
            )
    gpus = at(config, "ray_kwargs.ray_init.num_gpus")
    if gpus != processes:
        problems.append(
            f"ray_kwargs.ray_init.num_gpus={gpus!r}: on a CPU it is a logical resource, one per "
            f"training process; set it to trainer.n_gpus_per_node={processes!r}"
        )
    return problems


def _gpu_problems(config: Mapping[str, Any]) -> list[str]:
    """Fewer GPUs than the run asks for; a cluster that is there already answers for its own."""
    wanted = at(config, "trainer.n_gpus_per_node")
    found = cuda_devices()
    if at(config, "ray_kwargs.ray_init.address") or not isinstance(wanted, int) or found >= wanted:
        return []
    return [
        f"trainer.device='cuda' with trainer.n_gpus_per_node={wanted}: this machine shows {found} "
        "NVIDIA GPUs; install the driver or ask for fewer, or train on the CPU (PROFILE=laptop)"
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
